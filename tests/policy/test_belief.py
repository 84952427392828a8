"""The acceptance filter is Bayes' rule, checked by enumeration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mlx_spec.policy.acceptance import CHANGE, Belief, DrafterStatistics
from mlx_spec.policy.acceptance import LEVELS as TABLE

LEVELS, PRIOR = list(TABLE), list(TABLE.values())
EVENTS = [(2, True, 3), (0, True, 1), (3, False, 4)]  # accepted, rejected, emitted tokens


def first_rate(belief):
    return belief.expected_tokens()[1] - 1


def likelihood(level, accepted, rejected):
    return LEVELS[level] ** accepted * (1 - LEVELS[level]) ** rejected


def test_filter_is_bayes_rule(monkeypatch):
    monkeypatch.setattr(DrafterStatistics, "learn", lambda self, belief: None)  # frequencies stay as they are
    belief = Belief(DrafterStatistics())
    for accepted, rejected, tokens in EVENTS:
        belief.update(accepted, rejected)
        belief.advance(tokens)

    last = np.zeros(len(LEVELS))
    for path in itertools.product(range(len(LEVELS)), repeat=len(EVENTS) + 1):
        weight = PRIOR[path[0]]
        for (accepted, rejected, tokens), here, after in zip(EVENTS, path[:-1], path[1:], strict=True):
            stay = (1 - CHANGE) ** tokens
            weight *= likelihood(here, accepted, rejected)
            weight *= stay * (here == after) + (1 - stay) * PRIOR[after]
        last[path[-1]] += weight
    assert belief.levels == pytest.approx(last / last.sum())


def test_frequencies_follow_the_pair():
    shared = DrafterStatistics()
    for _ in range(50):
        belief = Belief(shared)
        for _ in range(4):
            belief.update(4, rejected=False)
            belief.advance(5)
    assert first_rate(Belief(shared)) > 0.85


def test_a_drafter_that_gets_worse_within_its_draft():
    shared, belief, chance = DrafterStatistics(), None, np.random.default_rng(0)
    belief = Belief(shared)
    for _ in range(2000):
        right = [chance.random() < rate for rate in (0.9, 0.45, 0.2)]
        accepted = right.index(False) if False in right else 3
        belief.update(accepted, accepted < 3)
        belief.advance(accepted + 1)
    first, second, third = np.diff(belief.expected_tokens()[:4])
    assert second / first == pytest.approx(0.45, abs=0.12)
    assert third / second == pytest.approx(0.2, abs=0.12)
