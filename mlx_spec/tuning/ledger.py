"""The bound on what speculation may lose.

  elapsed <= (1 + EPSILON) * plain + BUFFER plain steps + one round

where plain is what the same tokens would have taken by plain decoding. Drafting is refused beforehand while
the lead is used up; a round that was begun is the only one that may go beyond. Gains are kept only up to
`KEPT`, so that what was won long ago does not pay for a long loss. What a round takes beyond a multiple of
what was expected, after rounds that took what was expected, is a pause of the machine and not entered.
"""

from __future__ import annotations

EPSILON = 0.01
BUFFER = 8.0  # plain steps
KEPT = 32.0  # plain steps


class Ledger:
    """The lead over plain decoding, in plain steps."""

    def __init__(self) -> None:
        self.lead = 0.0

    @property
    def open(self) -> bool:
        """Whether a loss can be afforded."""
        return self.lead >= -BUFFER

    def begin(self) -> None:
        """An answer begins: what earlier ones gained does not pay for it, so the bound holds for each."""
        self.lead = min(self.lead, 0.0)

    def enter(self, tokens: int, steps: float) -> None:
        """A round emitted tokens in so many plain steps."""
        self.lead = min(self.lead + (1 + EPSILON) * tokens - steps, KEPT)
