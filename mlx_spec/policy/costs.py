"""Seconds of rounds: a measured table, corrected by every round with a Kalman filter on the logarithm.

The filter follows how much slower a pass is than the table says, by draft length. The error has three parts:
global (heat slows all work alike and keeps changing), per row, and local to one length and its neighbours.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_spec.checkpoint.files import one_line
from mlx_spec.errors import SpecError
from mlx_spec.types import MAX_DRAFT_TOKENS

Floats = NDArray[np.float64]

NOISE = 0.05  # log seconds: deviation of one measurement
UNKNOWN_ERROR = 0.4  # log seconds: of costs in plain tokens that were measured while other programs ran
EPSILON = 0.01  # share of the time that drafting may lose in the long run; a draft must promise more
LEAST_LOSS = 0.01  # plain tokens or rounds: the least loss that is assumed of a probe
FIRST_LENGTH = 4  # draft tokens: the longest draft of a new pair; then twice the longest that was timed


class BadCosts(SpecError):
    """Saved costs that are damaged, or that cannot be written."""


@dataclass(frozen=True)
class Table:
    """Seconds measured at one context length. Sizes between the measured ones are interpolated."""

    plain: float  # one token of plain decoding, the next one queued
    verify: Mapping[int, float]  # by rows of the pass
    draft: Sequence[Mapping[int, float]]  # by drafter, by draft tokens; empty if drafting takes no time
    host: float = 0.0  # one more wait for the device
    context: int = 1  # tokens
    longest: int = FIRST_LENGTH  # draft tokens: twice the longest draft that a round has timed
    error: float = UNKNOWN_ERROR  # log seconds: deviation of a cost in plain tokens from the true one

    @classmethod
    def from_json(cls, saved: Mapping[str, Any], drafters: int) -> Table:
        """Return a table saved by `asdict`. Raises BadCosts if damaged, or for other drafters."""
        try:
            points = [saved["verify"], *saved["draft"]]
            sizes = [{int(size): float(s) for size, s in by_size.items()} for by_size in points]
            plain, host, context = float(saved["plain"]), float(saved["host"]), int(saved["context"])
            deviation = float(saved.get("error", UNKNOWN_ERROR))  # older files have none
            table = cls(plain, sizes[0], sizes[1:], host, context, int(saved["longest"]), deviation)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise BadCosts(f"saved costs are incomplete ({one_line(error)})") from error
        counts = [table.context, table.longest, *(size for by_size in sizes for size in by_size)]
        passes = [plain, *sizes[0].values()]
        others = [host, *(s for by_size in sizes[1:] for s in by_size.values())]
        most = 1e9  # seconds, rows or tokens: a file with more is damaged
        is_sound = all(0 < n < most for n in counts) and all(s > 1 / most for s in passes)
        if not (sizes[0] and is_sound and all(0 <= s < most for s in (*passes, *others, deviation))):
            raise BadCosts("saved costs hold a number that cannot have been measured")
        if len(table.draft) != drafters:
            raise BadCosts(f"saved costs are of {len(table.draft)} drafters, this pair has {drafters}")
        return table

    def at_speed_of(self, now: Table) -> Table:
        """Return these costs scaled to the plain speed of `now`."""
        factor = now.plain / self.plain
        verify = {rows: factor * seconds for rows, seconds in self.verify.items()}
        draft = [{k: factor * seconds for k, seconds in points.items()} for points in self.draft]
        return replace(self, plain=now.plain, verify=verify, draft=draft, host=factor * self.host)

    def dearer(self, now: Table) -> bool:
        """Return True if a round costs clearly more plain tokens here than in a table measured now."""
        if _bucket(self.context) != _bucket(now.context):
            return False
        old, new = CostModel(self), CostModel(now)
        ratios = [old.rounds(i) * new.plain / (new.rounds(i) * old.plain) for i in range(len(self.draft))]
        # Saved costs that are 1.25 times what a round costs now were measured while other programs ran.
        return any(float(ratio[: FIRST_LENGTH + 1].max()) > 1.25 for ratio in ratios)


class Costs:
    """Cost models by context length. Shared by all sequences of a pair."""

    def __init__(self, table: Table) -> None:
        self._first = _bucket(table.context)
        self._models = {self._first: CostModel(table)}

    def at(self, context: int) -> CostModel:
        """Return the model for this context length. A new one begins as a copy of the nearest."""
        bucket = _bucket(context)
        if bucket not in self._models:
            nearest = min(self._models, key=lambda other: abs(other - bucket))
            self._models[bucket] = copy.deepcopy(self._models[nearest])
        return self._models[bucket]

    def table(self) -> Table:
        """Return the measured table with the corrections at its context length."""
        return self._models[self._first].corrected()


class CostModel:
    """Seconds of plain tokens and of rounds at one context length."""

    HEAT = 0.01**2  # variance of log seconds: heat changes from one round to the next

    def __init__(self, table: Table) -> None:
        self.table, self.longest, self.host = table, table.longest, table.host
        lengths = np.arange(MAX_DRAFT_TOKENS + 1)
        self._rows = lengths + 1
        self._base = np.log(np.maximum(interpolate(table.verify, self._rows), table.plain))
        self._base[0] = math.log(table.plain)  # log seconds of a pass, by draft length
        self._drafting = [interpolate({0: 0.0, **points}, lengths) for points in table.draft]
        row = 0.35  # plain tokens that one more row costs on the dearest published Apple device (M1 Ultra)
        slope = np.log1p(row * lengths) / math.log1p(row)
        # The error of one length reaches those within about 1.5 draft tokens.
        near = np.exp(-((lengths[:, None] - lengths) ** 2) / (2 * 1.5**2))
        near[0, :] = near[:, 0] = 0.0
        # The prior deviations of the three kinds of error in log seconds: of all, by row, and of one length.
        self._covariance = 0.05**2 + 0.25**2 * np.outer(slope, slope) + 0.1**2 * near
        self._error = np.zeros(MAX_DRAFT_TOKENS + 1)
        self._paused = False  # the last round was delayed
        self._unsettled: tuple[float, Floats] | None = None  # weight and direction of the last correction
        self._compute_seconds()

    def observe_plain(self, seconds: float) -> None:
        """Learn from a plain token that was queued while the one before it ran."""
        self._update(0, math.log(seconds))

    def observe_round(self, drafter: int, tokens: int, seconds: float, *, drafted: bool = True) -> float:
        """Learn from a round that verified `tokens` draft tokens. Return the seconds to charge for it.

        If the draft was made in this round, its seconds by the table are subtracted; the rest is the pass. A
        delayed round is charged as expected, a second one in a row at most as passes of single rows.
        """
        if seconds < self.plain * math.exp(-3 * NOISE):  # no round takes less than a pass of one row
            self._error += math.log(seconds / self.plain)
            self._compute_seconds()
        drafting = self.drafting(drafter, tokens) if drafted else 0.0
        expected = drafting + float(self.passes[tokens])
        delayed = self._update(tokens, math.log(max(seconds - drafting, 0.1 * seconds)))
        self._paused = delayed and not self._paused
        self.allow_longer(tokens)
        return min(seconds, expected if self._paused else drafting + (tokens + 1) * self.plain)

    def allow_longer(self, tokens: int) -> None:
        """Allow drafts up to twice as long as one that was timed."""
        self.longest = max(self.longest, 2 * tokens)

    def drafting(self, drafter: int, tokens: int) -> float:
        return float(self.rounds(drafter)[tokens] - self.passes[tokens])

    def rounds(self, drafter: int) -> Floats:
        """Return the seconds of a round by draft tokens. Drafters beyond the table draft in no time."""
        return self._rounds[drafter] if drafter < len(self._rounds) else self.passes

    def seconds(self, drafter: int, tokens: int) -> float:
        return float(self.rounds(drafter)[tokens])

    def measured(self, drafter: int, tokens: int) -> float:
        """Return the seconds of a round as they were measured, without later corrections."""
        drafting = self._drafting[drafter][tokens] if drafter < len(self._drafting) else 0.0
        return float(math.exp(self._base[tokens]) + drafting)

    def corrected(self) -> Table:
        """Return the corrected table, relative to plain decoding now, because heat does not last."""
        passes = self.passes / self.plain * self.table.plain
        verify = {length + 1: float(seconds) for length, seconds in enumerate(passes) if length}
        verify = {**self.table.verify, **verify}
        changes = [abs(math.log(s / self.table.verify.get(rows, s))) for rows, s in verify.items()]
        error = min(max(self.table.error, *changes), UNKNOWN_ERROR)
        return replace(self.table, verify=verify, longest=self.longest, error=error)

    def _update(self, length: int, observed: float) -> bool:
        """Update the filter, less for a pass that may be delayed. Return True if it probably was."""
        self.settle()
        row = self._covariance[length] + self.HEAT
        variance = float(row[length]) + NOISE**2
        surprise = observed - float(self._base[length] + self._error[length])
        density = 1 / (math.pi * (1 + surprise**2 / variance) * math.sqrt(variance))  # Cauchy: heavy tails
        # Delays that other programs cause have a density of 0.1 per log second.
        weight = density / (density + 0.1) if surprise > 0 else 1.0  # probability of no delay
        kalman_gain = row / variance
        self._error += weight * surprise * kalman_gain
        self._unsettled = weight * max(variance - (1 - weight) * surprise**2, 0.0), kalman_gain
        self._compute_seconds()
        return weight < 0.5

    def settle(self) -> None:
        """Update the covariance after the last round: only the next correction needs it."""
        if self._unsettled is not None:
            share, kalman_gain = self._unsettled
            self._covariance += self.HEAT - share * kalman_gain[:, None] * kalman_gain
            self._unsettled = None

    def _compute_seconds(self) -> None:
        passes = np.exp(self._base + self._error)
        self.plain = float(passes[0])
        most = self.plain * self._rows  # as many passes of one row as there are rows
        self.passes: Floats = np.minimum(np.maximum(passes, self.plain), most)  # seconds by draft length
        slower = self.plain / self.table.plain
        self._rounds = [d * slower + self.passes for d in self._drafting]


def best_length(tokens: Floats, seconds: Floats, limit: int) -> tuple[int, float]:
    """Return the number of draft tokens with the most tokens per second, 1 to `limit`, and that speed.

    `tokens` and `seconds` of a round are by draft tokens, 0 included, of one sequence or of all in a pass.
    """
    speeds = tokens[1 : limit + 1] / seconds[1 : limit + 1]
    best = int(speeds.argmax())
    return best + 1, float(speeds[best])


def _bucket(context: int) -> int:
    """Return the number of a range of contexts: up to 512 tokens, 2048, 8192, and so on."""
    return max(0, ((context - 1) // 512).bit_length() + 1) // 2


def interpolate(points: Mapping[int, float], sizes: NDArray[np.int64]) -> Floats:
    """Interpolate between measured sizes; extrapolate with the last slope, or the mean one if steeper."""
    known = sorted(points)
    seconds = [points[size] for size in known]
    values = np.interp(sizes, known, seconds)
    if len(known) > 1:
        slopes = [(seconds[-1] - seconds[i]) / (known[-1] - known[i]) for i in (-2, 0)]
        slope = max(*slopes, 0.0)
        values = values + slope * np.maximum(sizes - known[-1], 0)
    return values
