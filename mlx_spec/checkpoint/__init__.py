"""Read and write checkpoints: config, headers, sizes, layouts, repairs, GGUF.

Only layouts, left_out, writer and gguf_model always need MLX; functions that read tensors import it.
"""
