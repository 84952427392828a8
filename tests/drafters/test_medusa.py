"""Medusa heads: an independent forward pass, their traps, and the target's own text."""

from __future__ import annotations

import by_hand
import fitted
import lossless
import mlx.core as mx
import numpy as np
import synthetic
import tiny
from fitted import largest, opened
from synthetic import Checkpoint

from mlx_spec.drafters import DrafterSource
from mlx_spec.model.target import LMTarget
from mlx_spec.types import Draft, Features

TOLERANCE = 1e-5
GREEDY = lossless.GREEDY.sampler(1, 256)


def by_formula(made: Checkpoint, hidden: mx.array, heads: int) -> np.ndarray:
    """The logits [K, V] of every head after `hidden` [D]."""
    h, result = np.array(hidden, dtype=np.float64), []
    for k in range(heads):
        weight, bias = (by_hand.array(made.tensors, f"{k}.0.linear.{part}") for part in ("weight", "bias"))
        result.append(by_hand.array(made.tensors, f"{k}.1.weight") @ (h + by_hand.silu(weight @ h + bias)))
    return np.array(result)


def check(source: DrafterSource, draft: Draft, made: Checkpoint, hidden: mx.array) -> None:
    """The likeliest tokens, and the logits behind them."""
    expected = by_formula(made, hidden, 4)
    assert draft.probs is None and draft.tokens.tolist() == expected.argmax(axis=-1).tolist()
    probabilities = np.stack([by_hand.softmax(row) for row in expected])
    assert largest(mx.softmax(source.network(hidden[None], 4), axis=-1), probabilities) < TOLERANCE


def test_rounds(tmp_path):
    """Behind no, some and all tokens accepted it is the newest row that counts."""
    made = fitted.medusa(3)
    source, rows, end = opened(made, tmp_path), fitted.random_rows(30, 1)[0], 9
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
    source, row = opened(made, tmp_path), fitted.random_rows(1, 1, synthetic.D)[0]
    h = np.array(row[0], dtype=np.float64)
    for layer in range(2):
        h = h + by_hand.silu(by_hand.array(made.tensors, f"blocks.1.layers.{layer}.weight") @ h)
    expected = by_hand.array(made.tensors, "lm_heads.1.weight") @ h
    assert largest(source.network(row, 2)[1], expected) < TOLERANCE
    assert largest(source.network(row, 2)[0], expected) > 1e-3
