"""Sampled tokens follow the target's distribution, whatever is drafted.

The controls, argmax drafts that pose as drawn, must be rejected by the same test.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import pytest
from support.exact_distribution import (
    FILTERED,
    PLAIN,
    PROMPT,
    Lying,
    V,
    draft_model,
    excess,
    model,
    seeded,
    unseeded,
)
from support.lossless import Scripted, emitted, first_difference, rounds

from mlx_spec.drafters.earlier import TextRing
from mlx_spec.drafters.lookup import Lookup
from mlx_spec.model.target import LMTarget
from mlx_spec.sampling import Sampling
from mlx_spec.sampling.verify import accept_block
from mlx_spec.types import Drafter


def with_earlier() -> Lookup:
    """Lookup of earlier answers that begin with every pair of tokens."""
    drafter, ring = Lookup(1, 8), TextRing(1 << 12)
    for first, second in itertools.product(range(V), repeat=2):
        ring.add([PROMPT[-1], first, second, first, V - 1 - second])
    drafter.copy_from(ring)
    return drafter


CASES: dict[str, Callable[[], float]] = {
    "drawn": lambda: excess(draft_model(), PLAIN),
    "drawn, filters and penalties": lambda: excess(draft_model(), FILTERED),
    "drawn with the target's noise": lambda: excess(draft_model(), FILTERED, seeded(FILTERED)),
    "not drawn, filters and penalties": lambda: excess(Lookup(2, 8), FILTERED),
    "earlier answers": lambda: excess(with_earlier(), FILTERED),
    "no drafts": lambda: excess(Scripted([]), FILTERED),
}


@pytest.mark.parametrize("drafts", CASES)
def test_what_is_emitted_follows_the_distribution(drafts: str) -> None:
    assert CASES[drafts]() < 1


def test_argmax_posing_as_drawn_is_caught() -> None:
    assert excess(Lying(draft_model()), PLAIN) > 1


def test_a_recovered_token_drawn_from_p_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_target(p: mx.array, *rest: mx.array) -> tuple[mx.array, mx.array]:
        n, _ = accept_block(p, *rest)
        return n, p[n]

    monkeypatch.setattr("mlx_spec.sampling.sampling.accept_block", from_target)
    assert excess(draft_model(), PLAIN) > 1


def test_missing_filters_are_caught() -> None:
    assert excess(Scripted([]), FILTERED, unseeded(PLAIN), 60) > 1  # one impossible token is enough


def text(drafter: Drafter, K: int, sampling: Sampling, count: int) -> list[int]:
    done = rounds(LMTarget(model()), drafter, K, PROMPT, count, V, sampling)
    assert not K or 0 < sum(r.accepted for r in done) < sum(r.drafted for r in done)
    return emitted(done)


def test_seeded_text_is_the_same_with_any_drafter_or_none() -> None:
    """Nine drafted texts and the plain one."""
    count = 60
    sampling = Sampling(0.8, seed=11, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.02)
    plain = text(Scripted([]), 0, sampling, count)
    spoiled = [(t + 1) % V if i % 5 == 4 else t for i, t in enumerate(plain)]
    for K in (1, 3, 7):
        for drafter in (Scripted([*PROMPT, *spoiled]), Lookup(1, 8), draft_model()):
            drafted = text(drafter, K, sampling, count)
            assert drafted == plain, f"{type(drafter).__name__}, K {K}: {first_difference(drafted, plain)}"
    assert text(Scripted([]), 0, replace(sampling, seed=12), count) != plain
