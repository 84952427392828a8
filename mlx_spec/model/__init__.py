"""The target: an mlx-lm model with hooks, caches that roll back, and trees of draft tokens."""
