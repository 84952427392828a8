"""What speculation has gained in all answers of a pair: loans and trials are paid from it."""

from __future__ import annotations

KEPT = 32.0  # plain steps


class Purse:
    """Outlives sequences and is shared by them. What was won long ago does not pay for a long loss."""

    def __init__(self) -> None:
        self.spared = 0.0  # plain steps

    def enter(self, gained: float) -> None:
        """A round gained so many plain steps, or lost them."""
        self.spared = min(self.spared + gained, KEPT)
