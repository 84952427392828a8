"""Answer requests: models, their caches, the thread that uses MLX, and tool calls in a model's syntax."""
