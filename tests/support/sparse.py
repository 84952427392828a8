"""Checkpoints with real headers and no data: files of any size that take no room."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_spec.checkpoint.weights import BITS

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]  # name -> dtype, shape


def write(file: Path, tensors: Tensors) -> Path:
    """A safetensors file of zeros."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
    return file


def checkpoint(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    """A folder with config.json, tokenizer.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    write(folder / "model.safetensors", tensors)
    return folder


# Published shapes: hidden, layers, window, heads, K/V heads, K/V heads of full attention.
GEMMA4 = {
    "E2B": (1536, 35, 512, 8, 1, None),
    "E4B": (2560, 42, 512, 8, 2, None),
    "12B": (3840, 48, 1024, 16, 8, 1),
    "26B-A4B": (2816, 30, 1024, 16, 8, 2),
    "31B": (5376, 60, 1024, 32, 16, 4),
}


def gemma4(size: str) -> dict[str, Any]:
    """config.json of a published target, the keys that matter."""
    hidden, layers, window, heads, kv_heads, global_kv_heads = GEMMA4[size]
    text = {
        "hidden_size": hidden,
        "vocab_size": 262144,
        "num_hidden_layers": layers,
        "sliding_window": window,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_global_key_value_heads": global_kv_heads,
        "head_dim": 256,
        "global_head_dim": 512,
        "max_position_embeddings": 131072,
    }
    return {"model_type": "gemma4_unified" if size == "12B" else "gemma4", "text_config": text}


def gemma4_assistant(size: str) -> dict[str, Any]:
    """config.json of its drafter."""
    text = gemma4(size)["text_config"] | {"hidden_size": 256, "num_hidden_layers": 4}
    kind = "gemma4_unified_assistant" if size == "12B" else "gemma4_assistant"
    return {"model_type": kind, "backbone_hidden_size": GEMMA4[size][0], "text_config": text}


QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 4096,
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_position_embeddings": 40960,
}
