"""Read and write checkpoints: config, headers, sizes, layouts, repairs, GGUF.

Only the files that read or write tensors need MLX: layouts, left_out, writer and gguf_model.
"""
