"""A lull: plain rounds in which nothing happens that could change the decision, so that it is not made anew.

Of a tiny model a decision takes two parts in a hundred of a plain token.
"""

from __future__ import annotations

from collections.abc import Callable

from mlx_spec.tuning.plan import Plan
from mlx_spec.types import Decision

LONGEST = 16  # rounds: costs and chances of a draft move a little with every one


class Lull:
    """Holds a decision for rounds that are like the one it was made for."""

    def __init__(self) -> None:
        self._held: tuple[Plan, Decision, Callable[[], None]] | None = None
        self._risk, self._left = 0.0, 0

    def hold(
        self, plan: Plan, decision: Decision, risk: float, rounds: float, passing: Callable[[], None]
    ) -> None:
        """It holds for so many rounds, while the plan is this and what is at risk can be afforded.

        `passing` is called in each of them.
        """
        self._held, self._risk, self._left = (plan, decision, passing), risk, int(min(rounds, LONGEST))

    def end(self) -> None:
        """Something happened."""
        self._left = 0

    def decision(self, plan: Plan, room: float) -> Decision | None:
        """The decision for one more round, if it still holds."""
        if self._left <= 0 or self._held is None or self._held[0] is not plan or room < self._risk:
            return None
        self._left -= 1
        self._held[2]()
        return self._held[1]
