"""Hugging Face weights to MLX pairs: `mlx-spec convert`."""
