"""PARD: transformers' numbers, masks that leave nothing behind, and the target's own text."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import fitted
import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny
from fitted import largest, logits_of, opened

import mlx_spec.drafters.draft_model as module
from mlx_spec.drafters.draft_model import MAX_UNWRITTEN, Pard, VocabularySizes
from mlx_spec.model.target import LMTarget
from mlx_spec.types import Features

GOLDEN = Path(__file__).parents[1] / "golden" / "pard"
TOLERANCE = 1e-5
MASK = tiny.VOCAB - 1
NOTHING = Features()


# --- the same numbers as transformers


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_five_rounds_of_transformers(name, tmp_path):
    """2, none, all, 1 and 3 of the 4 drafts are accepted."""
    config, facts = (json.loads((GOLDEN / name / f"{f}.json").read_text()) for f in ("config", "golden"))
    tensors, golden = (mx.load(str(GOLDEN / name / f"{f}.safetensors")) for f in ("model", "golden"))
    published = fitted.Checkpoint(tensors, config, fitted.target_config(3, vocab=config["vocab_size"]))
    drafter = opened(published, tmp_path).make(LMTarget(tiny.full()).parts)
    for i, begin in enumerate(facts["begins"]):
        history = facts["history"][:begin]
        drafter.observe(history, NOTHING)
        assert largest(logits_of(drafter, history, 4), golden[f"logits.{i}"]) < TOLERANCE


# --- the same numbers as one pass without a cache


@cache
def model() -> nn.Module:
    return tiny.full(seed=1)


def pard() -> Pard:
    return Pard(model(), VocabularySizes(256, 256), MASK)


def whole(history: list[int], limit: int) -> mx.array:
    """The last K logits of one pass without a cache."""
    return model()(mx.array([history + [MASK] * (limit - 1)]))[0, -limit:]


def grown(drafter: Pard, history: list[int], tokens: list[int]) -> list[int]:
    history = [*history, *tokens]
    drafter.observe(history, NOTHING)
    return history


@pytest.mark.parametrize("length", [1, 7, 20, MAX_UNWRITTEN + 30])
def test_rounds(length, monkeypatch):
    """All, none and some accepted, other limits, plain rounds in between: always the rows of one pass."""
    monkeypatch.setattr(module, "PREFILL_STEP", 50)
    drafter, history = pard(), tiny.prompt(length)
    drafter.observe(history, NOTHING)
    for kept, limit in ((5, 4), (1, 4), (3, 2), (1, 7), (2, 1), (8, 4)):
        assert largest(logits_of(drafter, history, limit), whole(history, limit)) < TOLERANCE
        history = grown(drafter, history, tiny.prompt(kept, seed=kept + 4))


def test_history_goes_back():
    drafter, first = pard(), tiny.prompt(50)
    other = tiny.prompt(40, seed=5)
    for history in (first, first[:30], [*first[:30], 9, 9], first[:31], other, first[:1], first):
        assert largest(logits_of(drafter, history, 3), whole(history, 3)) < TOLERANCE
        assert largest(logits_of(drafter, history, 3), whole(history, 3)) < TOLERANCE
        drafter.observe([*history, 7], NOTHING)


def test_interrupted_draft(monkeypatch):
    drafter, history = pard(), tiny.prompt(12)
    logits_of(drafter, history, 4)
    history = grown(drafter, history, [1, 2])
    layer = model().model.layers[2]
    with monkeypatch.context() as patch:
        patch.setattr(type(layer), "__call__", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            drafter.draft(history, 4, fitted.Recorder())
    assert largest(logits_of(drafter, history, 4), whole(history, 4)) < TOLERANCE
