"""P-EAGLE: an independent construction in float64, its traps, and the target's own text."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import by_hand
import fitted
import lossless
import mlx.core as mx
import numpy as np
import pytest
import tiny
from by_hand import Shape, array, norm
from fitted import Checkpoint, largest, logits_of, opened, random_rows, replay

from mlx_spec.drafters.conditioned import MAX_WAITING
from mlx_spec.model.target import LMTarget
from mlx_spec.types import Features, TargetParts

TOLERANCE = 1e-5
CAPTURE = (0, 1, 2)
SHAPE = Shape(fitted.HEADS, fitted.GROUPS, fitted.HEAD)


@cache
def parts() -> TargetParts:
    return LMTarget(tiny.full()).parts


def small(layers: int = 3, head: bool = True, **config: object) -> Checkpoint:
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


# --- the same numbers


@pytest.mark.parametrize("config", [{}, {"norm_before_residual": True}], ids=["fused", "normed"])
@pytest.mark.parametrize(("length", "chunks"), [(9, ()), (20, (3, 4, 11))])
def test_rounds(length, chunks, config, tmp_path):
    """None, some and all accepted, prompts in pieces: always the rows of one pass."""
    made, rows, history = small(**config), random_rows(length + 20, 3), tiny.prompt(length + 21)
    begins = [length, length + 1, length + 4, length + 9, length + 9, length + 10]
    drafter = opened(made, tmp_path).make(parts())
    found = replay(drafter, history, rows, begins, 4, chunks)
    for begin, logits in zip(begins, found, strict=True):
        assert largest(logits, in_one_pass(made, history[:begin], rows, 4)) < TOLERANCE


@pytest.mark.skipif(mx.default_device().type == mx.gpu, reason="float64 is for the CPU")
def test_rounds_behind_a_long_prompt(tmp_path):
    """In float64, but for the angles. In float32 rows this far are up to 2e-5 off, whoever computes them."""
    length = MAX_WAITING + 30
    made, rows, history = small(), random_rows(length + 20, 3), tiny.prompt(length + 21)
    begins = [length, length + 1, length + 4, length + 9, length + 9, length + 10]
    source, shape = opened(made, tmp_path), replace(SHAPE, rounded=True)
    single = replay(source.make(parts()), history, rows, begins, 4, (100,))
    source.network.set_dtype(mx.float64)
    double = replay(source.make(parts()), history, rows, begins, 4, (100,))
    for begin, ours, less in zip(begins, double, single, strict=True):
        exact = in_one_pass(made, history[:begin], rows, 4, shape)
        assert largest(ours, exact) < TOLERANCE / 2 and largest(less, exact) < 2 * TOLERANCE


# --- rows and positions


def test_ids_are_inputs_of_layers(tmp_path):
    """The taps read the outputs of the layers before, and no others."""
    made, model, prompt = small(), tiny.full(), tiny.prompt(12)
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
    made, rows, history = small(rope_theta=77.0), random_rows(12, 3), tiny.prompt(13)
    drafter = opened(made, tmp_path).make(parts())
    drafter.observe(history, Features(tuple(rows)))
    found = logits_of(drafter, history, 4)
    assert largest(found, in_one_pass(made, history, rows, 4)) < TOLERANCE
    assert largest(found, in_one_pass(made, history, rows, 4, shape=replace(SHAPE, theta=77.0))) > 1e-3
    late = opened(made, tmp_path / "late").make(parts())
    late.observe([0] * 3000 + history, Features(tuple(rows)))
    far = logits_of(late, [0] * 3000 + history, 4)
    assert largest(far, in_one_pass(made, history, rows, 4, first=3000)) < 1e-3


def test_cold_start_and_other_histories(tmp_path):
    made, rows, history = small(), random_rows(30, 3), tiny.prompt(31)
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
