"""Small GGUF files, written by llama.cpp's own package: names, types and metadata are not ours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from tokenizers import Tokenizer

Quantization = gguf.GGMLQuantizationType
SUFFIXES = (".weight", ".bias")
NORMS_PLUS_ONE = ("gemma2", "gemma3")
TOKENS = [*(f"<{i}>" for i in range(3)), "a", "b", "ab", *(f"<{i}>" for i in range(6, 256))]
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.token_type": [3, 3, 3] + [1] * 253,
    "tokenizer.ggml.eos_token_id": 2,
}


def even(model: nn.Module) -> nn.Module:
    """Round the weights to bfloat16, as published ones are, so that half precision holds them exactly."""
    model.apply(lambda array: array.astype(mx.bfloat16).astype(mx.float32))
    return model


def metadata_of(args: Any, architecture: str) -> dict[str, Any]:
    """Return the metadata of a model as converters write them."""
    found = {
        "embedding_length": args.hidden_size,
        "feed_forward_length": args.intermediate_size,
        "block_count": args.num_hidden_layers,
        "context_length": vars(args).get("max_position_embeddings") or 512,
        "attention.head_count": args.num_attention_heads,
        "attention.head_count_kv": args.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(args.rms_norm_eps),
    }
    if architecture != "qwen2":
        found["attention.key_length"] = found["attention.value_length"] = args.head_dim
    if architecture != "gemma4":
        found["rope.freq_base"] = float(args.rope_theta)
    return {f"{architecture}.{key}": value for key, value in found.items()}


def tokenizer_metadata(tokenizer: Tokenizer, **changes: Any) -> dict[str, Any]:
    """The metadata that llama.cpp's converter writes for a tokenizer of bytes."""
    model, added = json.loads(tokenizer.to_str())["model"], tokenizer.get_added_tokens_decoder()
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
    kinds = [(3 if added[i].special else 4) if i in added else 1 for i in range(len(tokens))]
    found = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return found | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def write(
    file: Path,
    model: nn.Module | None,
    architecture: str,
    kinds: dict[str, Quantization] | None = None,
    extra: Mapping[str, Any] = MappingProxyType({}),
    **metadata: Any,
) -> Path:
    """Write a file with the weights of `model`.

    `kinds`: types by a part of the tensor's name, else F32. `extra`: other tensors, perhaps with the name of
    their type. Values of `metadata` that are None are left out.
    """
    writer = gguf.GGUFWriter(file, architecture)
    own = metadata_of(model.args, architecture) if model is not None else {}
    for key, value in (own | TOKENIZER | metadata).items():
        _add(writer, key, value)
    for name, values in extra.items():
        array, kind = values if isinstance(values, tuple) else (values, "F32")
        writer.add_tensor(name, array, raw_dtype=Quantization[kind])
    own_tensors = tensors(model, architecture) if model is not None else {}
    for name in own_tensors.keys() - extra.keys():
        values = own_tensors[name]
        kind = next((kind for part, kind in (kinds or {}).items() if part in name), Quantization.F32)
        if values.ndim < 2:
            kind = Quantization.F32
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def tensors(model: nn.Module, architecture: str) -> dict[str, np.ndarray]:
    """Return the tensors of a model under llama.cpp's names, changed as its converter changes them."""
    enum = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(enum, model.args.num_hidden_layers)
    found = {}
    for name, array in tree_flatten(model.parameters()):
        values = np.array(array.astype(mx.float32))
        new = str(names.get_name(name, try_suffixes=SUFFIXES))
        new = new if new.endswith(SUFFIXES) else f"{new}.weight"
        heads = {"attn_q": model.args.num_attention_heads, "attn_k": model.args.num_key_value_heads}
        part = new.split(".")[-2]
        if architecture == "llama" and part in heads:
            halves = values.reshape(heads[part], 2, -1, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if architecture in NORMS_PLUS_ONE and part.endswith("norm"):
            values = values + 1
        found[new] = values
    return found


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    if key == "general.alignment":
        writer.add_custom_alignment(value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif value is not None:
        kinds[type(value)](key, value)
