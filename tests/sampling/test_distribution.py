"""Sampled tokens follow the target's distribution, whatever is drafted: alone, by trees, and in a batch.

A right engine is rejected once in a million a test; the keys are fixed, so a pass stays a pass. The controls,
such as argmax drafts that pose as drawn, must be rejected by the same tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from support import random_sources
from support.enumeration import normalised, without_replacement
from support.exact_distribution import (
    COUNT,
    FEW,
    FILTERED,
    NOISE,
    PLAIN,
    PROMPT,
    Lying,
    V,
    draft_model,
    exact,
    excess,
    excess_of,
    law_target,
    model,
    seeded,
    unseeded,
)
from support.lossless import Scripted, emitted, first_difference, rounds

from mlx_spec.decode import Batch
from mlx_spec.decode.running import RunningSequence
from mlx_spec.drafters import DrafterSource
from mlx_spec.drafters.draft_model import VocabularySizes, draft_model_source
from mlx_spec.drafters.lookup import Lookup
from mlx_spec.model.target import LMTarget
from mlx_spec.model.target_batch import TargetBatch
from mlx_spec.model.tree import tree_of
from mlx_spec.policy import FixedPolicy
from mlx_spec.prompt import text_prompt
from mlx_spec.sampling import Sampling
from mlx_spec.sampling.verify import accept_block
from mlx_spec.types import Draft, Drafter, Features, FeatureSpec, Round, Sampler

TOGETHER = 8  # sequences of a batch


class Static:
    """Drafts the same tree each time: two guesses for the first place, two and one after them."""

    needs, tokens = FeatureSpec(), (3, 1, 5, 6, 2)

    def observe(self, history: Sequence[int], features: Features) -> None:
        pass

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        if limit == 1:
            return self.guesses((self.tokens[0], self.tokens[3]), (0, 0))
        return self.guesses(self.tokens, (0, 1, 1, 0, 4))

    def guesses(self, tokens: tuple[int, ...], shape: tuple[int, ...]) -> Draft:
        return Draft(mx.array(tokens, dtype=mx.int32), parents=shape)


class Sampled(Static):
    """Draws guesses without replacement; if it `lies`, it says that they were drawn with replacement."""

    def __init__(self, lies: bool = False) -> None:
        self.rng, self.lies = np.random.default_rng(5), lies
        self.rows = normalised(np.exp(3 * np.random.default_rng(12).normal(size=(2, V))))

    def guesses(self, tokens: tuple[int, ...], shape: tuple[int, ...]) -> Draft:
        tree, drawn, said = tree_of(shape), list[int](), []
        for j, row in enumerate(shape):
            earlier = [drawn[i] for i in range(j) if shape[i] == row]
            q = without_replacement(self.rows[tree.depths[row]], earlier)
            drawn.append(int(self.rng.choice(V, p=q)))
            said.append(self.rows[tree.depths[row]] if self.lies else q)
        probs = mx.array(np.array(said).astype(np.float32))
        return Draft(mx.array(drawn, dtype=mx.int32), probs, parents=shape)


class Posing(Static):
    """Drafts the same tree each time and says that it was drawn."""

    def guesses(self, tokens: tuple[int, ...], shape: tuple[int, ...]) -> Draft:
        return Draft(mx.array(tokens, dtype=mx.int32), mx.full((len(shape), V), 1 / V), parents=shape)


def tree_excess(
    drafter: Static, sampling: Sampling, sampler: Callable[[int], Sampler] | None = None
) -> float:
    return excess(drafter, sampling, sampler, FEW, model())


def batch_excess(
    source: DrafterSource, sampling: Sampling, wrap: Callable[[Drafter], Drafter] = lambda d: d
) -> float:
    """Return the excess of generations that share the passes of a batch."""
    texts, drafted, together = dict[int, list[int]](), 0, 0
    batch = Batch(lambda: TargetBatch(law_target(), source.needs), TOGETHER)
    for i in range(FEW):
        target = LMTarget(law_target(), source.needs)
        drafter, policy = wrap(source.make(target.parts)), FixedPolicy(COUNT - 1 - i % 2)
        parts = (target, [drafter], policy, unseeded(sampling)(i), text_prompt(PROMPT), COUNT)
        sequence = RunningSequence(*parts)
        list(sequence.prefill())  # else one prompt is read a step, and answers so short are never together
        texts[batch.add(sequence)] = []
    for id, round in batch.run():
        assert isinstance(round, Round)
        texts[id] += round.tokens
        drafted, together = drafted + round.drafted, max(together, round.batch_size)
    assert drafted > FEW / 2 and together == TOGETHER
    return excess_of([*texts.values()], exact(law_target(), sampling))


def draft_source() -> DrafterSource:
    return draft_model_source("other", model(noise=NOISE), VocabularySizes(V, V))


def reading_source() -> DrafterSource:
    """Return drafters that read the hidden states of the target."""
    return random_sources.eagle3(16, V, range(0, V, 2), (0, 1))


RIGHT: dict[str, Callable[[], float]] = {
    "drawn": lambda: excess(draft_model(), FILTERED),
    "drawn with the target's noise": lambda: excess(draft_model(), FILTERED, seeded(FILTERED), FEW, model()),
    "not drawn": lambda: excess(Lookup(2, 8), FILTERED, None, FEW, model()),
    "a tree that was not drawn": lambda: tree_excess(Static(), FILTERED),
    "a drawn tree": lambda: tree_excess(Sampled(), FILTERED),
    "a drawn tree with the target's noise": lambda: tree_excess(Sampled(), FILTERED, seeded(FILTERED)),
    "a batch": lambda: batch_excess(draft_source(), FILTERED),
    "a batch without filters": lambda: batch_excess(reading_source(), PLAIN),
}
WRONG: dict[str, Callable[[], float]] = {
    "argmax posing as drawn": lambda: excess(Lying(draft_model()), PLAIN, None, FEW, model()),
    "argmax posing as drawn, in a batch": lambda: batch_excess(reading_source(), PLAIN, Lying),
    "no filters": lambda: excess(Scripted([]), FILTERED, unseeded(PLAIN), 60),  # one impossible token tells
    "a tree drawn without replacement": lambda: tree_excess(Sampled(lies=True), PLAIN),
    "a tree posing as drawn": lambda: tree_excess(Posing(), PLAIN),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_emitted_follows_the_distribution(name: str) -> None:
    assert RIGHT[name]() < 1


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_is_caught(name: str) -> None:
    assert WRONG[name]() > 1


def test_a_recovered_token_drawn_from_p_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_target(p: mx.array, *rest: mx.array) -> tuple[mx.array, mx.array]:
        n, _ = accept_block(p, *rest)
        return n, p[n]

    monkeypatch.setattr("mlx_spec.sampling.sampling.accept_block", from_target)  # an honest fault
    assert excess(draft_model(), PLAIN) > 1


def text(drafter: Drafter, K: int, sampling: Sampling, count: int) -> list[int]:
    done = rounds(LMTarget(model()), drafter, K, PROMPT, count, V, sampling)
    assert not K or 0 < sum(r.accepted for r in done) < sum(r.drafted for r in done)
    return emitted(done)


def test_seeded_text_is_the_same_with_any_drafter_or_none() -> None:
    """Nine drafted texts and the plain one."""
    count = 25
    sampling = Sampling(0.8, seed=11, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.02)
    plain = text(Scripted([]), 0, sampling, count)
    spoiled = [(t + 1) % V if i % 5 == 4 else t for i, t in enumerate(plain)]
    for K in (1, 3, 7):
        for drafter in (Scripted([*PROMPT, *spoiled]), Lookup(1, 8), draft_model()):
            drafted = text(drafter, K, sampling, count)
            assert drafted == plain, f"{type(drafter).__name__}, K {K}: {first_difference(drafted, plain)}"
    assert text(Scripted([]), 0, replace(sampling, seed=12), count) != plain
