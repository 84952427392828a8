"""When to read a drafter's confidence only to learn what it is worth."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_spec.tuning.acceptance import Acceptance
from mlx_spec.types import Choice, Round

LEARN, RELEARN = 16, 64  # rounds whose confidence is read to learn its worth: the first, then one of so many


class Curiosity:
    """Counts the rounds of one sequence that read it, and those that did not."""

    def __init__(self, acceptance: Sequence[Acceptance]) -> None:
        self._acceptance = acceptance
        self._read = [0] * len(acceptance)  # selective rounds by drafter
        self._unread = RELEARN  # rounds since confidence was last read

    def asked(self, choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
        """The choices, with the confidence read where that is due and can be."""
        return tuple(map(self._curious, choices)) if self._unread >= RELEARN else choices

    def drafted(self, choice: Choice, round: Round) -> None:
        """A round of this choice was judged."""
        read = choice.selective and not round.nodes
        self._read[choice.drafter] += read
        if not read:
            self._unread += 1
        elif self._read[choice.drafter] >= LEARN:
            self._unread = 0

    def _curious(self, choice: Choice) -> Choice:
        known = self._acceptance[choice.drafter].told or not self._read[choice.drafter]
        return Choice(choice.drafter, choice.limit, selective=True) if known else choice
