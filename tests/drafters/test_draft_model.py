"""Draft models and PARD: whatever happened before, they draft like new ones; where they come from."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from support import fitted, tiny
from support.checkpoints import read
from support.drafting import drafted
from support.fitted import Recorder, largest
from support.lossless import count_calls
from support.pairs import save

from mlx_spec.checkpoint.config import read_checkpoint
from mlx_spec.drafters import open_drafter
from mlx_spec.drafters.draft_model import MAX_UNWRITTEN, DraftModel, Pard, VocabularySizes
from mlx_spec.model.target import LMTarget
from mlx_spec.sampling import Sampling
from mlx_spec.types import Features

KINDS = ("full", "sliding", "shared", "recurrent", "recurrent_moe")
SAME = VocabularySizes(tiny.VOCAB, tiny.VOCAB)
NOTHING = Features()
TOLERANCE = 1e-4


@cache
def model_of(kind: str) -> nn.Module:
    layers = {"full": 1, "pard": 1, "sliding": 2, "recurrent": 2}  # one of each kind
    sizes = {"num_hidden_layers": layers[kind]} if kind in layers else {}
    return getattr(tiny, "full" if kind == "pard" else kind)(seed=1, **sizes)


def new(kind: str) -> DraftModel:
    model = model_of(kind)
    return Pard(model, SAME, tiny.VOCAB - 1) if kind == "pard" else DraftModel(model, SAME)


def check(drafter: DraftModel, history: list[int], limit: int, kind: str) -> list[int]:
    """The draft, after comparing it and its logits with those of a new drafter."""
    ours, theirs = drafted(drafter, history, limit), drafted(new(kind), history, limit)
    assert ours.tokens == theirs.tokens
    assert largest(ours.logits, theirs.logits) < TOLERANCE
    return ours.tokens


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


@pytest.mark.parametrize("kind", [*KINDS, "pard"])
def test_after_every_outcome_it_is_as_good_as_new(kind):
    history = tiny.prompt(21)  # longer than the window of 16
    drafter = new(kind)
    for outcome in (full, none, partial, full, full, partial, stopped, none, none, full):
        history = history + outcome(check(drafter, history, 4, kind))
        drafter.observe(history, NOTHING)


@pytest.mark.parametrize("kind", ["full", "sliding", "recurrent", "pard"])
def test_history_is_replaced_between_turns(kind):
    drafter, first = new(kind), tiny.prompt(50)
    other = tiny.prompt(40, seed=5)
    for history in (first, first[:30], [*first[:30], 9, 9], first[:31], other, first[:1], first):
        check(drafter, history, 3, kind)
        drafter.observe(full(history), NOTHING)
        check(drafter, history, 2, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_that_was_read(kind, monkeypatch):
    """Told what it drafted it keeps the rows that came true, whatever the next history is."""
    drafter, history = new(kind), tiny.prompt(21)
    for outcome in (full, none, partial, stopped, full, none, partial):
        draft = check(drafter, history, 4, kind)
        drafter.keep_draft(draft)
        history = [*history, *outcome(draft), 5, 6]
    drafter.keep_draft(check(drafter, history, 4, kind))
    check(drafter, history[:-3], 4, kind)
    drafter.write(history)
    drafter.keep_draft(draft := check(drafter, history, 4, kind))
    calls = count_calls(monkeypatch, "verify")
    drafter.draft([*history, *draft[:3], (draft[3] + 1) % tiny.VOCAB], 2, Recorder())
    assert calls == [("verify", 1)] * 2  # what it had guessed right is not written again


@pytest.mark.parametrize("kind", ["sliding", "recurrent"])
def test_a_saved_state_without_rows(kind):
    """A recurrent drafter failed if its conversation was saved before it had drafted anything."""
    drafter = new(kind)
    drafter.restore(new(kind).state())
    check(drafter, tiny.prompt(60), 4, kind)


@pytest.mark.parametrize("kind", ["full", "recurrent", "pard"])
def test_draft_that_was_never_verified(kind):
    """The round was interrupted: nobody knows whether the draft was right."""
    drafter, history = new(kind), tiny.prompt(12)
    draft = check(drafter, history, 4, kind)
    check(drafter, history, 4, kind)
    check(drafter, [*history, *draft, 3], 4, kind)
    check(drafter, [*history, 3, 4, 5], 4, kind)
    check(drafter, history[:-1], 4, kind)
    drafter.observe([*history, *draft, 3, 4], NOTHING)  # the next turn: its prompt, not a round
    check(drafter, [*history, *draft, 3, 4], 2, kind)
    drafter.observe([*history, 5, 6, 7, 8, 9], NOTHING)
    check(drafter, [*history, 5, 6, 7, 8, 9], 2, kind)


@pytest.mark.parametrize("place", ["between two steps", "within a pass"])
@pytest.mark.parametrize("kind", ["recurrent", "pard"])
def test_interrupted_draft(kind, place, monkeypatch):
    """An exception leaves nothing behind."""
    drafter, history = new(kind), tiny.prompt(12)
    history += partial(check(drafter, history, 4, kind))
    drafter.observe(history, NOTHING)
    layer = type(model_of(kind).layers[-1])
    with monkeypatch.context() as patch:
        owner, method = (layer, "__call__") if place == "within a pass" else (Recorder, "draw")
        patch.setattr(owner, method, fail)
        with pytest.raises(ZeroDivisionError):
            drafter.draft(history, 4, Recorder())
    check(drafter, history, 4, kind)
    drafter.observe([*history, 3], NOTHING)
    check(drafter, [*history, 3], 4, kind)


def fail(*_, **__):
    raise ZeroDivisionError


def test_prompt_is_written_while_it_is_observed(monkeypatch):
    """No draft waits for a long prompt, and no pass over it is longer than a chunk."""
    chunks = count_calls(monkeypatch, "prefill")
    drafter, history = new("full"), tiny.prompt(1024 + MAX_UNWRITTEN // 2)
    drafter.observe(history[: 1024 - 99], NOTHING)
    assert chunks == [("prefill", 512), ("prefill", 412)]
    drafter.observe(history, NOTHING)
    assert sum(size for _, size in chunks) == len(history) - 1
    chunks.clear()
    drafter.draft(history, 4, Recorder())
    assert not chunks
    for _ in range(MAX_UNWRITTEN + 10):
        history.append(1)
        drafter.observe(history, NOTHING)
    assert len(chunks) == 1
    drafter.observe(tiny.prompt(9), NOTHING)
    drafter.observe(tiny.prompt(MAX_UNWRITTEN + 60, seed=9), NOTHING)
    check(drafter, tiny.prompt(300, seed=9), 3, "full")


@pytest.mark.parametrize("kind", ["full", "sliding", "recurrent"])
@pytest.mark.parametrize("outcome", [full, partial, none])
def test_one_pass_a_token(outcome, kind, monkeypatch):
    """After a round nothing is written twice, and at most the last draft token is missing."""
    drafter, history = new(kind), tiny.prompt(9)
    history += outcome(drafted(drafter, history, 4).tokens)
    drafter.observe(history, NOTHING)
    calls = count_calls(monkeypatch, "verify", "prefill")
    drafter.draft(history, 4, Recorder())
    assert calls == [("verify", 2 if outcome is full else 1), *[("verify", 1)] * 3]


# --- vocabularies of different length


@pytest.mark.parametrize("size", [200, 256, 300])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_vocabulary(size, temperature):
    drafter = DraftModel(tiny.full(seed=1, vocab_size=size), VocabularySizes(size, tiny.VOCAB))
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


# --- from disk


def test_any_language_model_becomes_a_drafter(tmp_path):
    history, expected = tiny.prompt(9), drafted(new("full"), tiny.prompt(9), 3)
    config = read(save(model_of("full"), tmp_path))
    for sizes in ({"vocab_size": 260}, {"text_config": {"vocab_size": 260}, "vocab_size": 1}):
        source = open_drafter(read_checkpoint(tmp_path), config, {"model_type": "llama", **sizes})
        draft = source.make(None).draft(history, 3, Sampling(1.0).sampler(1, 260))
        assert source.name == "llama" and draft.probs.shape == (3, 260)
    assert drafted(source.make(None), history, 3).tokens == expected.tokens


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_five_rounds_of_pard_by_transformers(name, tmp_path):
    """2, none, all, 1 and 3 of the 4 drafts are accepted."""
    folder = Path(__file__).parents[1] / "golden" / "pard" / name
    config, facts = read(folder), read(folder, "golden.json")
    tensors, golden = (mx.load(str(folder / f"{part}.safetensors")) for part in ("model", "golden"))
    published = fitted.Checkpoint(tensors, config, fitted.target_config(3, vocab=config["vocab_size"]))
    drafter = fitted.opened(published, tmp_path).make(LMTarget(tiny.full()).parts)
    for i, begin in enumerate(facts["begins"]):
        history = facts["history"][:begin]
        drafter.observe(history, NOTHING)
        assert largest(fitted.logits_of(drafter, history, 4), golden[f"logits.{i}"]) < TOLERANCE / 10
