"""What a checkpoint says and what its weights show: files, sizes, context, quantizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support import sparse

from mlx_spec.checkpoint.config import Checkpoint, context_length, read_checkpoint, vocab_size
from mlx_spec.checkpoint.headers import INDEX, choose_files, read_headers
from mlx_spec.checkpoint.quantizers import precision
from mlx_spec.checkpoint.repairs import repair_config
from mlx_spec.convert.plan import open_source
from mlx_spec.hub.inspect import inspect

ONE, ALL = ["a", "b"], ["a", "b", "c", "d"]
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SHARDS = {FIRST: ["a", "b"], SECOND: ["c", "d"]}
WHOLE = {"model.safetensors": ALL}
LLAMA: dict[str, Any] = {"model_type": "llama", "hidden_size": 64}
F32 = "F32"


# --- the files of a model


@pytest.mark.parametrize(
    ("found", "index", "chosen", "missing"),
    [
        (WHOLE, {}, [*WHOLE], []),
        (SHARDS, {}, [*SHARDS], []),
        (SHARDS, {"a": FIRST, "c": SECOND}, [*SHARDS], []),
        # an index that names files which are not there
        (WHOLE, {"a": FIRST, "c": SECOND}, [*WHOLE], []),
        (
            SHARDS,
            {name: f"model-0000{i}-of-00004.safetensors" for i, name in enumerate(ALL, 1)},
            [*SHARDS],
            [],
        ),
        ({FIRST: ONE}, {"a": FIRST, "c": SECOND}, [FIRST], [SECOND]),
        ({}, {"a": "model.safetensors"}, [], ["model.safetensors"]),
        # files beside those that the index names
        ({**SHARDS, **WHOLE}, {"a": FIRST, "c": SECOND}, [*SHARDS], []),
        ({**SHARDS, **WHOLE}, {"a": "model.safetensors"}, [*WHOLE], []),
        (
            {**WHOLE, "model-mtp.safetensors": ["mtp"]},
            {"a": "model.safetensors"},
            ["model-mtp.safetensors", *WHOLE],
            [],
        ),
        ({"weights.safetensors": ALL}, {"a": "weights.safetensors"}, ["weights.safetensors"], []),
        # no index
        ({**WHOLE, "model.fp16.safetensors": ALL}, {}, [*WHOLE], []),
        ({**WHOLE, FIRST: ONE}, {}, [*WHOLE], []),
        ({**WHOLE, "model-mtp.safetensors": ["mtp"]}, {}, ["model-mtp.safetensors", *WHOLE], []),
        ({FIRST: ONE}, {}, [FIRST], [SECOND]),
    ],
)
def test_the_files_that_make_up_a_model(
    found: dict[str, list[str]], index: dict[str, str], chosen: list[str], missing: list[str]
) -> None:
    assert choose_files("here", found, index) == (sorted(chosen), missing, None)


def test_files_between_which_nothing_decides() -> None:
    for index in ({}, {"a": "model-00001-of-00009.safetensors"}):
        chosen, _, problem = choose_files("here", {**WHOLE, **SHARDS}, index)
        assert not chosen and problem is not None
        assert f"here holds a in {FIRST} and in model.safetensors, and no {INDEX} names one" in problem


def test_all_readers_read_the_same_files(tmp_path: Path) -> None:
    """Whoever reads a folder with a stray file, and with a stale index, sees the same weights."""
    folder = sparse.checkpoint(tmp_path / "model", sparse.QWEN3, {"a.weight": ("F32", (4,))})
    mx.save_safetensors(str(folder / FIRST), {"a.weight": mx.ones(4)})
    mx.save_safetensors(str(folder / SECOND), {"b.weight": mx.ones(2)})
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a.weight": FIRST, "b.weight": SECOND}}))
    source = open_source(str(folder))
    assert [file.name for file in read_headers(folder).files] == [FIRST, SECOND]
    assert {name: array.tolist() for name, array in source.tensors().items()} == {
        "a.weight": [1.0] * 4,
        "b.weight": [1.0] * 2,
    }
    assert (
        source.headers.size == inspect(str(folder)).size == sum((folder / f).stat().st_size for f in SHARDS)
    )
    (folder / FIRST).unlink()  # the index is stale now, and the stray file has what is missing but for one
    assert Checkpoint(folder).is_complete is False
    (folder / SECOND).unlink()
    assert Checkpoint(folder).is_complete and [file.name for file in read_headers(folder).files] == [
        "model.safetensors"
    ]
    (folder / "config.json").unlink()
    assert not Checkpoint(folder).is_complete


# --- config.json


TABLE = {"model.embed_tokens.weight": (300, 64), "model.norm.weight": (64,)}
HEADS = {
    "model.layers.1.self_attn.k_proj.weight": (32, 64),
    "model.layers.1.self_attn.o_proj.weight": (64, 128),
}
HEAD = {"lm_head.weight": (300, 64)}
VISION = {
    "vision_tower.layers.7.self_attn.k_proj.weight": (999, 9),
    "model.visual.embed_tokens.weight": (9, 9),
}


def infos(shapes: dict[str, tuple[int, ...]], dtype: str = F32) -> Any:
    from mlx_spec.checkpoint.headers import TensorInfo

    return {name: TensorInfo(dtype, shape, 0, 0) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("config", "shapes", "expected"),
    [
        (LLAMA, TABLE | HEAD, {"vocab_size": 300, "tie_word_embeddings": False}),
        (LLAMA, TABLE, {"vocab_size": 300, "tie_word_embeddings": True, "rms_norm_eps": 1e-6}),
        (LLAMA | {"vocab_size": 7}, TABLE, {"vocab_size": 7}),  # config.json is not silent
        (LLAMA | {"num_key_value_heads": 2}, TABLE | HEADS, {"head_dim": 16, "num_attention_heads": 8}),
        (LLAMA | {"head_dim": 8}, TABLE | HEADS | VISION, {"num_key_value_heads": 4, "num_hidden_layers": 2}),
        (LLAMA | {"sliding_window": 16.0, "rope_theta": 1e4}, {}, {"sliding_window": 16, "rope_theta": 1e4}),
        ({"model_type": "gpt2", "hidden_size": 4, "n_positions": 9}, {}, {"n_ctx": 9}),
        (
            {"model_type": "exaone4", "hidden_size": 4, "sliding_window_pattern": 4},
            {},
            {"sliding_window_pattern": "LLLG"},
        ),
        (
            {"model_type": "granitemoehybrid", "layer_types": ["linear_attention", "full_attention"]},
            {},
            {"layer_types": ["mamba", "attention"], "position_embedding_type": "nope"},
        ),
        ({"model_type": "mamba2", "hidden_size": 8, "expand": 2}, {}, {"intermediate_size": 16}),
        ({"model_type": "apertus", "hidden_size": 8}, {}, {"qk_norm": True, "mlp_bias": False}),
    ],
)
def test_what_config_json_leaves_out(config: Any, shapes: Any, expected: dict[str, Any]) -> None:
    found = repair_config(config, infos(shapes))
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("config", "shapes", "text", "top"),
    [
        (
            {"model_type": "gemma3", "text_config": {"hidden_size": 64, "sliding_window": 1024}},
            {f"language_model.{name}": shape for name, shape in TABLE.items()},
            {
                "vocab_size": 300,
                "num_attention_heads": 8,
                "head_dim": 256,
                "max_position_embeddings": 131_072,
            },
            {"vocab_size": 300},
        ),
        (
            {
                "model_type": "mistral3",
                "tie_word_embeddings": True,
                "text_config": {"tie_word_embeddings": False},
            },
            TABLE,
            {"tie_word_embeddings": True},
            {},
        ),
        (
            {"model_type": "qwen3_vl", "tie_word_embeddings": False, "text_config": {"hidden_size": 64}},
            TABLE | HEAD,
            {"tie_word_embeddings": False, "rope_theta": 5e5},
            {},
        ),
        ({"model_type": "qwen3_5_text", "vocab_size": 9}, {}, {"vocab_size": 9}, {"model_type": "qwen3_5"}),
    ],
)
def test_composite_configs(config: Any, shapes: Any, text: dict[str, Any], top: dict[str, Any]) -> None:
    found = repair_config(config, infos(shapes))
    assert {key: found["text_config"][key] for key in text} == text
    assert {key: found[key] for key in top} == top


def test_packed_weights_show_no_width() -> None:
    packed = {name: (shape[0], 8) for name, shape in HEADS.items()}
    found = repair_config(LLAMA | {"head_dim": 8}, infos(packed, "U32"))
    assert found["num_key_value_heads"] == 4 and "num_attention_heads" not in found


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"seq_length": 8192}, 8192),
        ({"max_sequence_length": 16_384, "max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 8192, "model_max_length": 131_072}, 131_072),
        ({"max_position_embeddings": 32_768, "rope_scaling": YARN}, 131_072),
        ({"max_position_embeddings": 40_960, "rope_scaling": YARN}, 131_072),
        ({"max_position_embeddings": 262_144, "rope_scaling": YARN}, 262_144),
        ({"max_position_embeddings": 32_768, "rope_parameters": {**YARN, "rope_theta": 1e6}}, 131_072),
        ({"max_position_embeddings": 32_768, "rope_parameters": {"full_attention": YARN}}, 131_072),
        ({"text_config": {"max_position_embeddings": 32_768, "rope_scaling": YARN}}, 131_072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16_384),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", "factor": 2}}, 4096),
        (
            {"max_position_embeddings": 131_072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            131_072,
        ),
        ({"max_position_embeddings": 131_072, "rope_scaling": {"type": "longrope", "factor": 32.0}}, 131_072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "mrope", "factor": None}}, 4096),
        (
            {
                "model_type": "gemma3_text",
                "max_position_embeddings": 131_072,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            131_072,
        ),
        ({}, None),
    ],
)
def test_the_longest_context(config: dict[str, Any], expected: int | None) -> None:
    assert context_length(repair_config(config)) == expected


def test_the_size_of_the_vocabulary_is_the_one_of_the_weights(tmp_path: Path) -> None:
    config = {"model_type": "gemma3", "text_config": {"hidden_size": 8}}
    folder = sparse.checkpoint(
        tmp_path, config, {"language_model.model.embed_tokens.weight": ("BF16", (77, 8))}
    )
    assert vocab_size(read_checkpoint(folder).config) == inspect(str(folder)).vocab_size == 77


# --- who quantized, and what is not a model


WEIGHT = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    "settings",
    [
        None,
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "mxfp4"},
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        {"bits": 4, "group_size": 64},
        {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]},
    ],
)
def test_quantizers_that_mlx_lm_reads(tmp_path: Path, settings: Any) -> None:
    config = LLAMA | ({} if settings is None else {"quantization_config": settings})
    stored = read_checkpoint(sparse.checkpoint(tmp_path, config, {WEIGHT: ("F32", (4, 4))}))
    stored.check_quantizer()
    assert not stored.is_fp8 and stored.config.get("quantization_config") == settings


def test_the_settings_of_modelopt_may_have_their_own_file(tmp_path: Path) -> None:
    stored = sparse.checkpoint(tmp_path, LLAMA, {WEIGHT: (F32, (4, 4))})
    (stored / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    assert precision({}, read_checkpoint(stored).config) == "ModelOpt NVFP4"
    (stored / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": {"quant_method": "awq"}}))
    assert precision({}, read_checkpoint(stored).config) == "AWQ 4-bit"  # config.json counts first
