"""How the demo pair is made: facts by introspection, tokenizer, target, drafter, checkpoints.

Run `python -m demo_pair --help` in benchmarks/. It needs PyTorch, sentencepiece, tokenizers and
safetensors; mlx_spec itself needs no PyTorch. The shipped pair was made with Python 3.11, whose docstrings
it knows.
"""
