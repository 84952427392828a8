"""Check that the engine keeps the target's distribution when a drafter of a family drafts.

As in exact_distribution.py, tokens of a tiny model are counted over many generations and compared with its
exact distribution. A right engine is rejected once in a million; the keys are fixed, so a pass stays a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import chi_square
import exact_distribution
import fitted
import mlx.nn as nn
import numpy as np
from exact_distribution import COUNT, PLAIN, PROMPT, Liar, V, unseeded
from lossless import Scripted, emitted

from mlx_spec.drafters import DrafterSource
from mlx_spec.engine import generate
from mlx_spec.model.target import LMTarget
from mlx_spec.policy import FixedPolicy
from mlx_spec.sampling import Sampling
from mlx_spec.types import Drafter, Sampler

GENERATIONS, FEW = 300, 200  # the controls need fewer, as a rule


@cache
def law_target() -> nn.Module:
    return exact_distribution.model(layers=2)


def excess(
    source: DrafterSource,
    drafter: Drafter,
    generations: int,
    sampling: Sampling = PLAIN,
    sampler: Callable[[int], Sampler] | None = None,
) -> float:
    """Return the chi-square of the tokens of many generations over its quantile: above 1 is a rejection."""
    target, counts, drafted = LMTarget(law_target(), source.needs), np.zeros((V,) * COUNT), 0
    sampler = sampler or unseeded(sampling)
    for i in range(generations):
        target.rewind(0)
        drafted += sum(
            round.drafted for round in exact_distribution.generation(target, drafter, sampler(i), counts)
        )
    assert drafted >= generations
    return chi_square.excess(counts, exact_distribution.exact(law_target(), sampling))


def drafted_excess(
    source: DrafterSource, sampling: Sampling = PLAIN, sampler: Callable[[int], Sampler] | None = None
) -> float:
    """Return it for drafts as they are."""
    drafter = source.make(LMTarget(law_target(), source.needs).parts)
    return excess(source, drafter, GENERATIONS, sampling, sampler)


def control_excess(source: DrafterSource, generations: int = FEW) -> float:
    """Return it for the likeliest tokens, said to be drawn: they must be rejected."""
    parts = LMTarget(law_target(), source.needs).parts
    return excess(source, fitted.Sampled(source.make(parts), Liar()), generations)


def seeded_texts(source: DrafterSource) -> tuple[list[int], list[int]]:
    """Return 60 tokens of one seed, drafted three at a time, and without a drafter."""
    texts = []
    for K in (3, 0):
        target = LMTarget(law_target(), source.needs)
        drafter = source.make(target.parts) if K else Scripted([], needs=source.needs)
        sampler = Sampling(0.8, seed=5).sampler(len(PROMPT), V)
        done = list(generate(target, [drafter], FixedPolicy(K), sampler, PROMPT, max_tokens=60))
        assert not K or 0 < sum(r.accepted for r in done) < sum(r.drafted for r in done)
        texts.append(emitted(done))
    return texts[0], texts[1]
