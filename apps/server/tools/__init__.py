"""Tool calls: one file reads and writes the calls of a syntax, or of all syntaxes with JSON.

Read `syntax.py`, then a syntax (`json_calls.py`, `gemma.py`), then `formats.py`, which finds a model's.
"""
