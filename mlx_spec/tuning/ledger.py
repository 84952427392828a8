"""The bound on what speculation may lose, for every answer by itself.

  elapsed <= (1 + EPSILON) * plain + BUFFER plain steps

where plain is what the same tokens would have taken by plain decoding, and elapsed what the rounds take: the
policy's own work between plain rounds is not entered. A round is begun only if the bound holds even when none
of its draft is accepted, so an answer that is short loses little. A draft that is repeated unseen is counted
ahead for all its rounds, by what they are expected to take. Gains are kept only up to `KEPT`, so that
what was won long ago does not pay for a long loss, and none is kept for the next answer, but for two things
that may be paid with what the answers before have spared. `LOAN` plain steps go to a drafter that is still
expected to be right: three first drafts that were wrong by bad luck, of one whose other answers all gained,
would else stop it for a hundred tokens. And a trial of what is thought to take too long: costs that are
believed wrongly would else never be corrected where all answers are short.
What a round takes beyond a multiple of what was expected, after rounds that took what was expected, is a
pause of the machine and not entered. Nor is what goes beyond the expected in a drafter's first round of a
process, which is paid once, and in the first round of an answer, where plain decoding would be as slow.
"""

from __future__ import annotations

from mlx_spec.tuning.costs import CLAMP
from mlx_spec.tuning.purse import KEPT, Purse

EPSILON = 0.01
BUFFER = 1.6  # plain steps: on two CPU cores, about one draft of two tokens that is rejected
LOAN = 1.6  # plain steps
PAUSE = 3.0  # times the expected seconds; what goes beyond, after rounds that did not, the machine was paused


class Ledger:
    """The lead over plain decoding, in plain steps."""

    def __init__(self, purse: Purse) -> None:
        self._in_line = 0  # speculative rounds in a row that took the expected time
        self._purse = purse
        self.begin()

    def begin(self) -> None:
        """An answer begins: it neither lives on what earlier ones gained nor pays for what they lost."""
        self.lead = 0.0
        self._ahead = 0.0  # plain steps already spent on a token that has not come

    @property
    def room(self) -> float:
        """What the next round may lose, in plain steps."""
        return self.lead + BUFFER

    @property
    def loan(self) -> float:
        """What it may lose beside that, of what the answers before have spared, in plain steps."""
        return min(max(self._purse.spared, 0.0), LOAN)

    @property
    def trial_room(self) -> float:
        """What a trial, one round, may lose, in plain steps."""
        return max(self.room, self._purse.spared)

    def enter(self, tokens: int, steps: float) -> None:
        """A round emitted tokens in so many plain steps."""
        gained = (1 + EPSILON) * tokens - steps
        self.lead = min(self.lead + gained, KEPT)
        self._purse.enter(gained)

    def counted(self, seconds: float, expected: float) -> tuple[float, bool]:
        """What to count of the seconds of a speculative round, and whether it was late."""
        late = seconds > CLAMP * expected
        paused = late and self._in_line > 1
        self._in_line = 0 if late else self._in_line + 1
        return min(seconds, PAUSE * expected) if paused else seconds, late

    def ahead(self, steps: float, expected: float) -> float:
        """What to enter of a round that has begun the next token, too.

        Some backends wait for both. What goes beyond the expected is entered when that token comes.
        """
        self._ahead = min(max(steps - expected, 0.0), 1.0)
        return steps - self._ahead

    def landed(self, steps: float | None) -> float:
        """What to enter of a round that only waited for such a token.

        None: the caller came for it late, and by plain decoding it would have been there as well.
        """
        counted = 1.0 if steps is None else min(steps, 1.0) + self._ahead
        self._ahead = 0.0
        return counted
