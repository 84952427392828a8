"""A lull: plain rounds in which nothing happens that could change the decision.

It is not made anew for them. What they teach is learned in each of them: a little work of the host is done
while the device decodes, and the same work put together would be waited for.
"""

from __future__ import annotations

from collections.abc import Callable

from mlx_spec.types import Decision

LONGEST = 16  # rounds: costs and chances of a draft move a little with every one


class Lull:
    """Holds a decision."""

    def __init__(self) -> None:
        self._decision: Decision | None = None
        self._passing: Callable[[], None] | None = None
        self._left = 0

    def hold(self, decision: Decision, rounds: float, passing: Callable[[], None]) -> None:
        """It holds for so many rounds; `passing` is to be called for each of them."""
        self._decision, self._passing, self._left = decision, passing, int(min(rounds, LONGEST))

    @property
    def decision(self) -> Decision | None:
        """What holds for the next round; None: it is to be decided on."""
        return self._decision if self._left > 0 else None

    def pass_by(self) -> None:
        """One more round was as expected."""
        self._left -= 1
        if self._passing is not None:
            self._passing()

    def end(self) -> None:
        """Nothing holds any longer."""
        self._decision, self._passing, self._left = None, None, 0
