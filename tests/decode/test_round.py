"""The round and the loop: lossless against mlx-lm, features line up, stops cut before the commit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import mlx.core as mx
import pytest
from support import tiny
from support.lossless import (
    GREEDY,
    Listed,
    Scripted,
    emitted,
    first_difference,
    lengths,
    mlx_lm_greedy,
    plain,
    rounds,
)

from mlx_spec.decode import round as one_round
from mlx_spec.decode.loop import generate
from mlx_spec.model.target import LMTarget
from mlx_spec.sampling import Sampling
from mlx_spec.types import Decision, Draft, DraftChoice, FeatureSpec, Reason, Sampler

KINDS = ["full", "qwen", "sliding", "shared", "recurrent", "recurrent_moe"]
ROLLBACKS = ["full", "shared", "recurrent"]  # kinds whose caches are rolled back by different rules
LAYERS = {"full": 2, "qwen": 2, "sliding": 2, "recurrent": 2}  # as few as a kind needs, and a hidden one
MODELS = {
    kind: getattr(tiny, kind)(**{"num_hidden_layers": LAYERS[kind]} if kind in LAYERS else {})
    for kind in KINDS
}
COUNT = 20  # tokens of an answer
BITS, SPOILED, LENGTHS = [None, 8, 4], [(1, 2), (4, 3), (16, 2)], [1, 16, 40]


@functools.cache
def said(kind: str, length: int, kv_bits: int | None = None) -> list[int]:
    """Return the answer of plain decoding to the prompt of that length."""
    return plain(MODELS[kind], tiny.prompt(length), COUNT, kv_bits)


@pytest.mark.parametrize(
    ("kind", "length"),
    [*itertools.product(KINDS, [1, 40]), *itertools.product(["sliding", "shared"], [15, 16, 17])],
)
def test_plain_decoding_is_that_of_mlx_lm(kind: str, length: int) -> None:
    ours, theirs = said(kind, length), mlx_lm_greedy(MODELS[kind], tiny.prompt(length), COUNT)
    assert ours == theirs, first_difference(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_bits", BITS)
def test_scripted_drafts_are_lossless(kind: str, kv_bits: int | None) -> None:
    """By two Latin squares any two of bits, draft and prompt length meet, and each meets every kind."""
    row, column = KINDS.index(kind), BITS.index(kv_bits)
    (K, spoil), length = SPOILED[(row + column) % 3], LENGTHS[(row + 2 * column) % 3]
    prompt, truth = tiny.prompt(length), said(kind, length, kv_bits)
    drafter = Scripted(prompt + truth, spoil)
    done = rounds(LMTarget(MODELS[kind], kv_bits=kv_bits), drafter, K, prompt, COUNT)
    assert emitted(done) == truth, first_difference(emitted(done), truth)
    assert len(emitted(done)) == COUNT
    accepted, drafted = sum(r.accepted for r in done), sum(r.drafted for r in done)
    assert 0 < accepted < drafted


class Noting(Listed):
    """Notes in which order the device begins and the policy learns."""

    def __init__(self, events: list[str], *decisions: Decision) -> None:
        super().__init__(*decisions)
        self.events = events

    def decide(self, history: Sequence[int]) -> Decision:
        self.events.append("decide")
        return super().decide(history)

    def settle(self) -> None:
        self.events.append("settle")


@pytest.mark.parametrize("K", [0, 4])
def test_what_no_decision_needs_is_learned_while_the_device_computes(
    K: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, truth = tiny.prompt(10), said("full", 10)
    events, begin = list[str](), mx.async_eval
    monkeypatch.setattr(one_round.mx, "async_eval", lambda *arrays: events.append("begin") or begin(*arrays))
    read = one_round._read
    monkeypatch.setattr(one_round, "_read", lambda array: events.append("read") or read(array))
    policy = Noting(events, *lengths(K).decisions)
    rounds(LMTarget(MODELS["full"]), Scripted(prompt + truth), policy, prompt, COUNT)
    order = [event for event, _ in itertools.groupby(events)]
    assert len(order) == 4 * len(policy.rounds)
    assert order == ["decide", "begin", "settle", "read"] * len(policy.rounds)


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_those_of_one_plain_forward(kind: str) -> None:
    needs = FeatureSpec(hidden_layers=(0, -1), final_hidden=True)
    prompt, truth = tiny.prompt(17), said(kind, 17)
    drafter = Scripted(prompt + truth, 2, needs)
    rounds(LMTarget(MODELS[kind], needs), drafter, lengths(4, 4, 0, 0), prompt, COUNT)
    whole = LMTarget(MODELS[kind], needs).prefill((prompt + truth)[:-1])
    final = [f.final_hidden for f in drafter.seen if f.final_hidden is not None]
    assert whole.final_hidden is not None
    pairs = [(mx.concatenate(final), whole.final_hidden)]
    pairs += [(mx.concatenate([f.hidden[i] for f in drafter.seen]), whole.hidden[i]) for i in (0, 1)]
    for seen, expected in pairs:
        assert seen.shape == expected.shape
        assert mx.abs(seen - expected).max().item() < 2e-3 * mx.abs(expected).max().item()
    sizes = [rows.shape[0] for rows in final]
    assert drafter.histories == [sum(sizes[: i + 1]) + 1 for i in range(len(sizes))]


@pytest.mark.parametrize("kind", ROLLBACKS)
@pytest.mark.parametrize("K", [0, 4])
def test_a_stop_token_ends_the_round_and_the_next_turn_is_lossless(kind: str, K: int) -> None:
    model, prompt = MODELS[kind], tiny.prompt(17)
    truth = said(kind, 17)[:30]
    stop = next(t for i, t in enumerate(truth) if i > 5 and t not in truth[:i])
    end = truth.index(stop) + 1
    target, drafter = LMTarget(model), Scripted(prompt + truth)
    done = rounds(target, drafter, K, prompt, 30, stop=[stop])
    assert emitted(done) == truth[:end]
    assert done[-1].finish_reason == "stop" and all(r.finish_reason is None for r in done[:-1])
    assert target.size == len(prompt) + end - 1
    history = prompt + truth[:end] + tiny.prompt(5, seed=9)
    more = emitted(rounds(target, Scripted([]), K, history, 20))
    assert more == mlx_lm_greedy(model, history, 20)


@pytest.mark.parametrize("K", [0, 1, 5])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_max_tokens_is_exact(K: int, count: int) -> None:
    prompt = tiny.prompt(9)
    truth = plain(MODELS["full"], prompt, 20)
    done = rounds(LMTarget(MODELS["full"]), Scripted(prompt + truth), K, prompt, count)
    assert emitted(done) == truth[:count] and done[-1].finish_reason == "length"


@pytest.mark.parametrize("K", [0, 4])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_p=0.9, presence_penalty=0.5)])
def test_one_device_to_host_copy_a_round(K: int, sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    read = one_round._read
    monkeypatch.setattr(one_round, "_read", lambda array: copies.append(array.size) or read(array))
    prompt = tiny.prompt(17)
    done = rounds(LMTarget(MODELS["full"]), Scripted([5] * 90), K, prompt, 40, sampling=sampling)
    assert len(copies) == len(done)


@pytest.mark.parametrize("kind", ROLLBACKS)
def test_the_next_drafter_is_tried_where_one_has_nothing(kind: str) -> None:
    prompt, truth = tiny.prompt(17), said(kind, 17)

    class Seldom(Scripted):
        def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
            return super().draft(history, limit if len(history) % 3 == 0 else 0, sampler)

    policy = Listed(Decision((DraftChoice(0, 2, "seldom"), DraftChoice(1, 4, "drafter")), Reason.PAYS))
    drafters = [Seldom(prompt + truth), Scripted(prompt + truth, 2)]
    done = rounds(LMTarget(MODELS[kind]), drafters, policy, prompt, COUNT)
    assert emitted(done) == truth
    assert {r.source for r in policy.rounds if r.drafted} == {"seldom", "drafter"}
    assert drafters[0].histories == drafters[1].histories


@pytest.mark.parametrize("kind", ROLLBACKS)
def test_plain_decoding_queues_ahead_while_there_is_nothing_to_draft(kind: str) -> None:
    prompt, truth = tiny.prompt(17), said(kind, 17)

    class Late(Scripted):
        def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
            return super().draft(history, limit if len(history) > 24 else 0, sampler)

    policy = Listed(Decision((DraftChoice(0, 4, "drafter"),), Reason.PAYS))
    sampler, target = GREEDY.sampler(17, 256), LMTarget(MODELS[kind])
    queued, done = [], []
    for round in generate(target, [Late(prompt + truth)], policy, sampler, prompt, max_tokens=COUNT):
        done.append(round)
        queued.append(bool(target.uncommitted))
    assert emitted(done) == truth
    assert [r.kind == "plain" for r in done] == queued
    early = [i for i, r in enumerate(done) if sum(len(d.tokens) for d in done[: i + 1]) < 7]
    assert [queued[i] for i in early] == [False, *[True] * (len(early) - 1)]
    first = next(i for i, r in enumerate(done) if r.kind == "draft")
    assert [r.kind for r in done[first - 2 : first]] == ["plain", "drained"]  # the queued token comes first
    assert done[first].drafted == 4 and sum(r.drafted for r in done) >= 8


@pytest.mark.parametrize("kind", ROLLBACKS)
def test_a_round_says_what_it_was(kind: str) -> None:
    """A draft that is wanted lets the queued token land; the last round queues nothing."""
    prompt, truth = tiny.prompt(17), said(kind, 17)
    draft, plain_ = (
        Decision((DraftChoice(0, 3, "drafter"),), Reason.PAYS),
        Decision((), Reason.COST, plain_seconds=0.5),
    )
    policy = Listed(plain_, plain_, draft, draft)
    done = rounds(LMTarget(MODELS[kind]), Scripted(prompt + truth, 2), policy, prompt, COUNT)
    assert emitted(done) == truth
    assert [r.kind for r in done[:8]] == ["plain", "plain", "drained", "draft"] * 2
    assert all((r.kind == "draft") == (r.source == "drafter") == bool(r.drafted) for r in done)
    assert {r.plain_seconds for r in done} == {0.5, None}
    assert done[-1].kind != "plain" and done[-1].finish_reason == "length"
