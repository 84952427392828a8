"""A lull: plain rounds in which nothing happens that could change the decision.

It is not made anew for them, and they are learned from together, when something happens or after some: of a
tiny model each of both by itself takes a hundredth of a plain token, most of it for code and data that the
target's pass has driven from the processor's caches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlx_spec.types import Decision, Round

LONGEST = 16  # rounds: costs and chances of a draft move a little with every one


@dataclass(frozen=True)
class Passed:
    """A round of a lull that was not learned from yet."""

    round: Round
    decision: Decision
    context: int  # tokens
    asked: float  # when it began, seconds
    done: float  # when it ended


class Lull:
    """Holds a decision, and keeps the rounds that it was for."""

    def __init__(self) -> None:
        self._decision: Decision | None = None
        self._passing: Callable[[], None] | None = None
        self._left = 0
        self._passed: list[Passed] = []

    def hold(self, decision: Decision, rounds: float, passing: Callable[[], None]) -> None:
        """It holds for so many rounds; `passing` is to be called for each of them."""
        self._decision, self._passing, self._left = decision, passing, int(min(rounds, LONGEST))

    @property
    def decision(self) -> Decision | None:
        """What holds for the next round; None: it is to be decided on."""
        return self._decision if self._left > 0 else None

    def pass_by(self, passed: Passed) -> None:
        """One more round was as expected."""
        self._left -= 1
        self._passed.append(passed)

    def end(self) -> list[Passed]:
        """What has passed by. Nothing holds any longer."""
        passed, passing = self._passed, self._passing
        self._decision, self._passing, self._left, self._passed = None, None, 0, []
        if passing is not None:
            for _ in passed:
                passing()
        return passed
