"""Pearson's test of counts against a distribution, with a bound on false alarms. Needs numpy alone."""

from __future__ import annotations

import numpy as np

Z = 4.75  # standard normal deviate exceeded once in a million


def quantile(freedom: int) -> float:
    """Return what is exceeded once in a million, by Wilson and Hilferty."""
    assert freedom > 0, "one cell tests nothing"
    spread = 2 / (9 * freedom)
    return float(freedom * (1 - spread + Z * spread**0.5) ** 3)


def excess(counts: np.ndarray, p: np.ndarray, least: float = 5.0) -> float:
    """Return the statistic over its one-in-a-million quantile: above 1 is a rejection.

    counts and p have one shape; p sums to 1. Cells expected fewer than `least` times are pooled; a count
    where p is 0 is a rejection.
    """
    expected = (p * counts.sum()).ravel()
    counts = counts.ravel()
    if counts[expected == 0].sum() > 0:
        return float("inf")
    rare = expected < least
    expected = np.append(expected[~rare], expected[rare].sum())
    counts = np.append(counts[~rare], counts[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    return float(((counts - expected) ** 2 / expected).sum() / quantile(len(expected) - 1))


def conditional_excess(tokens: np.ndarray, p: np.ndarray, groups: np.ndarray, least: float = 5.0) -> float:
    """Return the same of tokens [N] that were drawn one after the other, each from its own row of p [N, V].

    The tokens of a group are counted together. Their group may depend on all that was drawn before.
    """
    if (p[np.arange(len(tokens)), tokens] == 0).any():
        return float("inf")
    statistic, freedom = 0.0, 0
    for group in np.unique(groups):
        rows, counts = p[groups == group], np.bincount(tokens[groups == group], minlength=p.shape[1])
        rare = rows.sum(0) < least
        cells = np.eye(len(rare))[~rare]
        if rare.any():
            cells = np.vstack([cells, rare])
        cells = cells[:-1].T  # [V, cells]; the count of the last one follows from the others
        rows, counts = rows @ cells, counts @ cells
        difference, covariance = counts - rows.sum(0), np.diag(rows.sum(0)) - rows.T @ rows
        statistic += difference @ np.linalg.solve(covariance, difference)
        freedom += cells.shape[1]
    return float(statistic / quantile(freedom))
