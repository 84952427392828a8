"""Answer requests on the thread that uses MLX: jobs and their events, models, caches, tool calls, metrics."""
