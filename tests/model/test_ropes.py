"""Rotary embeddings: the parameters that config.json states hold, or the model is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support import pairs, tiny, tiny_configs

from mlx_spec.checkpoint.config import context_length, read_checkpoint
from mlx_spec.checkpoint.rope_formulas import Rotation, is_split, stated_ropes, stated_rotation
from mlx_spec.load import load
from mlx_spec.model.read import read_model
from mlx_spec.model.ropes import StatedRope, apply_stated_ropes
from mlx_spec.model.tree import ROPE, rope_owners

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden/ropes/ropes.json").read_text())
YARN = {"rope_type": "yarn", "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"rope_type": "longrope", "type": "longrope", "factor": 4.0, "original_max_position_embeddings": 32}
LONG |= {"short_factor": [1.5] * 16, "long_factor": [3.0] * 16}
KEY = "max_position_embeddings"
IDS = mx.array([[(7 * i * i + 3 * i) % 251 for i in range(24)]])


def turned(x: mx.array, rotation: Rotation, *, traditional: bool) -> mx.array:
    """Rotate [1, H, T, D] by cosines and sines, as transformers does."""
    angles = mx.arange(x.shape[2])[:, None] * mx.array(rotation.angles)
    cos, sin = mx.cos(angles) * rotation.factor, mx.sin(angles) * rotation.factor
    half = len(rotation.angles)
    a, b = (x[..., 0::2], x[..., 1::2]) if traditional else (x[..., :half], x[..., half:])
    parts = [a * cos - b * sin, b * cos + a * sin]
    return mx.stack(parts, axis=-1).reshape(x.shape) if traditional else mx.concatenate(parts, axis=-1)


@pytest.mark.parametrize("name", GOLDEN)
def test_angles_are_those_of_transformers(name: str) -> None:
    golden = GOLDEN[name]
    (rope,) = stated_ropes(golden["config"]).values()
    found = stated_rotation(rope, 32)
    np.testing.assert_allclose(found.angles, golden["short"], rtol=2e-6)
    assert found.factor == pytest.approx(golden["factor"], rel=1e-6)
    if is_split(rope):
        np.testing.assert_allclose(stated_rotation(rope, 32, is_long=True).angles, golden["long"], rtol=2e-6)


@pytest.mark.parametrize("traditional", [False, True])
def test_an_embedding_with_stated_angles_rotates_by_them(traditional: bool) -> None:
    rotation = Rotation((1.0, 0.3, 0.02, 0.0), 1.2)
    x = mx.random.normal((1, 2, 40, 8), key=mx.random.key(1))
    found = StatedRope(8, traditional, rotation)(x)
    assert mx.allclose(found, turned(x, rotation, traditional=traditional), atol=1e-5)


def built(kind: str, rope: dict[str, Any]) -> nn.Module:
    """A tiny model of one of mlx-lm's classes, with rotary parameters applied."""
    inner = tiny_configs.NESTED.get(kind, kind)
    model = tiny.make(kind, rope_scaling=rope)
    said = {**tiny_configs.COMMON, **tiny_configs.SPECIAL.get(inner, {}), "model_type": inner}
    apply_stated_ropes(model, said | {"rope_scaling": rope})
    return model


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("qwen3_moe", {}),  # mlx-lm's class reads no scaling
        ("qwen3_vl_moe", {}),
        ("glm4_moe", {}),
        ("cohere", {}),
        ("llama", {"attention_factor": 1.5}),
        ("gpt_oss", {"truncate": False}),
        ("deepseek_v3", {"attention_factor": 1.0}),
    ],
)
def test_a_scaling_that_mlx_lm_leaves_out_holds(kind: str, more: dict[str, Any]) -> None:
    model = built(kind, {**YARN, **more})
    owners = rope_owners(model)
    assert owners
    for owner in owners:
        rope = owner[ROPE]
        (stated,) = stated_ropes({**tiny_configs.COMMON, "rope_scaling": {**YARN, **more}}).values()
        right = stated_rotation(stated, rope.dims)
        x = mx.random.normal((1, 2, 40, rope.dims), key=mx.random.key(2))
        assert mx.allclose(rope(x), turned(x, right, traditional=rope.traditional), atol=1e-4)


def test_embeddings_of_another_base_keep_it() -> None:
    """The sliding layers of Gemma 3 have a base of their own, and no scaling."""
    changed = {"rope_scaling": YARN, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    model = tiny.make("gemma3_text", **changed)
    apply_stated_ropes(model, {**tiny_configs.COMMON, **changed, "model_type": "gemma3_text"})
    kinds = [type(owner[ROPE]).__name__ for owner in rope_owners(model)]
    assert sorted(set(kinds)) == ["RoPE", "YarnRoPE"]


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_longrope_turns_short_texts_by_short_factors(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The context ends before transformers would turn the whole text by other angles."""
    dims = 16 if kind == "deepseek_v3" else 32
    scaling = {**LONG, "short_factor": [1.5] * (dims // 2), "long_factor": [3.0] * (dims // 2)}
    linear = {"rope_type": "linear", "type": "linear", "factor": 1.5}
    right = built(kind, linear)
    folder = pairs.save(right, tmp_path, rope_scaling=scaling)
    model, config = read_model(read_checkpoint(folder))
    assert config["rope_scaling"] == scaling and context_length(config) == 32
    factor = stated_rotation(next(iter(stated_ropes(config).values())), dims).factor
    for owner in rope_owners(right):
        owner[ROPE] = StatedRope(dims, owner[ROPE].traditional, Rotation(_angles(owner[ROPE]), factor))
    assert mx.allclose(model(IDS), right(IDS), atol=1e-3)
    assert "longrope of config.json" in capsys.readouterr().err


def _angles(rope: nn.RoPE) -> tuple[float, ...]:
    return tuple(rope.scale * rope.base ** (-i / rope.dims) for i in range(0, rope.dims, 2))


def test_phi_takes_long_factors_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    built("phi3", {**LONG, "short_factor": [1.5] * 8, "long_factor": [3.0] * 8})
    assert "transformers takes short_factor up to 32 tokens" in capsys.readouterr().err


def test_a_dynamic_rope_does_not_lengthen_the_context(tmp_path: Path) -> None:
    """Past it, its angles depend on the longest position of a pass: drafts would change the text."""
    scaling = {"rope_type": "dynamic", "type": "dynamic", "factor": 4.0}
    folder = pairs.save(tiny.make("llama"), tmp_path, rope_scaling=scaling, **{KEY: 64})
    pairs_of = [load(folder, "none"), load(folder, "lookup", num_draft_tokens=5)]
    prompt = (list(range(40, 50)) * 6)[:50]
    plain, drafted = ([t for r in p.generate(prompt, max_tokens=60) for t in r.tokens] for p in pairs_of)
    assert plain == drafted and len(plain) == 14
