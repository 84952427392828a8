"""Checkpoints and GGUF files that cannot be used end with one line that says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import sparse, tiny
from support.gguf_files import tokenizer_metadata, write
from support.refusals import refusal
from support.vocabularies import byte_level

from mlx_spec.checkpoint.config import Checkpoint, read_checkpoint
from mlx_spec.checkpoint.gguf_tokenizer import read_gguf_tokenizer
from mlx_spec.convert.plan import open_source
from mlx_spec.drafters.draft_model import load_language_model
from mlx_spec.errors import BadCheckpoint, NotFound, SpecError
from mlx_spec.hub import find
from mlx_spec.hub.inspect import inspect
from mlx_spec.model.read import read_model

Config = dict[str, Any]
Read = Callable[[Checkpoint], object]
LLAMA: Config = {"model_type": "llama", "hidden_size": 64}
UP = "model.layers.0.mlp.up_proj.weight"


def quantized(tensor: str, words: str, **settings: Any) -> tuple[str, Config, str, Read]:
    config = LLAMA | ({"quantization_config": settings} if settings else {})
    message = f"is quantized ... {words}, which MLX cannot read: get the model in full"
    return message, config, tensor, Checkpoint.check_quantizer


def lacking(kind: str, words: str, **more: Any) -> tuple[str, Config, str, Read]:
    """A config without keys that mlx-lm's class asks for."""
    base = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    base |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 264, "max_position_embeddings": 64}
    config = {**base, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "model_type": kind, **more}
    return f"as {kind}: config.json lacks {words}", config, UP, read_model


MINICPM = {"dim_model_base": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
MINICPM |= {"kv_lora_rank": 8, "scale_depth": 1.0, "scale_emb": 1.0}
CHECKPOINTS: list[tuple[str, Config, str, Read]] = [
    quantized(f"{UP}.absmax", "bitsandbytes", quant_method="bitsandbytes", load_in_4bit=True),
    quantized(UP, "bitsandbytes", load_in_8bit=True),
    quantized(f"{UP}.absmax", "bitsandbytes"),
    quantized("x.qweight", "to 8 bits by GPTQ", quant_method="gptq", bits=8),
    quantized("x.g_idx", "to 4 bits by GPTQ", quant_method="gptq", bits=4),
    quantized("x.qweight", "GPTQ", quant_method="gptq"),
    quantized(
        "x.weight_packed", "compressed-tensors", quant_method="compressed-tensors", format="pack-quantized"
    ),
    quantized("x.W_q", "HQQ", quant_method="hqq"),
    quantized(UP, "torchao", quant_method="torchao", quant_type="int4"),
    quantized(UP, "FP8", quant_method="fp8"),  # without scales
    quantized(UP, "some_new_one", quant_method="some_new_one"),
    # draft models
    ("as olmo: mlx-lm's file for it needs a package", {"model_type": "olmo"}, UP, load_language_model),
    (
        "the code it brings is never run: use a model of another",
        {"model_type": "new", "auto_map": {}},
        UP,
        load_language_model,
    ),
    ("has no model_type, and the code it brings is never run", {"auto_map": {}}, UP, load_language_model),
    # configs that mlx-lm does not read
    lacking("minicpm3", "rope_scaling: get a", **MINICPM),
    *(lacking(kind, "... more: get a") for kind in ("minimax", "mimo_v2_flash", "bailing_hybrid")),
]


@pytest.mark.parametrize(("words", "config", "tensor", "read"), CHECKPOINTS)
def test_checkpoints(words: str, config: Config, tensor: str, read: Read, tmp_path: Path) -> None:
    folder = sparse.checkpoint(tmp_path / "model", config, {tensor: ("U8", (4, 4))})
    message = refusal(BadCheckpoint, read, read_checkpoint(folder))
    assert all(part in message for part in words.split("..."))


@pytest.mark.parametrize("read", [read_checkpoint, lambda f: open_source(str(f)), lambda f: inspect(str(f))])
def test_an_adapter_names_its_base(read: Callable[[Path], object], tmp_path: Path) -> None:
    adapter = '{"peft_type": "LORA", "base_model_name_or_path": "owner/model"}'
    (tmp_path / "adapter_config.json").write_text(adapter)
    words = "holds a LORA adapter of owner/model, not a model: merge them"
    assert words in refusal(NotFound, read, tmp_path)


# --- GGUF


def refused(file: Path, error: type[SpecError] = BadCheckpoint) -> str:
    message = refusal(error, find, str(file))
    assert str(file) in message
    return message


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.type": "mmproj"}, "is a vision projector: give the file of the language model"),
        ({"general.type": "adapter"}, "is of the type adapter: give the file of a whole model"),
        ({"split.count": 3}, "is one of 3 parts: join them with"),
        ({"llama.expert_count": 8}, "of the architecture llama with experts"),
        ({"tokenizer.ggml.pre": "klingon"}, "cuts text as klingon before merging, which is not known"),
        ({"tokenizer.ggml.model": "rwkv"}, "has a tokenizer of the kind rwkv"),
        ({"tokenizer.ggml.tokens": None}, "has a tokenizer of the kind gpt2"),
        (
            {"tokenizer.ggml.merges": ["a c"]},
            "is damaged (Error while initializing BPE: Token `c` out of vocabulary)",
        ),
        ({"llama.attention.head_count": 3}, "is damaged (cannot reshape array"),
        ({"llama.embedding_length": None}, "is damaged (no 'embedding_length')"),
        ({"llama.embedding_length": 1}, "has 3 layers of width 64, its metadata promise 3 of 1: "),
        ({"llama.rope.dimension_count": 16}, "turns 16 of the 32 dimensions of a head, which is not read"),
        ({"llama.block_count": 2**32 - 1}, "its metadata promise 4294967295 of 64: "),
    ],
)
def test_metadata_that_are_refused(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    assert message in refused(write(tmp_path / "model.gguf", tiny.full(), "llama", **metadata))


def test_files_that_are_refused(tmp_path: Path, data: Path) -> None:
    whole = write(tmp_path / "whole.gguf", tiny.full(), "llama").read_bytes()
    file = tmp_path / "model.gguf"
    for content, message in [
        (b"", "is not a GGUF file"),
        (b"<html>", "is not a GGUF file"),
        (whole[:4] + b"\1" + whole[5:], "is GGUF of version 1"),
        (whole[:4] + b"\0\0\0\3" + whole[8:], "is GGUF of version"),  # big-endian
        *((whole[:size], "ends inside its header") for size in (5, 30, 300, 2000)),
        (whole[:16] + b"\xff" * 8 + whole[24:], "ends inside its header"),
        (whole[:-1], f"has {len(whole) - 1} bytes, its header promises {len(whole)}"),
    ]:
        file.write_bytes(content)
        assert message in refused(file)
    file.unlink()
    assert "there is no file" in refused(file, NotFound)
    assert "of the architecture mamba, GGUF is read of llama" in refused(write(file, None, "mamba"))
    assert "has no tensor token_embd.weight" in refused(write(file, None, "llama"))
    assert not data.exists() or not list(data.iterdir())


def test_types_and_tensors_that_are_refused(tmp_path: Path) -> None:
    block = np.zeros((256, 66), np.uint8)
    file = write(
        tmp_path / "model.gguf", tiny.full(), "llama", extra={"blk.0.attn_q.weight": (block, "IQ2_XXS")}
    )
    assert "holds tensors of type IQ2_XXS, which are not read: get it as Q8_0" in refused(file)
    write(file, tiny.full(), "llama", extra={"blk.0.attn_sinks.weight": np.zeros(4, np.float32)})
    assert "tensors that llama is not known to have (blk.0.attn_sinks.weight)" in refused(file)


@pytest.mark.parametrize("name", ["default", "qwen35", "kimi-k2", "superbpe", None])
def test_other_cuts_of_text(name: str | None) -> None:
    metadata = {k: v for k, v in tokenizer_metadata(byte_level(), pre=name).items() if v is not None}
    words = "does not say how text is cut" if name is None else f"as {name} before merging"
    assert words in refusal(BadCheckpoint, read_gguf_tokenizer, Path("x.gguf"), metadata)
