"""What a model, a cache or a tree of drafts is refused with, by name; a target goes on after it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import CacheList, ConcatenateKVCache, KVCache, RotatingKVCache
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE
from support import tiny
from support.targets import Foreign, write
from support.tiny_configs import COMMON

from mlx_spec.errors import BadCheckpoint, InvalidValue, Mismatch, NotRewindable, SpecError
from mlx_spec.model.caches import Caches
from mlx_spec.model.probe import check_rows
from mlx_spec.model.ropes import apply_stated_ropes
from mlx_spec.model.target import LMTarget
from mlx_spec.types import FeatureSpec

YARN = {"rope_type": "yarn", "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGEST = 32
DYNAMIC = {"rope_scaling": {"type": "dynamic", "rope_type": "dynamic", "factor": 4.0}}
Call = Callable[[], object]


def stated(kind: str, **rope: Any) -> Call:
    """Apply rotary parameters that the class of a model does not read."""
    config = {**COMMON, "rope_scaling": YARN | rope, "model_type": kind}
    return lambda: apply_stated_ropes(tiny.make(kind), config)


def check(kind: str, layers: tuple[int, ...] = (), **settings: Any) -> None:
    """Check passes of several rows, at a length where dynamic angles change."""
    model = tiny.make(kind, **settings)
    make = partial(LMTarget, model, FeatureSpec(hidden_layers=layers))
    if settings:
        check_rows(model, make)  # they are right at short lengths
    check_rows(model, make, [LONGEST, LONGEST + 1])


def quantized(*dims: int) -> mx.array:
    """Write a row of K and V with heads of these dimensions. Return the scales of K."""
    caches = Caches.of_model(Foreign(KVCache(), KVCache()), 4)
    caches.begin(1)
    keys, _ = caches.attention[0].update_and_fetch(*(mx.zeros((1, 1, 1, count)) for count in dims))
    scales: mx.array = keys[1]
    return scales


def with_rope(rope: nn.Module | None) -> nn.Module:
    model = tiny.full()
    model.layers[1].self_attn.rope = rope
    return model


# Ministral scales queries by position: the rows of a tree would get those of a chain.
SCALED = {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}
TREELESS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "recurrent": (tiny.recurrent, "its state is recurrent and follows one path: draft a chain"),
    "dynamic": (
        lambda: with_rope(DynamicNTKScalingRoPE(32, 64, False, 1e4, 2.0)),
        "layer 1 has positions by DynamicNTKScalingRoPE",
    ),
    "no rope": (lambda: with_rope(None), "layer 1 has no rotary embedding"),
    "scaled": (partial(tiny.make, "ministral3", rope_parameters=SCALED), "calculates with positions"),
}
CASES: list[tuple[Call, type[SpecError], str]] = [
    (stated("qwen"), BadCheckpoint, "yarn rope, which mlx-lm's class for qwen does not read"),
    (stated("qwen3_moe", factor="four"), BadCheckpoint, "cannot be used"),
    (partial(check, "iquestloopcoder", (1,)), Mismatch, "does not call its layers one by one"),
    *(
        (
            partial(check, kind, max_position_embeddings=LONGEST, **DYNAMIC),
            NotRewindable,
            "at a length of 33 tokens",
        )
        for kind in ("llama", "qwen2", "gemma3_text", "deepseek_v3", "qwen3_next")
    ),
    *(
        (partial(Caches.of_model, Foreign(cache)), NotRewindable, name)
        for cache, name in (
            (ConcatenateKVCache(), "ConcatenateKVCache"),
            (RotatingKVCache(max_size=8, keep=4), "RotatingKVCache"),
            (CacheList(KVCache(), ConcatenateKVCache()), "ConcatenateKVCache"),
        )
    ),
    (partial(quantized, 24, 24), InvalidValue, "divisible by 32, this target has (24, 24)"),
]


@pytest.mark.parametrize(("call", "kind", "words"), CASES)
def test_messages(call: Call, kind: type[SpecError], words: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert words in str(caught.value)


@pytest.mark.parametrize("name", TREELESS)
def test_messages_about_trees(name: str) -> None:
    build, words = TREELESS[name]
    target = LMTarget(build())
    with pytest.raises(NotRewindable) as caught:
        target.verify_tree(mx.array([1, 2, 3]), (0, 0))
    assert words in str(caught.value) and (target.tree_obstacle or "") in str(caught.value)
    if name != "no rope":
        target.prefill([1, 2, 3])
        write(target, [4, 5], 1)
        assert target.size == 4


def test_what_is_just_allowed() -> None:
    assert quantized(96, 64).shape[-1] == 3  # groups of 32, because those of 64 do not divide the keys
    assert LMTarget(tiny.full()).tree_obstacle is None
