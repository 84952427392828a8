"""When to look at what is not being done: seldom, and ever more seldom while it does not pay.

A new answer is looked at soon, if answers before have shown that it may be of another kind. A drafter whose
first draft in it was rejected whole shows a shadow token before it drafts again. One whose shadow tokens are
free shows some that pass before its first draft, where that is not nearly sure, and one more for every draft
that began wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

REFRESH, LAST_REFRESH = 256, 1024  # speculative rounds between two timings of plain decoding
REFRESH_ROUNDS = 2  # of one timing; the first is not pipelined
MORE_ROUNDS = 4  # added to it where the first ones differ from what was expected
FIRST_SHARE, LAST_SHARE = 0.005, 0.0005  # of the time, for shadow tokens: at first, after many that failed
SHORTEST, LONGER, LONGEST = 4, 32, 512  # plain rounds between two shadow tokens of a drafter
HURRY = 16  # times as soon in a new answer, at even odds ...
DOUBT = 4  # ... and half as soon again for so many shadow tokens in a row that failed, in whatever answer ...
LATEST = 50  # ... up to so many times the plain steps that it takes
EAGER, SOON = 3, 2  # tokens in a row, after so few rounds, when the last one would have passed
FIRST_TRIAL, LAST_TRIAL = 64, 4096  # plain rounds between two trials
CALM = 4  # times as many where it is acceptance that does not pay: of costs there is less to learn
OFTEN_RIGHT = 0.75  # first tokens; where fewer were, two free shadow tokens are to pass, not one
TRIAL_ROUNDS = 2  # drafted and verified in earnest, because only that shows what it costs
MEMORY = 0.7  # of the usual length of a spell of plain decoding


@dataclass(frozen=True)
class Look:
    """What a shadow token of one drafter takes and promises."""

    price: float  # plain steps
    chance: float  # that it passes


class _Shadows:
    """The shadow tokens of one drafter. Outlives answers."""

    def __init__(self) -> None:
        self.failed = 0  # in a row
        self.since = LONGEST  # plain rounds since the last
        self.eager = 0
        self.begin()
        self._usual = 0.0  # plain rounds of an answer until drafting pays again

    def begin(self) -> None:
        """An answer begins: what failed before may pass in it."""
        self.eager, self._spell = 0, 0
        self._opening = self._waits = True  # nothing was seen in this answer; and nothing was missed
        self._required = 1  # shadow tokens that are to pass; one more for every draft that begins wrong
        self._passes = 0  # those that have, in a row

    def rest(self, rounds: int) -> None:
        """Plain rounds."""
        self.since += rounds
        self._spell += rounds

    def gap(self, look: Look) -> float:
        """Plain rounds between two."""
        if self.eager:
            return SOON
        first, last = max(look.price / FIRST_SHARE, SHORTEST), max(look.price / LAST_SHARE, LONGER)
        if self._opening:
            odds = (1 - look.chance) / look.chance
            soon, latest = first / HURRY * odds, max(LATEST * look.price, SHORTEST)
            return min(max(soon, min(soon * 2 ** (self.failed / DOUBT), latest)), last, LONGEST)
        return min(first if self._spell <= 2 * self._usual else min(first * 2**self.failed, last), LONGEST)

    def saw(self, agreement: float | None) -> None:
        """One was judged, or there was none: some drafters have their first in the second round."""
        self.since = 0
        if agreement is None and self._waits:
            self._waits = False
            return
        self._opening = False
        if agreement is not None and agreement > 0.5:
            self.eager = self.eager - 1 if self.eager else EAGER
        else:
            self.eager, self.failed = 0, self.failed + 1

    def distrust(self) -> None:
        """One more is to pass."""
        self._required += 1

    def begins_wrong(self) -> None:
        """A draft did."""
        self._required, self._passes = self._required + 1, 0

    def convinces(self, agreement: float) -> bool:
        """Whether enough shadow tokens have passed in a row."""
        self._passes = self._passes + 1 if agreement > 0.5 else 0
        return self._passes >= self._required

    def drafted(self, *, accepted: bool) -> None:
        """A draft was judged."""
        self.eager, self._opening = 0, False
        if accepted and self._spell:
            usual = self._usual or self._spell
            self._usual, self._spell = MEMORY * usual + (1 - MEMORY) * self._spell, 0
        if accepted:
            self.failed = 0


class Probes:
    """Counts rounds and says when it is time."""

    def __init__(self, drafters: int, free: Collection[int] = ()) -> None:
        self.free = free  # drafters that take no time worth a mention
        self.shadow: int | None = None  # the drafter whose token is due, or was asked for and has not come
        self.trying = 0  # rounds of a trial still to come
        self.timing = 0  # plain rounds of a timing still to come
        self._more = 0
        self._refresh, self._since_refresh = REFRESH, 0
        self.proven: set[int] = set()  # drafters of which a draft token was accepted in this answer
        self.doubted: set[int] = set()  # those of which none was or is sure to be: a shadow token comes first
        self._shadows = [_Shadows() for _ in range(drafters)]
        self._trial, self._since_trial = float(FIRST_TRIAL), 0.0

    def begin(self, doubted: Mapping[int, float]) -> None:
        """An answer begins: what failed before may pass in it.

        Some drafters are doubted from the start, by how often their first token was right.
        """
        self.shadow, self.trying = None, 0
        self.proven.clear()
        self.doubted = set(doubted)
        for drafter, shadows in enumerate(self._shadows):
            shadows.begin()
            if doubted.get(drafter, 1.0) < OFTEN_RIGHT:
                shadows.distrust()

    def drafting(self, rounds: int = 1) -> None:
        """Rounds that draft because it pays."""
        self._since_trial, self.shadow = 0.0, None
        self._since_refresh += rounds
        if self._since_refresh > self._refresh:
            self.timing, self._more, self._since_refresh = REFRESH_ROUNDS, MORE_ROUNDS, 0
            self._refresh = min(2 * self._refresh, LAST_REFRESH)

    def retime(self) -> None:
        """Plain decoding takes another time than was thought: time a few more, and again before long."""
        self._refresh = REFRESH
        if self.timing and self._more:
            self.timing, self._more = self.timing + 1, self._more - 1

    def resting(self, looks: Mapping[int, Look], *, hopeful: bool, first: int | None = None) -> float:
        """A plain round because nothing pays; hopeful where better acceptance would change that.

        `looks` of those that may be looked at; the shadow token of the `first` is due at once. Says for how
        many more such rounds nothing else will be due.
        """
        if self._since_trial > self._trial:
            self.trying, self._since_trial = TRIAL_ROUNDS, 0.0
            self._trial = min(2 * self._trial, LAST_TRIAL)
        trial = self._trial - self._since_trial
        late = {
            d: self._shadows[d].since - self._shadows[d].gap(look) for d, look in looks.items() if hopeful
        }
        if first is not None:
            late[first] = LONGEST + max(late.values(), default=0.0)
        # One whose token is free is asked whenever it is not another one's turn.
        dear = {d: rounds for d, rounds in late.items() if d not in self.free}
        due = {d: rounds for d, rounds in dear.items() if rounds > 0} or late
        latest = max(due, key=lambda d: due[d], default=None)
        if latest is not None and due[latest] > 0:
            self.shadow = latest
        coming = dear if self.shadow in self.free else late
        return min([trial, *(-rounds for rounds in coming.values())]) - 1

    def pass_by(self, drafters: Iterable[int], rounds: int = 1, *, hopeful: bool) -> None:
        """Plain rounds in which nothing is due."""
        self._since_trial += rounds / CALM if hopeful else rounds
        for drafter in drafters:
            self._shadows[drafter].rest(rounds)

    def shadowed(self, drafter: int, agreement: float | None) -> None:
        """A shadow token was seen, or the drafter had none."""
        self.shadow = None
        self._shadows[drafter].saw(agreement)
        if agreement is None:
            return
        if drafter not in self.free or self._shadows[drafter].convinces(agreement):
            self.doubted.discard(drafter)

    def compared(self, drafter: int, agreement: float) -> bool:
        """The first token of a draft was; whether that speaks against the next one."""
        wrong = agreement <= 0.5
        if wrong and drafter in self.free and drafter not in self.proven:
            self._doubt(drafter)
        return wrong

    def drafted(self, drafter: int, *, accepted: bool, doubtful: bool) -> None:
        """A draft was verified; `doubtful`: where it was wrong, a shadow token comes before the next one."""
        self._shadows[drafter].drafted(accepted=accepted)
        if drafter == self.shadow:  # it has told what the shadow token was to tell
            self.shadow = None
            self._shadows[drafter].saw(float(accepted))
        if accepted:
            self.proven.add(drafter)
            self.doubted.discard(drafter)
        elif (doubtful or drafter in self.free) and drafter not in self.proven:
            self._doubt(drafter)

    def _doubt(self, drafter: int) -> None:
        self.doubted.add(drafter)
        self._shadows[drafter].begins_wrong()
