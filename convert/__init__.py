"""Convert Hugging Face and GGUF checkpoints to pairs (`mlx-spec convert`), and train drafters."""
