"""Pearson's test of counts against a distribution, with a bound on false alarms. Needs numpy alone."""

from __future__ import annotations

import numpy as np

Z = 4.75  # standard normal deviate exceeded once in a million


def excess(counts: np.ndarray, p: np.ndarray, least: float = 5.0) -> float:
    """Return the statistic over its one-in-a-million quantile: above 1 is a rejection.

    counts and p have one shape; p sums to 1. Cells expected fewer than `least` times are pooled; a count
    where p is 0 is a rejection. The quantile is Wilson and Hilferty's.
    """
    expected = (p * counts.sum()).ravel()
    counts = counts.ravel()
    if counts[expected == 0].sum() > 0:
        return float("inf")
    rare = expected < least
    expected = np.append(expected[~rare], expected[rare].sum())
    counts = np.append(counts[~rare], counts[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert freedom > 0, "one cell tests nothing"
    spread = 2 / (9 * freedom)
    return float(statistic / (freedom * (1 - spread + Z * spread**0.5) ** 3))
