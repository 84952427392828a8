"""DFlash: mlx-vlm's numbers, its traps one by one, and the target's own text."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import fitted
import lossless
import mlx.core as mx
import pytest
import tiny
from checkpoints import read
from fitted import largest, opened, random_rows, replay
from synthetic import Checkpoint

from mlx_spec.drafters import DrafterSource
from mlx_spec.drafters.conditioned import MAX_WAITING
from mlx_spec.drafters.dflash import DFlash
from mlx_spec.model.target import LMTarget
from mlx_spec.types import Features, TargetParts

GOLDEN = Path(__file__).parents[1] / "golden" / "dflash"
TOLERANCE = 1e-5
CAPTURE = (0, 1, 2)


# --- the same numbers as mlx-vlm


@cache
def golden() -> tuple[list[int], list[int], dict[str, mx.array]]:
    facts = json.loads((GOLDEN / "golden.json").read_text())
    return facts["history"], facts["begins"], mx.load(str(GOLDEN / "golden.safetensors"))


def published(**config: object) -> Checkpoint:
    found = read(GOLDEN)
    sizes = found["num_target_layers"], found["hidden_size"], found["vocab_size"]
    tensors = mx.load(str(GOLDEN / "model.safetensors"))
    return Checkpoint(tensors, {**found, **config}, fitted.target_config(*sizes))


def made(source: DrafterSource) -> DFlash:
    _, _, tensors = golden()
    return source.make(
        TargetParts(
            lambda ids: tensors["embed"][ids],
            lambda x: x @ tensors["head"].T,
            lambda ids: lambda x: x @ tensors["head"][ids].T,
        )
    )


def layers() -> list[mx.array]:
    """The outputs of the target's layers."""
    return mx.split(golden()[2]["features"], 3, axis=-1)


def worst(found: list[mx.array]) -> float:
    """Return the largest difference from mlx-vlm."""
    return max(largest(ours, golden()[2][f"logits.{i}"]) for i, ours in enumerate(found))


@pytest.mark.parametrize("chunks", [(), (3, 4, 7)])
def test_six_rounds(chunks, tmp_path):
    history, begins, _ = golden()
    drafter = made(opened(published(), tmp_path))
    assert worst(replay(drafter, history, layers(), begins, 4, chunks)) < TOLERANCE


# --- what the config.json says


def test_the_shift_counts(tmp_path):
    history, begins, _ = golden()
    source = opened(published(), tmp_path, edit=lambda config: config["mlx_spec"].update(shift=1))
    assert worst(replay(made(source), history, layers(), begins, 4)) > 0.05


@pytest.mark.parametrize("window", [3, 8])
def test_sliding_layers_see_the_end_of_the_context(window, tmp_path):
    """The draft is that of a context that begins there: rotary positions are relative."""
    history, begins, _ = golden()
    kinds = {"layer_types": ["sliding_attention"] * 2, "sliding_window": window}
    source = opened(published(**kinds), tmp_path)
    found = replay(made(source), history, layers(), begins, 4)
    whole = made(opened(published(), tmp_path / "whole"))
    begin = begins[-1]
    rows = tuple(layer[begin - window : begin - 1] for layer in layers())
    whole.observe(history[:begin], Features(rows))
    assert largest(found[-1], fitted.logits_of(whole, history[:begin], 4)) < TOLERANCE
    assert worst(found) > 1e-3


# --- the rows it keeps


def small(layers: int = 3, **config: object) -> Checkpoint:
    return fitted.dflash(layers, CAPTURE, **config)


@cache
def parts(kind: str = "full") -> TargetParts:
    return LMTarget(getattr(tiny, kind)()).parts


def test_after_a_long_prompt_and_any_rounds_it_is_as_good_as_new(tmp_path):
    length = MAX_WAITING + 40
    source, rows = opened(small(), tmp_path), random_rows(length + 30, 3)
    history = tiny.prompt(length + 31)
    begins = [length, length + 1, length + 5, length + 5, length + 8, length + 9]
    found = replay(source.make(parts()), history, rows, begins, 4)
    for begin, logits in zip(begins, found, strict=True):
        assert largest(logits, replay(source.make(parts()), history, rows, [begin], 4)[0]) < TOLERANCE


def test_history_goes_back(tmp_path):
    """To any earlier place: what is shared stays, the rest is forgotten."""
    source, rows, history = opened(small(), tmp_path), random_rows(60, 3), tiny.prompt(61)
    drafter = source.make(parts())
    replay(drafter, history, rows, [40], 4)
    other, changed = [*history[:25], *tiny.prompt(30, seed=8)], [mx.array(r) for r in rows]
    for row in changed:
        row[25:] = row[25:] + 1
    drafter.observe(other[:31], Features(tuple(r[25:30] for r in changed)))
    fresh = replay(source.make(parts()), other, changed, [31], 4)[0]
    assert largest(fitted.logits_of(drafter, other[:31], 4), fresh) < TOLERANCE
    stale = replay(source.make(parts()), other, rows, [31], 4)[0]
    assert largest(stale, fresh) > 0.01


def test_cold_start(tmp_path):
    """A prefix that the target held already was never seen: drafts from what there is."""
    source, rows, history = opened(small(), tmp_path), random_rows(30, 3), tiny.prompt(31)
    drafter = source.make(parts())
    assert drafter.draft(history[:1], 4, lossless.GREEDY.sampler(1, 256)).tokens.size == 0
    drafter.observe(history[:21], Features(tuple(r[15:20] for r in rows)))
    cold = fitted.logits_of(drafter, history[:21], 4)
    again = source.make(parts())
    again.observe(history[15:21], Features(tuple(r[15:20] for r in rows)))
    assert largest(cold, fitted.logits_of(again, history[15:21], 4)) < 1e-4
    for stranger in (history[:20], [*history[:20], 3]):
        assert drafter.draft(stranger, 4, lossless.GREEDY.sampler(1, 256)).tokens.size == 0


# --- at work


def test_features_line_up_with_the_target(tmp_path):
    """Rows from the taps are those of one plain forward pass over the history, and of no other layers."""
    model, prompt = tiny.full(), tiny.prompt(20)
    source = opened(small(), tmp_path)
    target = LMTarget(model, source.needs)
    drafter = source.make(target.parts)
    drafter.observe(prompt[:15], target.prefill(prompt[:14]))
    target.verify(mx.array([*prompt[14:19], 7, 7]))
    drafter.observe(prompt, target.commit(5))
    rows, found = fitted.layer_outputs(model, prompt[:-1]), fitted.logits_of(drafter, prompt, 4)
    for layers, right in ((rows, True), ([*rows[1:], rows[-1]], False), ([rows[0], *rows[:-1]], False)):
        fresh = replay(source.make(target.parts), prompt, layers, [20], 4)[0]
        assert (largest(found, fresh) < 1e-4) == right and (right or largest(found, fresh) > 0.01)
