"""Counts that fade, and the arithmetic of chances."""

from __future__ import annotations

import math

LEAST = 0.01  # no chance is nearer to 0 or 1


class Tally:
    """Successes and tries, of which old ones count less; the decay is in the weight of new ones."""

    def __init__(self, size: int, memory: float) -> None:
        self.good, self.tried = [0.0] * size, [0.0] * size
        self._weight, self._growth = 1.0, 1 / (1 - 1 / memory)

    def tick(self, times: int = 1) -> None:
        """Something was observed, so many times."""
        self._weight *= self._growth**times
        if self._weight > 1e12:
            self.good = [x / self._weight for x in self.good]
            self.tried = [x / self._weight for x in self.tried]
            self._weight = 1.0

    def add(self, index: int, good: float, share: float = 1.0) -> None:
        """One try, or a share of one."""
        self.good[index] += self._weight * share * good
        self.tried[index] += self._weight * share

    def mean(self, index: int, prior: float, strength: float) -> float:
        """The rate, where the prior counts as `strength` tries."""
        strength *= self._weight
        return (self.good[index] + strength * prior) / (self.tried[index] + strength)

    def count(self, index: int) -> float:
        """Tries, old ones discounted."""
        return self.tried[index] / self._weight


def logit(p: float) -> float:
    """log(p / (1 - p)), where p is kept off 0 and 1."""
    p = min(max(p, LEAST), 1 - LEAST)
    return math.log(p / (1 - p))


def log_loss(p: float, good: float) -> float:
    """Log loss of a forecast."""
    p = min(max(p, LEAST), 1 - LEAST)
    return -good * math.log(p) - (1 - good) * math.log(1 - p)
