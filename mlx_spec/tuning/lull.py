"""A lull: plain rounds in which nothing happens that could change the decision.

It is not made anew for them, and what they teach is learned together when the lull is over: between two
passes the caches are the model's, and a little work in each takes three times as long as all of it at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mlx_spec.types import Decision, Round

LONGEST = 16  # rounds: costs and chances of a draft move a little with every one


class Passed(NamedTuple):
    """A round of a lull."""

    round: Round
    waited: float  # seconds before it was asked for
    took: float  # seconds since the round before


class Lull:
    """Holds a decision."""

    def __init__(self) -> None:
        self._decision: Decision | None = None
        self._passing: Callable[[int], None] | None = None
        self._left, self._passed = 0, list[Passed]()

    def hold(self, decision: Decision, rounds: float, passing: Callable[[int], None]) -> None:
        """It holds for so many rounds; `passing` is to be told how many there were."""
        self._decision, self._passing, self._left = decision, passing, int(min(rounds, LONGEST))

    @property
    def decision(self) -> Decision | None:
        """What holds for the next round; None: it is to be decided on."""
        return self._decision if self._left > 0 else None

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
