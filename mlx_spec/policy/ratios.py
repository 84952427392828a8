"""Costs of rounds in plain tokens, independent of the load: for figures, not for decisions.

Seconds follow the load of the machine. The ratio of two consecutive rounds does not: load is as likely to
rise between them as to fall. So a draft is compared with the plain token beside it. The spread of these
ratios gives the error of their median. Ratios of other sizes say how far measured costs are off. Without any,
measured costs count within a factor, and closely while rounds take the seconds that they say. A pair that
drafts in every round has no plain token to compare with. If its costs are not known, it decodes one now and
then.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Hashable
from functools import cache
from itertools import accumulate
from statistics import median

from mlx_spec.policy.costs import UNKNOWN_ERROR
from mlx_spec.types import Cost

# Rounds of one shape cost the same: sequences and a drafter, and the draft tokens.
Shape = tuple[tuple[int, Hashable], int]


class Ratios:
    """The costs of rounds by their shape. Shared by the sequences of a pair."""

    # Log seconds: error of measured costs while the machine is as fast as when they were measured.
    KNOWN = 0.06

    def __init__(self, recent: int = 8) -> None:
        self._ratios: dict[Shape, deque[float]] = {}  # log, by shape
        # By sequences, of all their shapes: draft tokens, and by how much a log ratio exceeds measured costs.
        self._excess: dict[int, deque[tuple[int, float]]] = {}
        self._shifts: dict[int, tuple[float, float, float]] = {}  # its median, the error, median draft tokens
        # Log seconds by which the last rounds exceeded the measured costs.
        self._late: deque[float] = deque(maxlen=recent)
        self._found: dict[Shape, Cost] = {}  # from ratios, by shape
        self._plain_late = 0.0  # log seconds by which the last plain token exceeded them
        self._unsettled: list[tuple[Shape, float]] = []  # log ratios that the medians lack
        self._guesses: dict[Shape, float] = {}  # measured costs in plain tokens, or 1
        self._plain: tuple[int, float] | None = None  # the last round, if plain: sequences, log seconds
        self._draft: tuple[int, Shape, float] | None = None  # if it drafted: sequences, shape, log seconds
        self._timed, self._since = 0, 0  # plain tokens that were timed; rounds that drafted since

    def observe_plain(self, count: int, seconds: float, expected: float | None = None) -> None:
        """Learn from a plain token of `count` sequences that was queued while another ran.

        `expected` are its seconds by the measured costs.
        """
        now, self._timed, self._since = math.log(seconds), self._timed + 1, 0
        if self._draft is not None and self._draft[0] == count:
            self._unsettled.append((self._draft[1], self._draft[2] - now))
        self._plain, self._draft = (count, now), None
        if expected is not None:
            self._plain_late = now - math.log(expected)

    def observe_draft(self, count: int, shape: Shape, seconds: float, expected: float | None = None) -> None:
        """Learn from a round of `count` sequences that drafted. `expected`: seconds by measured costs."""
        now, self._since = math.log(seconds), self._since + 1
        if expected is not None:
            self._late.append(now - math.log(expected))
        if self._plain is not None and self._plain[0] == count:
            self._unsettled.append((shape, now - self._plain[1]))
        self._plain, self._draft = None, (count, shape, now)

    def wants_plain(self) -> bool:
        """Return True if plain tokens should follow, so that the cost of the last round becomes known.

        At first they follow every 8th round, later every 64th. More would cost what the drafts gain.
        """
        if self._draft is None or self._draft[0] != 1 or self._since < 8:
            return False
        ratio = self._found.get(self._draft[1])
        is_known = self._as_measured or (ratio is not None and ratio.error <= self.KNOWN)
        return self._since >= (8 if self._timed < 48 and not is_known else 64 if self._timed else 16)

    def settle(self) -> None:
        """Compute the medians with the last ratios."""
        for shape, ratio in self._unsettled:
            self._learn(shape, ratio)
        self._unsettled.clear()

    def cost(
        self,
        drafter: tuple[int, Hashable],
        tokens: int,
        measured: float | None,
        deviation: float = UNKNOWN_ERROR,
    ) -> Cost | None:
        """Return the cost of a round with this many draft tokens, the one with the smallest error.

        `drafter` begins with the sequences that share the pass.

        It may come from the table (`measured`, in plain tokens, and its `deviation` in log seconds), from
        ratios, or from ratios of another size. None if nothing is known.
        """
        shape = drafter, tokens
        costs = [] if measured is None else [self._from_measured(shape, measured, deviation)]
        if shape in self._found:
            costs.append(self._found[shape])
        self._guesses[shape] = measured or 1.0
        # Near sizes have a greater error, so they are asked only if this one is hardly known.
        is_known = any(cost.error <= self.KNOWN for cost in costs)
        if others := [other for other in self._found if other[0] == drafter and not is_known]:
            near = min(others, key=lambda other: abs(other[1] - tokens))
            factor, error = self._guesses[shape] / self._guesses.get(near, 1.0), 0.1 * abs(near[1] - tokens)
            costs.append(
                Cost(shape, self._found[near].plain_tokens * factor, self._found[near].error + error)
            )
        return min(costs, key=lambda cost: cost.error, default=None)

    def _from_measured(self, shape: Shape, measured: float, deviation: float) -> Cost:
        """Return a measured cost, corrected by the ratios of all shapes of as many sequences."""
        if self._as_measured:
            return Cost(shape, measured, self.KNOWN)
        shift, error, tokens = self._shifts.get(shape[0][0], (0.0, math.inf, shape[1]))
        prior, seen, most = deviation**-2, error**-2, 2 * math.hypot(deviation, error)
        if abs(shift) <= most or error > deviation:  # else the measured costs are wrong
            shift, error = min(max(shift, -most), most) * seen / (prior + seen), (prior + seen) ** -0.5
        error = math.hypot(error, 0.03 + 0.03 * abs(shape[1] - tokens))  # sizes are not off alike
        return Cost(shape, max(measured * math.exp(shift), 1.0), error)

    @property
    def _as_measured(self) -> bool:
        """Return True if rounds and the last plain token took the seconds that measured costs say."""
        late = self._late
        is_enough = len(late) >= (late.maxlen or 0) / 2 and abs(self._plain_late) <= 2 * self.KNOWN
        return is_enough and max(abs(median(late)), _deviation(late)) <= self.KNOWN

    def _learn(self, shape: Shape, ratio: float) -> None:
        # The last 256, so that medians follow the length of the context.
        known = self._ratios.setdefault(shape, deque(maxlen=256))
        known.append(ratio)
        if len(known) >= 8:  # fewer make no useful median
            # A 99 % interval counts as two deviations. That is cautious, because neighbours share a plain
            # token, and a gain is shown as soon as the error is small enough.
            low, high = median_interval(known, 0.99)
            middle = median(known)
            error = max(high - middle, middle - low) / 2
            self._found[shape] = Cost(shape, max(math.exp(middle), 1.0), max(error, self.KNOWN / 2))
        excess = self._excess.setdefault(shape[0][0], deque(maxlen=64))
        excess.append((shape[1], ratio - math.log(self._guesses.get(shape, 1.0))))
        low, high = median_interval([value for _, value in excess], 0.99)
        # A single ratio on a busy machine is off by half.
        error = max(high - low, self.KNOWN, 0.0 if len(excess) >= 8 else len(excess) ** -0.5) / 2
        tokens, middle = (median(column) for column in zip(*excess, strict=True))
        self._shifts[shape[0][0]] = middle, error, tokens


def median_interval(values: Collection[float], probability: float = 0.95) -> tuple[float, float]:
    """Return the order statistics around the median that enclose it with this probability or more.

    They assume nothing about the distribution: the deviation of a few values is often far too small. Fewer
    than six values, or eight for 0.99, give the least and the greatest one, with a lower probability.
    """
    ordered = sorted(values)
    k = _order(len(ordered), probability)
    return ordered[k], ordered[-1 - k]


@cache
def _order(count: int, probability: float) -> int:
    tails = accumulate(math.comb(count, i) / 2 ** (count - 1) for i in range(count // 2))
    return max(sum(1 for tail in tails if tail <= 1 - probability) - 1, 0)


def _deviation(values: deque[float]) -> float:
    """Return a standard deviation that outliers do not change."""
    middle = median(values)
    return 1.48 * median(abs(value - middle) for value in values)
