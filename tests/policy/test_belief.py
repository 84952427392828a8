"""The acceptance filter is Bayes' rule, checked by enumeration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mlx_spec.policy.acceptance import CHANGE, Belief, DrafterStatistics
from mlx_spec.policy.acceptance import LEVELS as TABLE

LEVELS, PRIOR = list(TABLE), list(TABLE.values())
EVENTS = [(2, True, 3), (0, True, 1), (3, False, 4)]  # accepted, rejected, emitted tokens


def likelihood(level, accepted, rejected):
    return LEVELS[level] ** accepted * (1 - LEVELS[level]) ** rejected


class Constant(DrafterStatistics):
    """Frequencies that stay as they are."""

    def learn(self, belief):
        pass


def test_filter_is_bayes_rule():
    belief = Belief(Constant())
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


def test_rejections_with_a_period_are_expected():
    """Right four times and then wrong: a fifth draft token is never accepted, and the others always."""
    belief = Belief(DrafterStatistics())
    for _ in range(24):
        belief.update(4, True)
        belief.advance(5)
        belief.shared.settle()
    tokens = belief.expected_tokens()
    assert tokens[4] > 4.5 and tokens[8] - tokens[4] < 0.1
    belief.advance(DrafterStatistics.FAR)  # far from a rejection the period is not known
    tokens = belief.expected_tokens()
    assert tokens[8] - tokens[4] > 0.2
