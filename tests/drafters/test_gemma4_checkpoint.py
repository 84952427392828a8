"""Gemma 4 assistants that are incomplete, damaged or made for another target are refused by name."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from checkpoints import edit_tensors, read

import mlx_spec
from mlx_spec.drafters import FAMILIES, open_drafter
from mlx_spec.drafters.gemma4 import AssistantConfig, check_fit
from mlx_spec.errors import BadCheckpoint, Mismatch

GOLDEN = Path(__file__).parents[1] / "golden"
BUNDLED = Path(mlx_spec.__file__).parent / "demo" / "smollm2"
SLIDING, FULL = "sliding_attention", "full_attention"


def config_of(pair: str, part: str) -> dict:
    return read(GOLDEN / pair / part)


# --- config.json


@pytest.mark.parametrize("pair", ["e2b", "e4b", "26b", "31b", "12b"])
def test_made_for_each_other(pair):
    config = AssistantConfig.from_dict(config_of(pair, "assistant"))
    check_fit(config, config_of(pair, "target"))
    with pytest.raises(Mismatch, match="use the assistant made for this target"):
        check_fit(config, config_of({"e2b": "e4b", "31b": "26b"}.get(pair, "31b"), "target"))


@pytest.mark.parametrize(
    ("where", "key", "value", "message"),
    [
        ("top", "num_centroids", ..., "has no 'num_centroids'"),
        ("text", "layer_types", ..., "has no 'layer_types'"),
        ("top", "backbone_hidden_size", "64", "backbone_hidden_size' = '64', which is no int"),
        ("top", "num_centroids", 31, "num_centroids 31 does not divide its vocab_size 512"),
        ("top", "tie_word_embeddings", False, "LM head of its own"),
        ("text", "layer_types", [SLIDING, "chunked_attention"], "chunked_attention"),
        ("text", "rope_parameters", {FULL: {"rope_theta": 1e6}}, "has no 'sliding_attention'"),
    ],
)
def test_a_value_that_is_missing_or_bad(where, key, value, message):
    config = config_of("e2b", "assistant")
    part = config["text_config"] if where == "text" else config
    part.pop(key) if value is ... else part.update({key: value})
    with pytest.raises(BadCheckpoint, match=re.escape(message)):
        AssistantConfig.from_dict(config)


# --- the target


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", 128, "expects hidden size 64, target has 128"),
        ("vocab_size", 1024, "expects vocabulary size 512, target has 1024"),
        ("num_key_value_heads", 1, "expects sliding_attention K/V heads 2, target has 1"),
        ("head_dim", 64, "expects sliding_attention head dimension 16, target has 64"),
        ("sliding_window", 32, "expects sliding window 16, target has 32"),
        ("layer_types", [FULL] * 4, "reads sliding_attention K/V, the target has ['full_attention']"),
        (
            "rope_parameters",
            {FULL: {"partial_rotary_factor": 0.5}},
            "expects full_attention partial_rotary_factor 0.25, target has 0.5",
        ),
    ],
)
def test_misfit(key, value, message):
    config = AssistantConfig.from_dict(config_of("26b", "assistant"))
    target = config_of("26b", "target")
    target["text_config"][key] = value
    with pytest.raises(Mismatch, match=re.escape(message)):
        check_fit(config, target)


def test_only_layers_with_a_cache_count():
    """In the last layers of E2B nothing is stored: of [s s s s f s | s s s f] the drafter reads 4 and 5."""
    config, target = AssistantConfig.from_dict(config_of("e2b", "assistant")), config_of("e2b", "target")
    target["text_config"]["num_kv_shared_layers"] = 6
    with pytest.raises(Mismatch, match="reads full_attention K/V"):
        check_fit(config, target)


@pytest.mark.parametrize("layer_types", [{}, {"layer_types": None}], ids=["absent", "null"])
def test_target_without_layer_types(layer_types):
    """All layers of a Llama are full attention; its config.json does not say so."""
    target = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152}
    target |= {"num_hidden_layers": 30, "rope_parameters": {"rope_theta": 1e5}, **layer_types}
    config = AssistantConfig.from_dict(read(BUNDLED))
    check_fit(config, target)
    with pytest.raises(Mismatch, match="expects full_attention K/V heads 3, target has 9"):
        check_fit(config, target | {"num_key_value_heads": 9})


# --- the tensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "e2b" / "assistant", tmp_path / "assistant"))


def open_in(folder: Path):
    return open_drafter(folder, read(folder), config_of("e2b", "target"))


KEY = "model.layers.0.self_attn.k_proj.weight"


def test_copy_of_the_head_is_ignored(folder):
    name = "model.embed_tokens.weight"
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[name]}))
    assert open_in(folder).vocab_size == 512


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.layers.2.layer_scalar": None}, "lacks the tensors model.layers.2.layer_scalar"),
        (
            {"pre_projection.weight": mx.zeros((64, 64))},
            "pre_projection.weight floats [64, 64] instead of floats [64, 128]",
        ),
        (
            {"masked_embedding.token_ordering": mx.zeros(512)},
            "masked_embedding.token_ordering floats [512] instead of integers [512]",
        ),
    ],
)
def test_a_tensor_that_is_missing_or_of_no_use_or_of_another_form(folder, changes, message):
    def edit(tensors: dict[str, mx.array]) -> None:
        for name, value in changes.items():
            tensors.pop(name, None)
            tensors.update({} if value is None else {name: value})

    edit_tensors(folder, edit)
    with pytest.raises(BadCheckpoint, match=re.escape(message)):
        open_in(folder)


# --- the registry


@pytest.mark.parametrize("model_type", [None, "eagle1", "../llama", "no_such_model"])
def test_unknown_family(model_type, tmp_path):
    with pytest.raises(BadCheckpoint) as caught:
        open_drafter(tmp_path, {"model_type": model_type}, {})
    text = str(caught.value)
    assert "has no 'model_type'" in text if model_type is None else repr(model_type) in text
    assert model_type is None or all(family in text for family in FAMILIES)
