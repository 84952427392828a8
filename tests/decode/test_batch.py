"""Sequences that come and go at random: the text of each is its text alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, count

import mlx.core as mx
import mlx.nn as nn
import pytest
from support import random_sources, tiny
from support.lossless import Scripted, plain, texts

from mlx_spec.decode.running import RunningSequence
from mlx_spec.decode.scheduler import Batch
from mlx_spec.drafters import DrafterSource
from mlx_spec.drafters.lookup import lookup_source
from mlx_spec.model.target import LMTarget
from mlx_spec.model.target_batch import TargetBatch
from mlx_spec.policy import FixedPolicy
from mlx_spec.prompt import text_prompt
from mlx_spec.sampling import Sampling
from mlx_spec.types import (
    Decision,
    Draft,
    DraftCall,
    DraftChoice,
    Features,
    FeatureSpec,
    Reason,
    RequestDrafter,
    Round,
    Sampler,
)

COUNT = 20  # tokens of an answer; the window of sliding caches is 16
PROMPTS = [tiny.prompt(length, seed=length) for length in (1, 3, 14, 20, 45, 40, 130, 30)]
ALIKE = (3, 7, 5, 4)  # prompts whose lengths are so alike that one pass reads them
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, seed=3),
    Sampling(temperature=1.2, top_k=20, top_p=0.9, seed=5),
    Sampling(repetition_penalty=1.3, presence_penalty=0.5, logit_bias={7: 2.0, 9: -100.0}),
]
STOP = frozenset(range(0, 256, 97))
KINDS = ["full", "quantized", "sliding", "shared", "recurrent", "recurrent_moe"]
SOURCES = {"lookup": lookup_source, **random_sources.FOR_TINY}


@cache
def model_of(kind: str) -> nn.Module:
    """Return a model of a kind; without windows, which all drafters take, of as few layers as it needs."""
    layers = {"full": 1, "recurrent": 2}.get(kind)
    return tiny.model_of(kind) if layers is None else getattr(tiny, kind)(num_hidden_layers=layers)


@cache
def alone(kind: str, index: int, sampling: int) -> list[int]:
    """Return the text of a prompt by itself, decoded plainly."""
    model, bits = model_of(kind), tiny.bits_of(kind)
    return plain(model, PROMPTS[index], COUNT, bits, SAMPLINGS[sampling], STOP)


class RandomLengths:
    """Drafts 0 to 7 tokens, by chance. Half of the time, several rounds are plain."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.lengths: list[int] = []

    def begin(self, request_drafters: Sequence[RequestDrafter] = ()) -> None: ...

    def decide(self, history: Sequence[int]) -> Decision:
        self.lengths = self.lengths or self.draw.choice([[0] * 4, self.draw.choices(range(8), k=4)])
        length = self.lengths.pop()
        return Decision((DraftChoice(0, length, "drafter"),) if length else (), Reason.FIXED)

    def observe(self, round: Round) -> None: ...

    def settle(self) -> None: ...


class Mixed(Scripted):
    """Drafts the truth, the truth with a wrong token, nothing, or what a drafter says."""

    def __init__(
        self, truth: Sequence[int], source: DrafterSource | None, target: LMTarget, seed: int
    ) -> None:
        super().__init__(truth)
        self.drafter, self.chance, self.own = source and source.make(target.parts), random.Random(seed), 0

    def observe(self, history: Sequence[int], features: Features) -> None:
        if self.drafter is not None:
            self.drafter.observe(history, features)

    def draft_batch(self, requests: Sequence[DraftCall]) -> list[Draft]:
        """Ask their own drafters together, half of the time."""
        if self.drafter is None or self.chance.random() < 0.5:
            return [r.drafter.draft(r.history, r.limit, r.sampler) for r in requests]
        drafts = self.drafter.draft_batch([replace(r, drafter=r.drafter.drafter) for r in requests])
        self.own += sum(draft.tokens.size for draft in drafts)
        return drafts

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        how = self.chance.choice(["own", "truth", "wrong", "none"])
        if how == "own" and self.drafter is not None:
            draft = self.drafter.draft(history, limit, sampler)
            self.own += draft.tokens.size
            return draft
        tokens = [] if how == "none" else self.truth[len(history) : len(history) + limit]
        if how == "wrong" and tokens:
            tokens[len(tokens) // 2] ^= 1
        return Draft(mx.array(tokens, dtype=mx.int32))


def assert_texts_alone(
    kind: str,
    source: DrafterSource | None,
    seed: int,
    most: int,
    steps: int = 24,
    samplings: int = len(SAMPLINGS),
) -> None:
    """Run a random schedule and compare every text, also of those that were removed in its middle.

    The first `samplings` of SAMPLINGS are used.
    """
    draw, model, needs = random.Random(seed), model_of(kind), source.needs if source else FeatureSpec()
    ticks = random.Random(seed)  # of a clock that goes alike on every machine
    times = accumulate(ticks.uniform(0, 0.01) for _ in count())  # seconds
    read = list[int]()  # how many prompts were read together

    class Counted(TargetBatch):
        def prefill(self, tokens: mx.array, sizes: Sequence[int]) -> list[Features]:
            read.append(len(sizes))
            return super().prefill(tokens, sizes)

    batch = Batch(lambda: Counted(model, needs), most, clock=lambda: next(times))
    said: dict[int, list[int]] = {}
    truths: dict[int, list[int]] = {}
    drafters, together, own = list[Mixed](), set[int](), 0

    def add(index: int) -> None:
        sampling = draw.randrange(samplings)
        truth, target = alone(kind, index, sampling), LMTarget(model, needs, kv_bits=tiny.bits_of(kind))
        drafters.append(Mixed([*PROMPTS[index], *truth], source, target, draw.randrange(99)))
        policy, sampler = (
            RandomLengths(draw.randrange(99)),
            SAMPLINGS[sampling].sampler(len(PROMPTS[index]), 256),
        )
        parts = (target, [drafters[-1]], policy, sampler, text_prompt(PROMPTS[index]), COUNT, STOP)
        id = batch.add(RunningSequence(*parts), park=draw.random() < 0.5)
        truths[id], said[id] = truth, []

    for i in range(most):
        add(ALIKE[i % len(ALIKE)])
    for step in range(400):
        if step < steps and len(batch) < most + 2 and draw.random() < 0.4:
            for _ in range(draw.choice([1, 1, 3])):
                add(draw.randrange(len(PROMPTS)))
        if step < steps and draw.random() < 0.05:
            batch.remove(draw.choice(list(said)))
        for id, round in batch.step():
            assert isinstance(round, Round), round
            said[id] += round.tokens
            assert said[id] == truths[id][: len(said[id])], f"sequence {id} of {len(said)}"
            assert (round.finish_reason is not None) == (said[id] == truths[id])
        together |= set(batch.group_sizes)
        if not len(batch):
            break
    assert not len(batch)
    assert max(together) >= min(most, 4)
    assert bool(read) != kind.startswith("recurrent")
    own = sum(drafter.own for drafter in drafters)
    assert own or source is None or source.name == "lookup"


@pytest.mark.parametrize("kind", KINDS)
def test_every_text_is_that_alone(kind: str) -> None:
    steps = {"recurrent_moe": 32, "quantized": 24}.get(kind, 16)  # until four decode together
    assert_texts_alone(kind, None, seed=1, most=4, steps=steps)


@pytest.mark.parametrize("kind", ["full", "recurrent"])
def test_one_argmax_chooses_the_tokens_of_all(kind: str) -> None:
    assert_texts_alone(kind, None, seed=2, most=2, steps=10, samplings=1)


@pytest.mark.parametrize("name", SOURCES)
def test_every_text_is_that_alone_with_drafters(name: str) -> None:
    kind = "shared" if name == "gemma4 assistant" else "sliding"
    assert_texts_alone(kind, SOURCES[name](), seed=3, most=3, steps=10)


class Failing(TargetBatch):
    def prefill(self, tokens: mx.array, sizes: Sequence[int]) -> list[Features]:
        super().prefill(tokens, sizes)
        raise RuntimeError("this pass fails")


def test_prompts_whose_common_pass_fails_are_read_one_by_one() -> None:
    model, indexes = model_of("sliding"), ALIKE[:3]
    batch = Batch(lambda: Failing(model, FeatureSpec()), 3)
    for index in indexes:
        sampler = SAMPLINGS[0].sampler(len(PROMPTS[index]), 256)
        parts = (LMTarget(model), (), FixedPolicy(0), sampler, text_prompt(PROMPTS[index]), COUNT, STOP)
        batch.add(RunningSequence(*parts))
    assert texts(batch.run()) == {id: alone("sliding", index, 0) for id, index in enumerate(indexes)}
