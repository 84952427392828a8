"""DFlash and P-EAGLE, which read the target's layers: numbers of others, their traps, and what they keep."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import by_hand
import fitted
import lossless
import mlx.core as mx
import numpy as np
import pytest
import tiny
from by_hand import Shape, array, norm
from checkpoints import read
from fitted import largest, logits_of, opened, random_rows, replay
from synthetic import Checkpoint

from mlx_spec.drafters import DrafterSource
from mlx_spec.drafters.conditioned import MAX_WAITING
from mlx_spec.drafters.dflash import DFlash
from mlx_spec.model.target import LMTarget
from mlx_spec.types import Features, TargetParts

GOLDEN = Path(__file__).parents[1] / "golden" / "dflash"
TOLERANCE = 1e-5
CAPTURE = (0, 1, 2)
SHAPE = Shape(fitted.HEADS, fitted.GROUPS, fitted.HEAD)


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
def parts() -> TargetParts:
    return LMTarget(tiny.full()).parts


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


def small_peagle(layers: int = 3, head: bool = True, **config: object) -> Checkpoint:
    made = fitted.peagle(layers, CAPTURE, **config)
    mx.random.seed(5)
    return made.changed(lm_head__weight=0.2 * mx.random.normal((256, 64))) if head else made


def in_one_pass(
    made: Checkpoint,
    history: list[int],
    hidden: list[mx.array],
    limit: int,
    shape: Shape = SHAPE,
    first: int = 0,
) -> np.ndarray:
    """Logits [K, V]: rows of all pairs and K - 1 masks, causal, no cache, positions from `first` on."""
    t, n = made.tensors, len(history) - 1
    features = np.concatenate([np.array(h[:n], dtype=np.float64) for h in hidden], axis=-1)
    masks = np.repeat(array(t, "mask_hidden").reshape(1, -1), limit - 1, axis=0)
    fused = np.concatenate([features, masks]) @ array(t, "fc.weight").T
    tokens = [*history[1:], *[made.config["mask_token_id"]] * (limit - 1)]
    embedded = array(t, "embed_tokens.weight")[tokens]
    positions = np.arange(first, first + len(tokens), dtype=float)
    normed = norm(fused, array(t, "layers.0.hidden_norm.weight"))
    x = np.concatenate([norm(embedded, array(t, "layers.0.input_layernorm.weight")), normed], axis=-1)
    residual = normed if made.config.get("norm_before_residual") else fused
    x = by_hand.finish(residual, by_hand.attention(x, t, "layers.0.", shape, positions), t, "layers.0.", 1e-6)
    y = norm(x, array(t, "layers.1.input_layernorm.weight"))
    x = by_hand.finish(x, by_hand.attention(y, t, "layers.1.", shape, positions), t, "layers.1.", 1e-6)
    return norm(x, array(t, "norm.weight"))[-limit:] @ array(t, "lm_head.weight").T


# --- P-EAGLE: the numbers of an independent construction in float64


@pytest.mark.parametrize("config", [{}, {"norm_before_residual": True}], ids=["fused", "normed"])
@pytest.mark.parametrize(("length", "chunks"), [(9, ()), (20, (3, 4, 11))])
def test_rounds_of_peagle(length, chunks, config, tmp_path):
    """None, some and all accepted, prompts in pieces: always the rows of one pass."""
    made, rows, history = small_peagle(**config), random_rows(length + 20, 3), tiny.prompt(length + 21)
    begins = [length, length + 1, length + 4, length + 9, length + 9, length + 10]
    drafter = opened(made, tmp_path).make(parts())
    found = replay(drafter, history, rows, begins, 4, chunks)
    for begin, logits in zip(begins, found, strict=True):
        assert largest(logits, in_one_pass(made, history[:begin], rows, 4)) < TOLERANCE


@pytest.mark.skipif(mx.default_device().type == mx.gpu, reason="float64 is for the CPU")
def test_rounds_behind_a_long_prompt(tmp_path):
    """In float64, but for the angles. In float32 rows this far are up to 2e-5 off, whoever computes them."""
    length = MAX_WAITING + 30
    made, rows, history = small_peagle(), random_rows(length + 20, 3), tiny.prompt(length + 21)
    begins = [length, length + 1, length + 4, length + 9, length + 9, length + 10]
    source, shape = opened(made, tmp_path), replace(SHAPE, rounded=True)
    single = replay(source.make(parts()), history, rows, begins, 4, (100,))
    source.network.set_dtype(mx.float64)
    double = replay(source.make(parts()), history, rows, begins, 4, (100,))
    for begin, ours, less in zip(begins, double, single, strict=True):
        exact = in_one_pass(made, history[:begin], rows, 4, shape)
        assert largest(ours, exact) < TOLERANCE / 2 and largest(less, exact) < 2 * TOLERANCE


def test_ids_are_inputs_of_layers(tmp_path):
    """The taps read the outputs of the layers before, and no others."""
    made, model, prompt = small_peagle(), tiny.full(), tiny.prompt(12)
    source = opened(made, tmp_path)
    assert source.needs.hidden_layers == CAPTURE
    target = LMTarget(model, source.needs)
    drafter = source.make(target.parts)
    drafter.observe(prompt[:9], target.prefill(prompt[:8]))
    target.verify(mx.array([*prompt[8:11], 7]))
    drafter.observe(prompt, target.commit(3))
    rows, found = fitted.layer_outputs(model, prompt[:-1]), logits_of(drafter, prompt, 4)
    assert largest(found, in_one_pass(made, prompt, rows, 4)) < 10 * TOLERANCE
    for wrong in ([*rows[1:], rows[-1]], [rows[0], *rows[:-1]]):
        assert largest(found, in_one_pass(made, prompt, wrong, 4)) > 0.01


def test_rope_is_the_target_s(tmp_path):
    """Far from the start, too, and whatever the drafter's own config.json says."""
    made, rows, history = small_peagle(rope_theta=77.0), random_rows(12, 3), tiny.prompt(13)
    drafter = opened(made, tmp_path).make(parts())
    drafter.observe(history, Features(tuple(rows)))
    found = logits_of(drafter, history, 4)
    assert largest(found, in_one_pass(made, history, rows, 4)) < TOLERANCE
    assert largest(found, in_one_pass(made, history, rows, 4, shape=replace(SHAPE, theta=77.0))) > 1e-3
    late = opened(made, tmp_path / "late").make(parts())
    late.observe([0] * 3000 + history, Features(tuple(rows)))
    far = logits_of(late, [0] * 3000 + history, 4)
    assert largest(far, in_one_pass(made, history, rows, 4, first=3000)) < 1e-3


def test_cold_start_of_peagle_and_other_histories(tmp_path):
    made, rows, history = small_peagle(), random_rows(30, 3), tiny.prompt(31)
    drafter, sampler = opened(made, tmp_path).make(parts()), lossless.GREEDY.sampler(1, 256)
    assert drafter.draft(history[:1], 4, sampler).tokens.size == 0
    drafter.observe(history[:21], Features(tuple(r[15:20] for r in rows)))
    late = [r[15:] for r in rows]
    expected = in_one_pass(made, history[15:21], late, 4, first=15)
    assert largest(logits_of(drafter, history[:21], 4), expected) < TOLERANCE
    assert largest(logits_of(drafter, history[:21], 4), expected) < TOLERANCE  # the same draft again
    assert [drafter.draft(history[:21], k, sampler).tokens.size for k in (0, 1, 3, 9)] == [0, 1, 3, 9]
    for stranger in (history[:20], [*history[:20], 3], history[:22]):
        assert drafter.draft(stranger, 4, sampler).tokens.size == 0
