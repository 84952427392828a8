"""Medusa heads: an independent forward pass, their traps, and the target's own text."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import by_hand
import fitted
import lossless
import mlx.core as mx
import numpy as np
import pytest
import synthetic
import tiny
from fitted import largest, opened
from one_pass_law import drafted_excess, excess, law_target, seeded_texts
from synthetic import Checkpoint
from test_law import Liar

from mlx_spec.drafters import DrafterSource
from mlx_spec.drafters.medusa import Medusa
from mlx_spec.errors import BadCheckpoint, Mismatch
from mlx_spec.model.target import LMTarget
from mlx_spec.types import Draft, Features

TOLERANCE = 1e-5
TARGETS = {"full": None, "sliding": None, "recurrent": None, "quantized": 8}
GREEDY = lossless.GREEDY.sampler(1, 256)


def by_formula(made: Checkpoint, hidden: mx.array, heads: int) -> np.ndarray:
    """The likeliest tokens and their probabilities, [2, K], of every head behind `hidden` [D]."""
    h, result = np.array(hidden, dtype=np.float64), []
    for k in range(heads):
        weight, bias = (by_hand.array(made.tensors, f"{k}.0.linear.{part}") for part in ("weight", "bias"))
        logits = by_hand.array(made.tensors, f"{k}.1.weight") @ (h + by_hand.silu(weight @ h + bias))
        result.append([logits.argmax(), by_hand.softmax(logits).max()])
    return np.array(result).T


def check(draft: Draft, made: Checkpoint, hidden: mx.array, heads: int = 4) -> None:
    assert draft.probs is None
    found = np.stack([np.array(draft.tokens), np.array(draft.confidence)])
    assert largest(found, by_formula(made, hidden, heads)) < TOLERANCE


def observed(source: DrafterSource, history: list[int], rows: mx.array) -> Medusa:
    drafter = source.make(LMTarget(tiny.full(), source.needs).parts)
    drafter.observe(history, Features(final_hidden=rows))
    return drafter


def test_rounds(tmp_path):
    """Behind no, some and all tokens accepted it is the newest row that counts."""
    made = fitted.medusa(3)
    source, rows, end = opened(made, tmp_path), fitted.random_rows(30, 1)[0], 9
    drafter, history = source.make(LMTarget(tiny.full(), source.needs).parts), tiny.prompt(31)
    for kept in (1, 3, 5, 1, 2):
        drafter.observe(history[: end + kept], Features(final_hidden=rows[end - 1 : end + kept - 1]))
        end += kept
        draft = drafter.draft(history[:end], 4, GREEDY)
        check(draft, made, rows[end - 2])
        stale = by_formula(made, rows[end - 3], 4)
        assert largest(np.array(draft.confidence), stale[1]) > 1e-3


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
        check(drafter.draft(prompt, 4, GREEDY), made, hidden[0, -1])
    assert largest(by_formula(made, after[0, -1], 4), by_formula(made, before[0, -1], 4)) > 1e-3


def test_limits_and_other_histories(tmp_path):
    source, history = opened(fitted.medusa(3), tmp_path), tiny.prompt(5)
    drafter = observed(source, history, fitted.random_rows(4, 1)[0])
    sizes = [drafter.draft(history, limit, GREEDY).tokens.size for limit in (0, 1, 3, 4, 9)]
    assert sizes == [0, 1, 3, 4, 4]
    assert drafter.draft(history[:-1], 3, GREEDY).tokens.size == 0
    assert drafter.draft([*history, 1], 3, GREEDY).tokens.size == 0


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


# --- at work


@cache
def fit(kind: str) -> tuple[fitted.nn.Module, list[int], list[int], Checkpoint]:
    """A target, a prompt, its greedy text, and heads that know most of it: their blocks do nothing."""
    model, prompt = getattr(tiny, "full" if kind == "quantized" else kind)(), tiny.prompt(25)
    truth = lossless.plain(model, prompt, 40, TARGETS[kind])
    made = fitted.medusa(len(model.layers))
    with tempfile.TemporaryDirectory() as folder:
        needs = opened(made, Path(folder)).needs
    target = LMTarget(model, needs)
    target.verify(mx.array([*prompt, *truth][:-1]))
    hidden = np.array(target.commit(len(prompt) + 39).final_hidden)[len(prompt) - 1 :]
    changes = {}
    for k in range(4):
        wanted = [*truth[k + 1 :], *[0] * (k + 1)]
        wanted = [(token + 1) % 256 if (i + k) % 6 == 3 else token for i, token in enumerate(wanted)]
        changes[f"{k}__0__linear__weight"], changes[f"{k}__0__linear__bias"] = (
            mx.zeros((64, 64)),
            mx.zeros(64),
        )
        changes[f"{k}__1__weight"] = fitted.head_of(hidden, wanted)
    return model, prompt, truth, made.changed(**changes)


@pytest.mark.parametrize("kind", TARGETS)
def test_lossless(kind, tmp_path):
    model, prompt, truth, made = fit(kind)
    accepted = fitted.lossless_rounds(opened(made, tmp_path), model, prompt, truth, 4, TARGETS[kind])
    assert set(accepted) & {1, 2, 3} and sum(accepted) > len(accepted) // 2


def test_quantized_weights(tmp_path):
    model, prompt, truth, made = fit("full")
    source = opened(made, tmp_path, bits=8)
    assert sum(fitted.lossless_rounds(source, model, prompt, truth, 4)) > 0
    assert "scales" in source.network.heads[0].lm_head


# --- the law


class Posing:
    """The likeliest tokens, said to be drawn."""

    def __init__(self, drafter: Medusa) -> None:
        self.inner, self.needs, self.observe = drafter, drafter.needs, drafter.observe

    def draft(self, history, limit, sampler):
        draft = self.inner.draft(history, limit, sampler)
        if not draft.tokens.size:
            return draft
        logits = self.inner._network(self.inner._hidden, limit)
        return Draft(draft.tokens, Liar().draw(logits, history, draft.tokens)[1])


def law_source(folder: Path) -> DrafterSource:
    return opened(fitted.medusa(2, hidden=16, vocab=8), folder)


def test_drafts_without_chance_keep_the_law(tmp_path):
    assert drafted_excess(law_source(tmp_path)) < 1


def test_drafts_that_pose_as_sampled_are_caught(tmp_path):
    source = law_source(tmp_path)
    drafter = source.make(LMTarget(law_target(), source.needs).parts)
    assert excess(source, Posing(drafter), 200) > 1


def test_seeded_text_is_the_same_without(tmp_path):
    with_drafter, without = seeded_texts(law_source(tmp_path))
    assert with_drafter == without


# --- what is refused


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"mlx_spec": None}, BadCheckpoint, "mlx-spec convert"),
        ({"num_heads": None}, BadCheckpoint, "num_heads"),
        ({"num_heads": 5}, BadCheckpoint, "lacks"),
        (
            {"target": {"hidden_size": 48, "num_hidden_layers": 3, "vocab_size": 256}},
            Mismatch,
            "48, target has 64",
        ),
    ],
)
def test_refusals(changes, kind, text, tmp_path):
    with pytest.raises(kind, match=text):
        opened(fitted.medusa(3), tmp_path, edit=lambda config: config.update(changes))


def test_hidden_of_another_place(tmp_path):
    with pytest.raises(BadCheckpoint, match="post_norm, pre_norm"):
        opened(fitted.medusa(3), tmp_path, edit=lambda config: config["mlx_spec"].update(hidden="layers"))
