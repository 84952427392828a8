"""When to look at what is not being done: seldom, and ever more seldom while it does not pay."""

from __future__ import annotations

REFRESH, LAST_REFRESH = 256, 1024  # speculative rounds between two timings of plain decoding
REFRESH_ROUNDS = 2  # of one timing; the first is not pipelined
MORE_ROUNDS = 4  # added to it where the first ones differ from what was expected
FIRST_SHADOW, LAST_SHADOW = 4, 256  # plain rounds between two shadow tokens
SPARING = 8  # ... one in so many parts of the rounds since drafting paid, once that is longer ago than usual
EAGER, SOON = 3, 2  # tokens in a row, after so few rounds, when the last one would have passed
FIRST_TRIAL, LAST_TRIAL = 64, 4096  # plain rounds between two trials
TRIAL_ROUNDS = 2  # drafted and verified in earnest, because only that shows what it costs
MEMORY = 0.7  # of the usual length of a spell of plain decoding


class Probes:
    """Counts rounds and says when it is time."""

    def __init__(self) -> None:
        self.shadowing = False  # a shadow token is due, or was asked for and has not come
        self.trying = 0  # rounds of a trial still to come
        self.timing = 0  # plain rounds of a timing still to come
        self._more = 0
        self._refresh, self._since_refresh = REFRESH, 0
        self._spell, self._usual = 0, 0.0  # plain rounds: so far, and usually until drafting pays again
        self._since_shadow, self._eager = 0, 0
        self._trial, self._since_trial = FIRST_TRIAL, 0

    def drafting(self) -> None:
        """A round that drafts because it pays."""
        if self._spell:
            self._usual = MEMORY * self._usual + (1 - MEMORY) * self._spell if self._usual else self._spell
            self._spell = self._since_shadow = self._eager = 0
            self._trial, self._since_trial = FIRST_TRIAL, 0
        self._since_refresh += 1
        if self._since_refresh > self._refresh:
            self.timing, self._more, self._since_refresh = REFRESH_ROUNDS, MORE_ROUNDS, 0
            self._refresh = min(2 * self._refresh, LAST_REFRESH)

    def retime(self) -> None:
        """Plain decoding takes another time than was thought: time a few more, and again before long."""
        self._refresh = REFRESH
        if self.timing and self._more:
            self.timing, self._more = self.timing + 1, self._more - 1

    def resting(self, *, hopeful: bool) -> None:
        """A plain round because nothing pays; hopeful where better acceptance would change that."""
        self._spell += 1
        self._since_shadow += 1
        self._since_trial += 1
        if self._since_trial > self._trial:
            self.trying, self._since_trial = TRIAL_ROUNDS, 0
            self._trial = min(2 * self._trial, LAST_TRIAL)
        self.shadowing = self.shadowing or (hopeful and self._since_shadow > self.gap)

    @property
    def gap(self) -> int:
        """Plain rounds between two shadow tokens, now."""
        if self._eager:
            return SOON
        if self._spell <= 2 * self._usual:
            return FIRST_SHADOW
        return min(max(self._spell // SPARING, FIRST_SHADOW), LAST_SHADOW)

    def shadowed(self, agreement: float) -> None:
        """A shadow token was seen, or the drafter had none (agreement 0)."""
        self.shadowing, self._since_shadow = False, 0
        passed = agreement > 0.5
        self._eager = (self._eager - 1 if self._eager else EAGER) if passed else 0
