"""What the best fixed length would have taken for the same text: a check on lengths that follow the text.

Let the draft be right about R tokens in a row and wrong about the next. Rounds that always draft k tokens
then take R // (k + 1) + 1 passes for these R + 1 tokens, wherever the rounds before began. So what every
fixed length would have taken is known from the runs alone. Where following the text has taken longer than the
best of them, that length is held for a while, and following gets another chance after it. Tokens that were
never drafted count as right with the chance they were believed to have.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mlx_spec.types import MAX_DRAFT_TOKENS

Floats = NDArray[np.float64]

KEEP = 0.998  # of what was seen, a token
STEPS, SHARE = 3.0, 0.015  # behind by so many plain steps and this share of the time: then the other is tried
LEAST = 64.0  # plain steps without which the best length is a guess
HOLD, LAST_HOLD = 256, 4096  # tokens for which a fixed length is held
BLOCKS = np.arange(1, MAX_DRAFT_TOKENS + 2)


class Hindsight:
    """Compares what was done with the best fixed length. Time is in plain steps."""

    def __init__(self) -> None:
        self.length: int | None = None  # the fixed length that is held
        self._passes: Floats = np.zeros(len(BLOCKS))  # by length, for the text so far; old text counts less
        self._times: Floats | None = None  # of a round, by length
        self.best = 0  # the length that would have been the fastest
        self._run, self._spent = 0, 0.0  # since the last wrong token
        self._behind = self._total = 0.0
        self._left, self._hold, self._barred = 0, HOLD, 0  # tokens
        self._chance = random.Random(0)

    def begin(self) -> None:
        """Another text: what was best for the last one may not be for this."""
        self.length, self._behind = None, 0.0
        self._run, self._spent = 0, 0.0

    def price(self, times: Sequence[float]) -> None:
        """What a round of each length takes now: 0 is plain decoding."""
        self._times = np.array(times)
        total = self._passes * self._times
        self.best = int(total.argmin())
        if self.length and total[self.length] > total[0]:
            self.length, self._behind = None, 0.0

    def enter(self, accepted: int, *, rejected: bool, next_right: float, steps: float) -> None:
        """A round of so many steps; `next_right` is the chance that the draft had its last token right."""
        self._spent += steps
        self._run += accepted
        if not rejected and self._chance.random() < next_right:
            self._run += 1
        else:
            self._end(self._run + 1)

    def _end(self, tokens: int) -> None:
        """A run is over; count it."""
        if self._times is None:
            return
        keep, passes = KEEP**tokens, (tokens - 1) // BLOCKS + 1
        rival = self.length or self.best
        self._passes = keep * self._passes + passes
        self._behind = keep * self._behind + self._spent - float(self._times[rival] * passes[rival])
        self._total = keep * self._total + self._spent
        self._run, self._spent = 0, 0.0
        self._barred = max(self._barred - tokens, 0)
        self._judge(tokens)

    def _judge(self, tokens: int) -> None:
        lost = self._behind > STEPS + SHARE * self._total
        if self.length is None:
            if lost and self.best and not self._barred and self._total > LEAST:
                self.length, self._left, self._behind = self.best, self._hold, 0.0
                self._hold = min(2 * self._hold, LAST_HOLD)
            return
        self._left -= tokens
        if lost:  # a draft of this length is not what the runs make of it
            self._barred = self._hold
        if lost or self._left <= 0:
            self.length, self._behind = None, 0.0
