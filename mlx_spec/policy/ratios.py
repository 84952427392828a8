"""Costs of rounds in plain tokens, whatever else the machine does: for figures, not for decisions.

Seconds follow the load of the machine. The ratio of two rounds that follow each other does not: load is as
likely to rise between them as to fall. So a draft is compared with the plain token beside it, and the median
of such ratios is known as well as they agree. Where none are, measured costs hold while rounds take the
seconds that these costs say.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from statistics import median

from mlx_spec.types import Cost

FEWEST = 6  # ratios of which a median says anything
MOST = 256  # ratios that are remembered: medians follow the length of the context
RECENT = 8  # rounds that say whether the machine is as fast as when costs were measured
KNOWN = 0.06  # log seconds: error of measured costs on a machine that is as fast as then
UNKNOWN = 1.0  # the same on another one


class Ratios:
    """The costs of rounds by their shape. Shared by the sequences of a pair."""

    def __init__(self) -> None:
        self._ratios: dict[Hashable, deque[float]] = {}  # log, by shape
        self._late: deque[float] = deque(maxlen=RECENT)  # log seconds beyond the measured costs
        self._found: dict[Hashable, Cost] = {}  # by shape
        self._plain: tuple[int, float] | None = None  # the last round, if plain: sequences, log seconds
        self._draft: tuple[int, Hashable, float] | None = None  # the last one that drafted: its shape, too

    def observe_plain(self, count: int, seconds: float) -> None:
        """Learn from a plain token of `count` sequences that was queued while another ran."""
        now = math.log(seconds)
        if self._draft is not None and self._draft[0] == count:
            self._learn(self._draft[1], self._draft[2] - now)
        self._plain, self._draft = (count, now), None

    def observe_draft(self, count: int, shape: Hashable, seconds: float, expected: float) -> None:
        """Learn from a round of `count` sequences that drafted; measured costs say the `expected` seconds."""
        now = math.log(seconds)
        self._late.append(now - math.log(expected))
        if self._plain is not None and self._plain[0] == count:
            self._learn(shape, now - self._plain[1])
        self._plain, self._draft = None, (count, shape, now)

    def cost(self, shape: Hashable, measured: float) -> Cost:
        """Return what a round takes; `measured` is a guess, in plain tokens."""
        late = self._late
        as_then = len(late) >= RECENT / 2 and max(abs(median(late)), _deviation(late)) <= KNOWN
        guess = Cost(shape, measured, KNOWN if as_then else UNKNOWN)
        found = self._found.get(shape, guess)
        return found if found.error <= guess.error else guess

    def _learn(self, shape: Hashable, ratio: float) -> None:
        known = self._ratios.setdefault(shape, deque(maxlen=MOST))
        known.append(ratio)
        if len(known) >= FEWEST:
            # A median errs 1.25 times as much as a mean. Neighbours share a plain token, hence a bit more.
            error = 1.6 * _deviation(known) / math.sqrt(len(known))
            self._found[shape] = Cost(shape, max(math.exp(median(known)), 1.0), max(error, KNOWN / 2))


def _deviation(values: deque[float]) -> float:
    """Return the standard deviation, whatever the outliers are."""
    middle = median(values)
    return 1.48 * median(abs(value - middle) for value in values)
