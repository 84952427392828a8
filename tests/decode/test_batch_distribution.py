"""Unseeded samples of sequences in a batch keep the target's distribution.

Short generations, eight at a time in one batch, are compared with the exact distribution.
A right engine is rejected once in a million a test; the keys are fixed, so a pass stays a pass.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support import random_sources
from support.exact_distribution import (
    COUNT,
    FILTERED,
    GENERATIONS,
    NOISE,
    PLAIN,
    PROMPT,
    Lying,
    V,
    exact,
    excess_of,
    law_target,
    model,
    unseeded,
)

from mlx_spec.decode import Batch
from mlx_spec.decode.running import RunningSequence
from mlx_spec.drafters import DrafterSource
from mlx_spec.drafters.draft_model import VocabularySizes, draft_model_source
from mlx_spec.model.target import LMTarget
from mlx_spec.model.target_batch import TargetBatch
from mlx_spec.policy import FixedPolicy
from mlx_spec.prompt import text_prompt
from mlx_spec.sampling import Sampling
from mlx_spec.types import Drafter, Round

TOGETHER = 8
SOURCES: dict[str, Callable[[], DrafterSource]] = {
    "draft model": lambda: draft_model_source("other", model(noise=NOISE), VocabularySizes(V, V)),
    "eagle3": lambda: random_sources.eagle3(16, V, range(0, V, 2), (0, 1)),
}


def excess(
    source: DrafterSource,
    sampling: Sampling,
    generations: int,
    wrap: Callable[[Drafter], Drafter] = lambda d: d,
) -> float:
    """Return the chi-square of the tokens over its quantile: above 1 is a rejection."""
    texts, drafted, together = dict[int, list[int]](), 0, 0
    batch = Batch(lambda: TargetBatch(law_target(), source.needs), TOGETHER)
    for i in range(generations):
        target = LMTarget(law_target(), source.needs)
        drafter = wrap(source.make(target.parts))
        policy, prompt = FixedPolicy(COUNT - 1 - i % 2), text_prompt(PROMPT)
        parts = (target, [drafter], policy, unseeded(sampling)(i), prompt, COUNT)
        sequence = RunningSequence(*parts)
        list(sequence.prefill())  # else one prompt is read a step, and answers so short are never together
        texts[batch.add(sequence)] = []
    for id, round in batch.run():
        assert isinstance(round, Round)
        texts[id] += round.tokens
        drafted, together = drafted + round.drafted, max(together, round.batch_size)
    assert drafted > generations / 2 and together == TOGETHER
    return excess_of([*texts.values()], exact(law_target(), sampling))


@pytest.mark.parametrize(("name", "sampling"), [("draft model", FILTERED), ("eagle3", PLAIN)])
def test_unseeded_samples_keep_the_distribution(name: str, sampling: Sampling) -> None:
    assert excess(SOURCES[name](), sampling, GENERATIONS) < 1


def test_a_wrong_rule_is_rejected() -> None:
    assert excess(SOURCES["eagle3"](), PLAIN, GENERATIONS, Lying) > 1
