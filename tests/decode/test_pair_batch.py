"""A batch of requests of every kind: each gets what it gets alone, and a failing one fails alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from support.lossless import emitted, texts

import mlx_spec
from mlx_spec.decode import Batch
from mlx_spec.decode.loop import decode
from mlx_spec.errors import InvalidValue
from mlx_spec.grammar.matcher import compile_grammar
from mlx_spec.model.layer_caches import RecurrentCache
from mlx_spec.pair import Pair
from mlx_spec.policy import AdaptivePolicies, FixedPolicy, Table
from mlx_spec.policy.batch import FEWEST_RUNNING, MOST_RUNNING, BatchPolicies
from mlx_spec.sampling import Sampling
from mlx_spec.types import DraftCall, Reason, Round

GOLDEN = Path(__file__).parents[1] / "golden"
TEXTS = ["The capital of", "def fib(n):", "one two three four five six seven eight nine ten", "Once upon a"]
COUNT = 26  # tokens of an answer: more than those of the grammar


@pytest.fixture(scope="module")
def pair() -> Pair:
    """A trained target with an assistant, in float32."""
    made = mlx_spec.load(
        GOLDEN / "e2b-trained" / "target", GOLDEN / "e2b-trained" / "assistant", num_draft_tokens=3
    )
    made._model.set_dtype(mx.float32)
    made._drafters[0].network.set_dtype(mx.float32)
    made.open()  # prepares the model for trees, as an answer alone does
    assert made.batch_support.obstacle is None
    return made


def prompts_of(pair: Pair) -> list[list[int]]:
    return [[2, *pair.tokenizer.encode(text)] for text in TEXTS]


def texts_alone(pair: Pair, prompts: list[list[int]], count: int) -> dict[int, list[int]]:
    return {i: emitted(pair.generate(prompt, max_tokens=count)) for i, prompt in enumerate(prompts)}


@pytest.fixture(scope="module")
def alone(pair: Pair) -> dict[int, list[int]]:
    """The first 20 tokens of each answer alone."""
    return texts_alone(pair, prompts_of(pair), 20)


def requests_of(pair: Pair) -> list[dict[str, Any]]:
    grammar = compile_grammar("regex", "[a-z ]{20}", pair.tokenizer, pair.info.vocab_size, seconds=5.0)
    return [
        {"sampling": Sampling(), "top_logprobs": 3},
        {"sampling": Sampling(temperature=0.9, seed=4, grammar=grammar)},
        {"sampling": Sampling(repetition_penalty=1.2, temperature=0.5, top_p=0.9, seed=1), "top_logprobs": 0},
        {"sampling": Sampling(), "prediction": pair.tokenizer.encode(" time there was a"), "stop": {40}},
    ]


def by_id(pair: Pair, requests: list[dict[str, Any]]) -> list[list[Round | Exception]]:
    batch, found, sizes = pair.batch(), list[list[Round | Exception]](), set[int]()
    for prompt, request in zip(prompts_of(pair), requests, strict=True):
        batch.add(pair.prepare(pair.open(), prompt, max_tokens=COUNT, **request))
        found.append([])
    while len(batch):
        for id, round in batch.step():
            found[id].append(round)
        sizes |= set(batch.group_sizes)
    assert max(sizes) > 2
    return found


def test_every_request_is_as_alone(pair: Pair) -> None:
    requests, accepted = requests_of(pair), 0
    separate = [
        list(decode(pair.prepare(pair.open(), prompt, max_tokens=COUNT, **request)))
        for prompt, request in zip(prompts_of(pair), requests, strict=True)
    ]
    for request, rounds, alone in zip(requests, by_id(pair, requests), separate, strict=True):
        assert all(isinstance(round, Round) for round in rounds)
        assert emitted(rounds) == emitted(alone)
        assert rounds[-1].finish_reason == alone[-1].finish_reason
        accepted += sum(round.accepted for round in rounds)
        ours, theirs = ([each for round in some for each in round.logprobs] for some in (rounds, alone))
        assert len(ours) == (len(emitted(alone)) if "top_logprobs" in request else 0)
        for a, b in zip(ours, theirs, strict=True):
            assert a.token == b.token and a.logprob == pytest.approx(b.logprob, abs=1e-3)
            assert [each.token for each in a.top] == [each.token for each in b.top]
    assert accepted > 5


class Failing:
    """A sampler that fails in the middle of an answer."""

    is_argmax = False

    def __init__(self, sampler: Any, after: int, method: str) -> None:
        self.sampler, self.after, self.method = sampler, after, method

    @property
    def drafting(self) -> Any:
        return self.sampler.drafting

    def __getattr__(self, name: str) -> Any:
        return self.count if name == self.method else getattr(self.sampler, name)

    def count(self, *given: Any, **options: Any) -> Any:
        self.after -= 1
        if not self.after:
            raise InvalidValue("this sampler fails")
        return getattr(self.sampler, self.method)(*given, **options)


@pytest.mark.parametrize(("method", "num_draft_tokens"), [("draw", 0), ("verify", 3)])
def test_a_failing_request_fails_alone(
    pair: Pair, alone: dict[int, list[int]], method: str, num_draft_tokens: int
) -> None:
    batch, prompts = pair.batch(), prompts_of(pair)
    pair.policies = FixedPolicy(num_draft_tokens)
    for index, prompt in enumerate(prompts):
        sequence = pair.prepare(pair.open(), prompt, max_tokens=20)
        if index == 1:
            sequence.sampler = Failing(sequence.sampler, 4, method)
        batch.add(sequence)
    results = list(batch.run())
    found = texts((id, round) for id, round in results if isinstance(round, Round))
    pair.policies = FixedPolicy(3)
    assert [(id, str(e)) for id, e in results if isinstance(e, Exception)] == [(1, "this sampler fails")]
    assert found[1] == alone[1][: len(found[1])]
    assert [found[i] for i in (0, 2, 3)] == [alone[i] for i in (0, 2, 3)]


def test_generate_batch(pair: Pair, alone: dict[int, list[int]]) -> None:
    prompts = prompts_of(pair)
    found = texts(pair.generate_batch(prompts, max_tokens=15, max_running=2))
    assert found == {index: text[:15] for index, text in alone.items()}


def recurrent_rounds() -> list[Round]:
    """The shared rounds of two prompts to a recurrent target, whose texts are those alone."""
    target = GOLDEN / "trained" / "qwen"
    pair = mlx_spec.load(target, target, num_draft_tokens=3)
    prompts = [[1, 2, 3, 1, 2, 3, 1], [5, 6, 7, 5, 6, 7, 5, 6]]
    results = list(pair.generate_batch(prompts, max_tokens=28))
    assert texts(results) == texts_alone(pair, prompts, 28)
    return [round for _, round in results if round.batch_size > 1]


def test_recurrent_targets_draft_in_a_batch() -> None:
    rounds = recurrent_rounds()
    assert Reason.RECURRENT not in {round.reason for round in rounds}
    assert sum(round.accepted for round in rounds) > 20


def test_a_recurrent_target_that_takes_no_padding_is_plain_in_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RecurrentCache, "begin", lambda self, rows, T: None)
    rounds = recurrent_rounds()
    assert {round.reason for round in rounds} == {Reason.RECURRENT}
    assert not any(round.drafted for round in rounds)


def test_sequences_of_a_target_that_cannot_share_take_turns(pair: Pair, alone: dict[int, list[int]]) -> None:
    batch = Batch(None, 4)
    prompts = prompts_of(pair)[:2]
    for prompt in prompts:
        batch.add(pair.prepare(pair.open(), prompt, max_tokens=10))
    results = [result for _ in range(4) for result in batch.step()]
    assert batch.group_sizes == [1, 1]
    assert texts([*results, *batch.run()]) == {0: alone[0][:10], 1: alone[1][:10]}


def test_the_adaptive_policy_decides_for_the_batch() -> None:
    folder = GOLDEN / "e2b-trained"
    pair = mlx_spec.load(folder / "target", folder / "assistant")
    assert isinstance(pair.policies, AdaptivePolicies)
    table = {rows: 0.01 for rows in (1, 17, 64)}
    pair.policies.use(Table(0.01, table, [{1: 1e-5, 16: 1e-4}] * len(pair.policies.names)))
    prompts = prompts_of(pair)
    rounds = list(pair.generate_batch(prompts, max_tokens=16))
    assert texts(rounds) == texts_alone(pair, prompts, 16)
    assert any(round.drafted for _, round in rounds)
    assert {round.plain_seconds for _, round in rounds} != {None}


@pytest.mark.parametrize(("name", "bits"), [("e2b-trained", 8), ("12b-trained", None)])
def test_an_assistant_drafts_for_several_as_for_each(name: str, bits: int | None) -> None:
    """With a head of centroids, the first, and without one."""
    pair = mlx_spec.load(GOLDEN / name / "target", GOLDEN / name / "assistant", num_draft_tokens=0)
    pair._model.set_dtype(mx.float32)
    network = pair._drafters[0].network
    network.set_dtype(mx.float32)
    if bits is not None:
        nn.quantize(network, group_size=32, bits=bits)
    requests = []
    for i, text in enumerate(TEXTS):
        parts, history = pair.open(), [2, *pair.tokenizer.encode(text * (1 + i % 3))]
        for round in decode(pair.prepare(parts, history, max_tokens=2 + i)):
            history = [*history, *round.tokens]
        sampler = Sampling(temperature=0.5 * (i % 2), seed=i).sampler(len(history), pair.info.vocab_size)
        requests.append(DraftCall(parts.drafters[0], history, [3, 0, 5, 2][i], sampler))
    requests.append(replace(requests[0], drafter=pair.open().drafters[0]))  # it has seen nothing
    together = requests[0].drafter.draft_batch(requests)
    alone = [r.drafter.draft(r.history, r.limit, r.sampler) for r in requests]
    assert [d.tokens.tolist() for d in together] == [d.tokens.tolist() for d in alone]
    assert [d.tokens.size for d in together] == [3, 0, 5, 2, 0]


def test_how_many_run_depends_on_what_rows_cost() -> None:
    policies = BatchPolicies(["mtp"])
    assert policies.most_running() == FEWEST_RUNNING
    for last, most in ((1.5, MOST_RUNNING), (9.0, FEWEST_RUNNING), (3.0, 9)):
        policies.use(Table(0.01, {1: 0.01, 17: 0.01 * last}, [{1: 1e-4}]))
        assert policies.most_running() == most
