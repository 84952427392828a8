"""Seconds of rounds: a measured table, corrected by every round with a Kalman filter on the logarithm.

The filter follows one number per draft length K: how much slower a pass of K + 1 rows is than the table says. Its
prior covariance names three kinds of error, and so decides what one slow round means for the other lengths:

  heat    all work is slower by the same factor, plain decoding included (a random walk: it keeps changing)
  slope   rows cost more than measured: the error grows with the number of rows
  own     this length alone, and a little its neighbours (kernels switch at certain numbers of rows)
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_spec.errors import SpecError
from mlx_spec.types import MAX_DRAFT_TOKENS

Floats = NDArray[np.float64]

HEAT, SLOPE, OWN = 0.05, 0.25, 0.10  # log seconds: prior deviations of the three kinds of error
OWN_WIDTH = 1.5  # draft tokens: the distance at which a length's own error fades
HEAT_WALK, OWN_WALK = 0.01, 0.002  # log seconds: deviations that one round adds
NOISE = 0.05  # log seconds: deviation of one measurement
OUTLIER = 6.0  # deviations: once, the machine paused; twice in a row at one length, its cost has changed
ROW_COST = 0.35  # plain tokens: one more row on the dearest published Apple device (M1 Ultra)
DRAFT_COST = 0.1  # plain tokens: one draft token, if it could not be measured
CONTEXT_STEP = 512  # tokens: contexts up to 512, 2048, 8192, ... have costs of their own


START,GROW=2,2
class BadTable(SpecError):
    """Saved costs that are no costs."""


@dataclass(frozen=True)
class Table:
    """Seconds measured at one context length. Sizes between the measured ones are interpolated."""

    plain: float  # one token of plain decoding, the next one queued
    verify: Mapping[int, float]  # by rows of the pass
    draft: Sequence[Mapping[int, float]]  # by drafter, by draft tokens; empty if drafting takes no time
    host: float = 0.0  # one more wait for the device
    context: int = 1  # tokens
    corrections: Sequence[float] = ()  # log seconds learned since, by draft length; () if nothing was

    @classmethod
    def assumed(cls, plain: float, drafters: int) -> Table:
        """Return a cautious table for a pair that could not be measured."""
        verify = {1: plain, MAX_DRAFT_TOKENS + 1: plain * (1 + ROW_COST * MAX_DRAFT_TOKENS)}
        draft = {1: plain * DRAFT_COST, MAX_DRAFT_TOKENS: plain * DRAFT_COST * MAX_DRAFT_TOKENS}
        return cls(plain, verify, [draft] * drafters)


class Costs:
    """Cost models by context length. Shared by all sequences of a pair."""

    def __init__(self, table: Table) -> None:
        self._models = {_bucket(table.context): CostModel(table)}

    def at(self, context: int) -> CostModel:
        """Return the model for this context length. A new one begins as a copy of the nearest."""
        bucket = max(0, ((context - 1) // CONTEXT_STEP).bit_length() + 1) // 2
        model = self._models.get(bucket)
        if model is None:
            nearest = min(self._models, key=lambda other: abs(other - bucket))
            model = self._models[bucket] = copy.deepcopy(self._models[nearest])
        return model


class CostModel:
    """Seconds of plain tokens and of rounds at one context length."""

    def __init__(self, table: Table) -> None:
        self.table = table
        lengths = np.arange(MAX_DRAFT_TOKENS + 1)
        base = np.log(np.maximum(_interpolate(table.verify, lengths + 1), table.plain))
        base[0] = math.log(table.plain)
        self._base = base + np.array(table.corrections or 0.0)  # log seconds of a pass by K
        self._drafting = [_interpolate({0: 0.0, **points}, lengths) for points in table.draft]
        slope = np.log1p(ROW_COST * lengths) / math.log1p(ROW_COST)
        near = np.exp(-((lengths[:, None] - lengths) ** 2) / (2 * OWN_WIDTH**2))
        near[0, :] = near[:, 0] = 0.0
        self._prior = HEAT**2 + SLOPE**2 * np.outer(slope, slope) + OWN**2 * near
        self._walk = HEAT_WALK**2 + OWN_WALK**2 * near
        self._covariance = self._prior.copy()
        self._error = np.zeros(MAX_DRAFT_TOKENS + 1)
        self.longest = START
        self._paused = [False] * (MAX_DRAFT_TOKENS + 1)  # by K: the last observation was ignored
        self._publish()

    def observe_plain(self, seconds: float) -> None:
        """Learn from a plain token that was queued while the one before it ran."""
        self._update(0, math.log(seconds))

    def observe_round(self, drafter: int, drafted: int, rows: int, seconds: float) -> float:
        """Learn from a round. Return its seconds, or those expected if the machine seems to have paused.

        The drafter's share is subtracted by the table; the rest is the pass of `rows` + 1 rows.
        """
        self.longest = max(self.longest, rows)
        drafting = self.drafting(drafter, drafted)
        expected = drafting + float(self.passes[rows])
        believed = self._update(rows, math.log(max(seconds - drafting, 0.1 * seconds)))
        return seconds if believed else min(seconds, expected)

    def drafting(self, drafter: int, tokens: int) -> float:
        """Return the seconds that a draft takes. Drafters beyond the table take none."""
        if drafter >= len(self._drafting):
            return 0.0
        return float(self._drafting[drafter][tokens]) * self.plain / self.table.plain

    def _update(self, length: int, observed: float) -> bool:
        """Update the filter, unless this is an outlier and the one before at this length was none."""
        self._covariance += self._walk
        row = self._covariance[length]
        variance = row[length] + NOISE**2
        surprise = observed - self._base[length] - self._error[length]
        outlier = abs(surprise) > OUTLIER * math.sqrt(variance)
        self._paused[length] = outlier and not self._paused[length]
        if self._paused[length]:
            return False
        if outlier:  # the cost has changed: what was learned does not hold
            self._covariance = self._prior.copy()
            row = self._covariance[length]
            variance = row[length] + NOISE**2
        gain = row / variance
        self._error += gain * surprise
        self._covariance -= gain[:, None] * row
        self._publish()
        return True

    def _publish(self) -> None:
        passes = np.exp(self._base + self._error)
        self.plain = float(passes[0])
        self.passes: Floats = np.maximum(passes, self.plain)  # seconds by K
        slower = self.plain / self.table.plain
        self.rounds: list[Floats] = [d * slower + self.passes for d in self._drafting]  # by drafter, by K


def _bucket(context: int) -> int:
    return max(0, ((context - 1) // CONTEXT_STEP).bit_length() + 1) // 2


def _interpolate(points: Mapping[int, float], sizes: NDArray[np.int64]) -> Floats:
    """Return straight lines between measured sizes. The slope of the last two goes on beyond them."""
    known = sorted(points)
    seconds = [points[size] for size in known]
    values = np.interp(sizes, known, seconds)
    if len(known) > 1:
        slope = max((seconds[-1] - seconds[-2]) / (known[-1] - known[-2]), 0.0)
        values = values + slope * np.maximum(sizes - known[-1], 0)
    return values
