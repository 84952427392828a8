"""Read and write checkpoints: config, headers, sizes, layouts, repairs, GGUF.

Only reading a GGUF file and the layouts of weights need MLX.
"""
