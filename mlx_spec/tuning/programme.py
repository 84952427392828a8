"""The number of tokens to draft and to verify that brings the most tokens a second.

A round's value at rate rho is E[tokens] - rho E[seconds]; the best rate is the one at which the best value
is 0 (Dinkelbach 1967). Lengths fixed beforehand need no more than sums. Where the confidence of every draft
token is read before verifying, what to verify is a stopping problem over (depth, reach), reach being the
probability that all tokens so far are accepted:

  W(k, r) = E_b[max(0, r q_b - rho (verify[k + 2] - verify[k + 1]) + W(k + 1, r q_b))],  b the next confidence

The maximum looks ahead, so a step of the staircase is climbed where those behind it are worth it. Whether
token k is verified depends on the confidences up to its own and not on later ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LEVELS, RATIO = 14, 0.75  # of the grid of reach: 1, 0.75, ..., 0.032, and 0
LEAST_STEP, LARGEST_STEP = 1.02, 1.25  # of the rate, from one solution to the next
LIMITS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
GRID: Floats = np.append(RATIO ** np.arange(LEVELS - 1), 0.0)


@dataclass(frozen=True)
class Drafting:
    """One drafter in the eyes of the programme. K = 16.

    Lists, not arrays: a plan is made between two passes, when the caches are the model's, and a loop of
    Python's brings less back into them than numpy's calls do.
    """

    draft: Sequence[float]  # [K + 1] seconds by tokens drafted
    verify: Sequence[float]  # [K + 2] seconds by rows
    offered: Sequence[float]  # [K] how often a draft that may have i + 1 tokens has them

    @cached_property
    def rounds(self) -> list[float]:
        """Expected seconds [K] of rounds that may draft 1 .. K tokens and verify what they have."""
        expected, before, rounds = 0.0, 0.0, []
        for drafting, passing, offered in zip(self.draft[1:], self.verify[2:], self.offered, strict=True):
            expected += (drafting + passing - before) * offered
            before = drafting + passing
            rounds.append(expected)
        return rounds


@dataclass(frozen=True)
class Action:
    """What to do with one drafter, and what it brings when it has a draft."""

    limit: int
    tokens: float  # expected of a round
    seconds: float
    selective: bool = False

    def value(self, rate: float) -> float:
        """Expected tokens beyond those that `rate` would have brought."""
        return self.tokens - rate * self.seconds


@dataclass(frozen=True)
class Rule:
    """Which prefix to verify: as long as the reach, that token included, is at least its threshold."""

    thresholds: tuple[float, ...]  # by depth
    rates: list[list[float]]  # [K][BINS]

    def cut(self, bins: Sequence[int]) -> int:
        """How many tokens to verify."""
        reach = 1.0
        for depth, b in enumerate(bins):
            if depth >= len(self.thresholds):
                return depth
            reach *= self.rates[depth][b]
            if reach < self.thresholds[depth]:
                return depth
        return len(bins)


def brought(drafting: Drafting, rates: Sequence[float]) -> list[float]:
    """Expected tokens [K] of rounds that may draft 1 .. K tokens; acceptance `rates` [K]."""
    reach, more, tokens = 1.0, 0.0, []
    for rate, offered in zip(rates, drafting.offered, strict=True):
        reach *= rate
        more += reach * offered
        tokens.append(1 + more)
    return tokens


def steady(drafting: Drafting, tokens: Sequence[float], rate: float) -> Action:
    """The best length without looking at confidence, at a rate of tokens a second. `tokens` as `brought`."""
    best, most = 0, -math.inf
    for limit, (brings, seconds) in enumerate(zip(tokens, drafting.rounds, strict=True), 1):
        value = brings - rate * seconds
        if value > most:
            best, most = limit, value
    return Action(best, tokens[best - 1], drafting.rounds[best - 1])


@dataclass(frozen=True)
class Chances:
    """What is believed of confidences."""

    rates: Floats  # [K, BINS] acceptance
    first: Floats  # [BINS] how often each is seen of a first token
    later: Floats  # [BINS] and of a later one, after accepted ones

    def blind(self) -> list[float]:
        """Acceptance [K] of one who does not look at confidences."""
        return [*(self.rates[:1] @ self.first).tolist(), *(self.rates[1:] @ self.later).tolist()]


def fitted(rates: Floats, first: Floats, later: Floats, now: Floats) -> Chances:
    """Confidences as they are seen where acceptance is `now` [K]: an easy text has more of the high ones."""
    return Chances(rates, _tilted(first, rates[0], now[0]), _tilted(later, rates[1], now[1]))


def _tilted(shares: Floats, rates: Floats, mean: float) -> Floats:
    """`shares` times odds ** t, where t is such that the mean of `rates` is as given."""
    odds = np.log(rates / (1 - rates))
    low, high = -4.0, 4.0
    for _ in range(7):
        middle = (low + high) / 2
        weights = shares * np.exp(middle * odds)
        weights /= weights.sum()
        low, high = (middle, high) if weights @ rates < mean else (low, middle)
    return weights


def hopeless(drafting: Drafting, rates: Floats, host: float, rate: float) -> bool:
    """Whether a draft loses even if its confidence tells exactly what is accepted; acceptance `rates` [K].

    No more than that is verified then, and one read of the confidence, `host` seconds, is paid for it.
    The rate is in tokens a second.
    """
    gained = np.cumprod(rates) * drafting.offered * (1 - rate * np.diff(drafting.verify)[1:])
    best = (np.cumsum(gained) - rate * (np.array(drafting.draft[1:]) + host)).max()
    return bool(best <= 0)


def selective(drafting: Drafting, chances: Chances, host: float, rate: float) -> tuple[Action, Rule]:
    """The best length to draft when what is verified is chosen by confidence, and that choice."""
    reach = GRID[:, None] * chances.rates[:, None, :]  # [K, LEVELS, BINS] after one more token
    below = (np.log(np.maximum(reach, GRID[-2])) / np.log(RATIO)).astype(np.int64)
    below = np.minimum(below, LEVELS - 2)
    above = below + 1
    part = (GRID[below] - reach) / (GRID[below] - GRID[above])  # exact where value is reach
    steps = np.diff(drafting.verify)[1:]  # [K] seconds of one more row
    fixed = np.array(drafting.draft)[list(LIMITS)] + host + drafting.verify[1]

    def solve(rho: float) -> tuple[Floats, Floats]:
        """Value by limit [LIMITS], and what verifying each depth is worth by reach [K, LIMITS, LEVELS]."""
        ahead = np.zeros((len(LIMITS), LEVELS))
        gains = np.empty((len(steps), len(LIMITS), LEVELS))
        for depth in reversed(range(len(steps))):
            gain = GRID - rho * steps[depth] + ahead
            gain[: int(np.searchsorted(LIMITS, depth, side="right"))] = -1.0
            gains[depth] = gain
            kept = np.maximum(gain, 0)
            seen = kept[:, below[depth]] * (1 - part[depth]) + kept[:, above[depth]] * part[depth]
            ahead = drafting.offered[depth] * (seen @ (chances.first if depth == 0 else chances.later))
        return 1 - rho * fixed + ahead[:, 0], gains

    low, _ = solve(rate)
    better = rate * min(max(1 + low.max() / (rate * fixed[low.argmax()]), LEAST_STEP), LARGEST_STEP)
    values, gains = solve(better)
    best = int(values.argmax())
    seconds = float((low[best] - values[best]) / (better - rate))
    action = Action(LIMITS[best], float(values[best]) + better * seconds, seconds, selective=True)
    thresholds = tuple(_threshold(gains[depth, best]) for depth in range(LIMITS[best]))
    return action, Rule(thresholds, chances.rates.tolist())


def _threshold(gain: Floats) -> float:
    """The reach from which on a depth is worth verifying; 2 if none is."""
    if gain[0] < 0:
        return 2.0
    last = int((gain >= 0).sum()) - 1  # the gain falls with the level
    if last == LEVELS - 1:
        return 0.0
    part = gain[last] / (gain[last] - gain[last + 1])
    return float(GRID[last] + part * (GRID[last + 1] - GRID[last]))
