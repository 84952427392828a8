"""A decision that holds for some rounds, as long as nothing happens in them that must change it.

It is not made anew for them, and what they teach is learned together when it ends: between two passes the
caches are the model's, and a little work in each takes several times as long as all of it at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mlx_spec.types import Decision, Round

LONGEST = 16  # rounds: costs and chances of a draft move a little with every one


class Passed(NamedTuple):
    """A round for which it held."""

    round: Round
    waited: float  # seconds before it was asked for
    took: float  # seconds since the round before


class Hold:
    """Of one sequence."""

    def __init__(self) -> None:
        self._decision: Decision | None = None
        self._passing: Callable[[int], None] | None = None
        self._left, self._passed = 0, list[Passed]()
        self._most = 0.0  # seconds of a round with a draft; 0: it is plain decoding that goes on

    def begin(self, decision: Decision, rounds: float, passing: Callable[[int], None]) -> None:
        """To decode plainly, for so many more rounds; `passing` is to be told how many there were."""
        self._decision, self._passing, self._left = decision, passing, int(min(rounds, LONGEST))
        self._most = 0.0

    def begin_drafts(
        self, decision: Decision, rounds: float, passing: Callable[[int], None], most: float
    ) -> None:
        """The same of a decision to draft, which a round ends that takes longer than `most` seconds."""
        self.begin(decision, rounds, passing)
        self._most = most

    @property
    def decision(self) -> Decision | None:
        """What holds for the next round; None: it is to be decided on."""
        return self._decision if self._left > 0 else None

    def lasts(self, round: Round, seconds: float) -> bool:
        """Whether a round of so many seconds leaves the decision what it is."""
        if self._decision is None or round.finish_reason:
            return False
        if self._most:
            return round.drafted > 0 and seconds <= self._most
        if round.agreement is not None:  # one more shadow token that failed
            return not self._decision.choices and round.agreement <= 0.5
        return round.drafter is None

    def pass_by(self, round: Round, waited: float, took: float) -> None:
        """One more round was as expected."""
        self._left -= 1
        self._passed.append(Passed(round, waited, took))

    def end(self) -> tuple[Decision | None, list[Passed]]:
        """Nothing holds any longer. Returns what did and the rounds of it."""
        ended = self._decision, self._passed
        if self._passing is not None and self._passed:
            self._passing(len(self._passed))
        self._decision, self._passing, self._left, self._passed = None, None, 0, []
        return ended
