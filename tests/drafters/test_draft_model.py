"""A draft model, and PARD: whatever happened before, it drafts like a new one."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import fitted
import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny
from checkpoints import read
from fitted import Recorder, largest, logits_of, opened
from test_load import save

import mlx_spec.drafters.draft_model as module
from mlx_spec.drafters import open_drafter
from mlx_spec.drafters.draft_model import MAX_UNWRITTEN, PREFILL_STEP, DraftModel, Pard, VocabularySizes
from mlx_spec.errors import BadCheckpoint
from mlx_spec.model.target import LMTarget
from mlx_spec.sampling import Sampling
from mlx_spec.types import Features

KINDS = ("full", "sliding", "shared", "recurrent", "recurrent_moe")
SAME = VocabularySizes(tiny.VOCAB, tiny.VOCAB)
NOTHING = Features()
TOLERANCE, EXACT = 1e-4, 1e-5
GOLDEN = Path(__file__).parents[1] / "golden" / "pard"
MASK = tiny.VOCAB - 1


@cache
def model_of(kind: str) -> nn.Module:
    return getattr(tiny, kind)(seed=1)


def drafted(drafter: DraftModel, history: list[int], limit: int) -> tuple[list[int], mx.array]:
    sampler = Recorder()
    draft = drafter.draft(history, limit, sampler)
    assert draft.probs is None
    return draft.tokens.tolist(), mx.concatenate(sampler.logits)


def check(drafter: DraftModel, history: list[int], limit: int, kind: str) -> list[int]:
    """The draft, after comparing it and its logits with those of a new drafter."""
    ours, logits = drafted(drafter, history, limit)
    theirs, expected = drafted(DraftModel(model_of(kind), SAME), history, limit)
    assert ours == theirs
    assert mx.abs(logits - expected).max().item() < TOLERANCE
    return ours


# What a round emits, given its draft tokens.
def full(draft: list[int]) -> list[int]:
    return [*draft, 7]


def partial(draft: list[int]) -> list[int]:
    return [*draft[: len(draft) // 2], (draft[len(draft) // 2] + 1) % tiny.VOCAB]


def none(draft: list[int]) -> list[int]:
    return [(draft[0] + 1) % tiny.VOCAB]


def stopped(draft: list[int]) -> list[int]:
    """A stop token among the accepted ones: nothing follows it."""
    return draft[:2]


@pytest.mark.parametrize("kind", KINDS)
def test_after_every_outcome_it_is_as_good_as_new(kind):
    history = tiny.prompt(21)  # longer than the window of 16
    drafter = DraftModel(model_of(kind), SAME)
    for outcome in (full, none, partial, full, full, partial, stopped, none, none, full):
        history = history + outcome(check(drafter, history, 4, kind))
        drafter.observe(history, NOTHING)


@pytest.mark.parametrize("kind", ["full", "sliding", "recurrent"])
def test_history_is_replaced_between_turns(kind):
    drafter, first = DraftModel(model_of(kind), SAME), tiny.prompt(50)
    other = tiny.prompt(40, seed=5)
    for history in (first, first[:30], [*first[:30], 9, 9], first[:31], other, first[:1], first):
        check(drafter, history, 3, kind)
        drafter.observe(full(history), NOTHING)
        check(drafter, history, 2, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_that_was_read(kind, monkeypatch):
    """Told what it drafted it keeps the rows that came true, whatever the next history is."""
    drafter, history = DraftModel(model_of(kind), SAME), tiny.prompt(21)
    for outcome in (full, none, partial, stopped, full, none, partial):
        draft = check(drafter, history, 4, kind)
        drafter.keep_draft(draft)
        history = [*history, *outcome(draft), 5, 6]
    drafter.keep_draft(check(drafter, history, 4, kind))
    check(drafter, history[:-3], 4, kind)
    drafter.write(history)
    drafter.keep_draft(draft := check(drafter, history, 4, kind))
    calls = []
    verify = LMTarget.verify
    monkeypatch.setattr(LMTarget, "verify", lambda self, rows: calls.append(rows.size) or verify(self, rows))
    drafter.draft([*history, *draft[:3], (draft[3] + 1) % tiny.VOCAB], 2, Recorder())
    assert calls == [1, 1]  # what it had guessed right is not written again


@pytest.mark.parametrize("kind", ["full", "recurrent"])
def test_draft_that_was_never_verified(kind):
    """The round was interrupted: nobody knows whether the draft was right."""
    drafter, history = DraftModel(model_of(kind), SAME), tiny.prompt(12)
    draft = check(drafter, history, 4, kind)
    check(drafter, history, 4, kind)
    check(drafter, [*history, *draft, 3], 4, kind)
    check(drafter, [*history, 3, 4, 5], 4, kind)
    check(drafter, history[:-1], 4, kind)
    drafter.observe([*history, *draft, 3, 4], NOTHING)  # the next turn: its prompt, not a round
    check(drafter, [*history, *draft, 3, 4], 2, kind)
    drafter.observe([*history, 5, 6, 7, 8, 9], NOTHING)
    check(drafter, [*history, 5, 6, 7, 8, 9], 2, kind)


def test_interrupted_draft(monkeypatch):
    """An exception between two steps leaves nothing behind."""
    drafter, history = DraftModel(model_of("recurrent"), SAME), tiny.prompt(12)
    history += partial(check(drafter, history, 4, "recurrent"))
    drafter.observe(history, NOTHING)
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "draw", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            drafter.draft(history, 4, Recorder())
    check(drafter, history, 4, "recurrent")
    drafter.observe([*history, 3], NOTHING)
    check(drafter, [*history, 3], 4, "recurrent")


def test_prompt_is_written_while_it_is_observed(monkeypatch):
    """No draft waits for a long prompt, and no pass over it is longer than a chunk."""
    chunks: list[int] = []
    prefill = LMTarget.prefill

    def counted(self, tokens):
        chunks.append(len(tokens))
        return prefill(self, tokens)

    monkeypatch.setattr(LMTarget, "prefill", counted)
    drafter, history = DraftModel(model_of("full"), SAME), tiny.prompt(2 * PREFILL_STEP + MAX_UNWRITTEN // 2)
    drafter.observe(history[: 2 * PREFILL_STEP - 99], NOTHING)
    assert chunks == [PREFILL_STEP, PREFILL_STEP - 100]
    drafter.observe(history, NOTHING)
    assert sum(chunks) == len(history) - 1
    chunks.clear()
    drafter.draft(history, 4, Recorder())
    assert not chunks
    for _ in range(MAX_UNWRITTEN + 10):
        history.append(1)
        drafter.observe(history, NOTHING)
    assert len(chunks) == 1
    drafter.observe(tiny.prompt(9), NOTHING)
    drafter.observe(tiny.prompt(MAX_UNWRITTEN + 60, seed=9), NOTHING)
    fresh = DraftModel(model_of("full"), SAME)
    assert drafted(drafter, tiny.prompt(300, seed=9), 3)[0] == drafted(fresh, tiny.prompt(300, seed=9), 3)[0]


@pytest.mark.parametrize("kind", ["full", "sliding", "recurrent"])
@pytest.mark.parametrize("outcome", [full, partial, none])
def test_one_pass_a_token(outcome, kind, monkeypatch):
    """After a round nothing is written twice, and at most the last draft token is missing."""
    calls: list[tuple[str, int]] = []

    def count(name: str) -> None:
        method = getattr(LMTarget, name)

        def counted(self, tokens):
            calls.append((name, len(tokens)))
            return method(self, tokens)

        monkeypatch.setattr(LMTarget, name, counted)

    drafter, history = DraftModel(model_of(kind), SAME), tiny.prompt(9)
    history += outcome(drafted(drafter, history, 4)[0])
    drafter.observe(history, NOTHING)
    for name in ("verify", "prefill"):
        count(name)
    drafter.draft(history, 4, Recorder())
    assert calls == [("verify", 2 if outcome is full else 1), *[("verify", 1)] * 3]


# --- vocabularies of different length


@pytest.mark.parametrize("size", [200, 256, 300])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_vocabulary(size, temperature):
    drafter = DraftModel(tiny.full(seed=1, vocab=size), VocabularySizes(size, tiny.VOCAB))
    sampler = Sampling(temperature=temperature).sampler(10, tiny.VOCAB)
    history = [*tiny.prompt(10), tiny.VOCAB - 1]
    draft = drafter.draft(history, 5, sampler)
    assert draft.tokens.max().item() < min(size, tiny.VOCAB)
    if temperature:
        assert draft.probs.shape == (5, tiny.VOCAB)
        assert mx.abs(draft.probs.sum(axis=-1) - 1).max().item() < 1e-5
        assert draft.probs[:, size:].sum().item() == 0
    else:
        assert draft.probs is None


# --- PARD: the numbers of transformers, and of one pass without a cache


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
        assert largest(logits_of(drafter, history, 4), golden[f"logits.{i}"]) < EXACT


def pard() -> Pard:
    return Pard(model_of("full"), SAME, MASK)


def whole(history: list[int], limit: int) -> mx.array:
    """The last K logits of one pass without a cache."""
    return model_of("full")(mx.array([history + [MASK] * (limit - 1)]))[0, -limit:]


def grown(drafter: Pard, history: list[int], tokens: list[int]) -> list[int]:
    history = [*history, *tokens]
    drafter.observe(history, NOTHING)
    return history


@pytest.mark.parametrize("length", [1, 7, 20, MAX_UNWRITTEN + 30])
def test_rounds_of_pard(length, monkeypatch):
    """All, none and some accepted, other limits, plain rounds in between: always the rows of one pass."""
    monkeypatch.setattr(module, "PREFILL_STEP", 50)
    drafter, history = pard(), tiny.prompt(length)
    drafter.observe(history, NOTHING)
    for kept, limit in ((5, 4), (1, 4), (3, 2), (1, 7), (2, 1), (8, 4)):
        assert largest(logits_of(drafter, history, limit), whole(history, limit)) < EXACT
        history = grown(drafter, history, tiny.prompt(kept, seed=kept + 4))


def test_history_of_pard_goes_back():
    drafter, first = pard(), tiny.prompt(50)
    other = tiny.prompt(40, seed=5)
    for history in (first, first[:30], [*first[:30], 9, 9], first[:31], other, first[:1], first):
        assert largest(logits_of(drafter, history, 3), whole(history, 3)) < EXACT
        assert largest(logits_of(drafter, history, 3), whole(history, 3)) < EXACT
        drafter.observe([*history, 7], NOTHING)


def test_interrupted_draft_of_pard(monkeypatch):
    drafter, history = pard(), tiny.prompt(12)
    logits_of(drafter, history, 4)
    history = grown(drafter, history, [1, 2])
    layer = model_of("full").model.layers[2]
    with monkeypatch.context() as patch:
        patch.setattr(type(layer), "__call__", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            drafter.draft(history, 4, Recorder())
    assert largest(logits_of(drafter, history, 4), whole(history, 4)) < EXACT


# --- from disk


def test_any_language_model_becomes_a_drafter(tmp_path):
    model = tiny.full(seed=1)
    config = read(save(model, tmp_path))
    source = open_drafter(tmp_path, config, {"model_type": "llama", "vocab_size": 260})
    assert (source.name, source.vocab_size) == ("llama", tiny.VOCAB)
    assert source.make(None)._vocabulary == VocabularySizes(tiny.VOCAB, 260)
    nested = {"text_config": {"vocab_size": 300}, "vocab_size": 1}
    assert open_drafter(tmp_path, config, nested).make(None)._vocabulary.target == 300
    with pytest.raises(BadCheckpoint, match="target has no 'vocab_size'"):
        open_drafter(tmp_path, config, {"text_config": {}})
    target = LMTarget(tiny.full())
    draft, _ = drafted(source.make(target.parts), tiny.prompt(9), 3)
    assert draft == drafted(DraftModel(model, SAME), tiny.prompt(9), 3)[0]
