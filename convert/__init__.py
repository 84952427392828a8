"""Conversion of checkpoints from Hugging Face to MLX; still empty."""
