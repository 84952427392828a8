"""Drafters of one pass: the numbers of others or of independent constructions, and their traps one by one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from support import by_hand, fitted, lossless, synthetic, tiny
from support.by_hand import Shape, array, norm
from support.fitted import largest, logits_of, opened, random_rows, replay
from support.synthetic import Checkpoint

from mlx_spec.drafters import DrafterSource
from mlx_spec.model.target import LMTarget
from mlx_spec.types import Draft, Features, TargetParts

TOLERANCE = 1e-5
CAPTURE = (0, 1, 2)
SHAPE = Shape(fitted.HEADS, fitted.GROUPS, fitted.HEAD)
GREEDY = lossless.GREEDY.sampler(1, 256)


@cache
def parts() -> TargetParts:
    return LMTarget(tiny.full()).parts


# --- P-EAGLE: an independent construction in float64


def small(**config: object) -> Checkpoint:
    made = fitted.peagle(3, CAPTURE, **config)
    return made.changed(lm_head__weight=0.2 * mx.random.normal((256, 64), key=mx.random.key(5)))


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


@pytest.mark.parametrize("config", [{}, {"norm_before_residual": True}], ids=["fused", "normed"])
@pytest.mark.parametrize(("length", "chunks"), [(9, ()), (20, (3, 4, 11))])
def test_rounds_of_peagle(length, chunks, config, tmp_path):
    """None, some and all accepted, prompts in pieces: always the rows of one pass."""
    made, rows, history = small(**config), random_rows(length + 20, 3), tiny.prompt(length + 21)
    begins = [length, length + 1, length + 4, length + 9, length + 9, length + 10]
    drafter = opened(made, tmp_path).make(parts())
    found = replay(drafter, history, rows, begins, 4, chunks)
    for begin, logits in zip(begins, found, strict=True):
        assert largest(logits, in_one_pass(made, history[:begin], rows, 4)) < TOLERANCE


def test_rope_is_the_target_s_unless_config_json_states_another(tmp_path):
    """Far from the start, too."""
    rows, history = random_rows(12, 3), tiny.prompt(13)
    for stated, theta, other in (({}, SHAPE.theta, 77.0), ({"rope_theta": 77.0}, 77.0, SHAPE.theta)):
        made = small(**stated)
        drafter = opened(made, tmp_path / str(theta)).make(parts())
        drafter.observe(history, Features(tuple(rows)))
        found = logits_of(drafter, history, 4)
        of = replace(SHAPE, theta=theta), replace(SHAPE, theta=other)
        right, wrong = (in_one_pass(made, history, rows, 4, shape=shape) for shape in of)
        assert largest(found, right) < TOLERANCE and largest(found, wrong) > 1e-3
    made = small()
    late = opened(made, tmp_path / "late").make(parts())
    late.observe([0] * 3000 + history, Features(tuple(rows)))
    far = logits_of(late, [0] * 3000 + history, 4)
    assert largest(far, in_one_pass(made, history, rows, 4, first=3000)) < 1e-3


def test_peagle_for_a_target_whose_rope_depends_on_its_context(tmp_path):
    made = fitted.peagle(3, CAPTURE)
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": 128, **factors}
    made.target.update(max_position_embeddings=512, rope_scaling=scaling)
    assert opened(made, tmp_path).name == "peagle"


# --- Medusa: an independent pass in float64, and where its rows come from


def by_formula(made: Checkpoint, hidden: mx.array, heads: int) -> np.ndarray:
    """The logits [K, V] of every head after `hidden` [D]."""
    h, result = np.array(hidden, dtype=np.float64), []
    for k in range(heads):
        weight, bias = (array(made.tensors, f"{k}.0.linear.{part}") for part in ("weight", "bias"))
        result.append(array(made.tensors, f"{k}.1.weight") @ (h + by_hand.silu(weight @ h + bias)))
    return np.array(result)


def check(source: DrafterSource, draft: Draft, made: Checkpoint, hidden: mx.array) -> None:
    """The likeliest tokens, and the logits behind them."""
    expected = by_formula(made, hidden, 4)
    assert draft.probs is None and draft.tokens.tolist() == expected.argmax(axis=-1).tolist()
    probabilities = np.stack([by_hand.softmax(row) for row in expected])
    assert largest(mx.softmax(source.network(hidden[None], 4), axis=-1), probabilities) < TOLERANCE


def test_rounds_of_medusa(tmp_path):
    """Behind no, some and all tokens accepted it is the newest row that counts."""
    made = fitted.medusa(3)
    source, rows, end = opened(made, tmp_path), random_rows(30, 1)[0], 9
    drafter, history = source.make(LMTarget(tiny.full(), source.needs).parts), tiny.prompt(31)
    for kept in (1, 3, 5, 1, 2):
        drafter.observe(history[: end + kept], Features(final_hidden=rows[end - 1 : end + kept - 1]))
        end += kept
        draft = drafter.draft(history[:end], 4, GREEDY)
        check(source, draft, made, rows[end - 2])
        assert draft.tokens.tolist() != by_formula(made, rows[end - 3], 4).argmax(axis=-1).tolist()


def test_hidden_is_the_one_behind_the_final_norm(tmp_path):
    """By a plain forward pass; before the norm it is another, which a checkpoint may ask for."""
    made, model, prompt = fitted.medusa(3), tiny.full(), tiny.prompt(12)
    before: mx.array = model.model.embed_tokens(mx.array(prompt[:-1])[None])
    for layer in [getattr(layer, "layer", layer) for layer in model.layers]:
        before = layer(before, mask="causal")
    after = model.model.norm(before)

    def pre(config: dict) -> None:
        config["mlx_spec"]["hidden"] = "pre_norm"

    for folder, edit, hidden in (("post", id, after), ("pre", pre, before)):
        source = opened(made, tmp_path / folder, edit=edit)
        target = LMTarget(model, source.needs)
        drafter = source.make(target.parts)
        drafter.observe(prompt[:9], target.prefill(prompt[:8]))
        assert drafter.draft(prompt[:9], 4, GREEDY).tokens.size == 0  # behind a prompt
        target.verify(mx.array([*prompt[8:11], 7]))
        drafter.observe(prompt, target.commit(3))
        check(source, drafter.draft(prompt, 4, GREEDY), made, hidden[0, -1])
    assert largest(by_formula(made, after[0, -1], 4), by_formula(made, before[0, -1], 4)) > 1e-3


def test_more_blocks_a_head_and_no_biases(tmp_path):
    """vLLM's form."""
    made = synthetic.vllm_medusa()
    source, row = opened(made, tmp_path), random_rows(1, 1, synthetic.D)[0]
    h = np.array(row[0], dtype=np.float64)
    for layer in range(2):
        h = h + by_hand.silu(array(made.tensors, f"blocks.1.layers.{layer}.weight") @ h)
    expected = array(made.tensors, "lm_heads.1.weight") @ h
    assert largest(source.network(row, 2)[1], expected) < TOLERANCE
    assert largest(source.network(row, 2)[0], expected) > 1e-3
