"""What rounds with draft tokens teach: whoever keeps count of them is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_spec.tuning.acceptance import Acceptance
from mlx_spec.tuning.books import Books
from mlx_spec.tuning.curiosity import Curiosity
from mlx_spec.tuning.outlook import Outlook
from mlx_spec.tuning.probes import Probes
from mlx_spec.types import Choice, Round

OFTEN = 0.5  # of the rounds a drafter must have a draft for its shadow tokens to tell soon
DOUBTFUL = 0.4  # ... and first tokens expected to pass, below which a wrong draft has one come first


@dataclass(frozen=True)
class Lessons:
    """Of one sequence. `context` is in tokens, times are seconds."""

    acceptance: Sequence[Acceptance]
    books: Books
    probes: Probes
    outlook: Outlook
    curiosity: Curiosity

    def drafted(self, round: Round, choices: Sequence[Choice], context: int, took: float) -> None:
        """A draft was verified, by one of those that were asked in this order."""
        asked = [choice.drafter for choice in choices]
        place = asked.index(_drafter(round))
        choice = choices[place]
        self.curiosity.drafted(choice, round)
        for other in asked[:place]:
            self.acceptance[other].missed()
        acceptance = self.acceptance[choice.drafter]
        acceptance.saw(round, choice.limit)
        doubtful = acceptance.had > OFTEN and acceptance.first_rate() < DOUBTFUL
        self.probes.drafted(choice.drafter, accepted=round.accepted > 0, doubtful=doubtful)
        if self.books.drafted(round, choice, context, took):
            self.outlook.stale()
        if self.probes.trying:
            self.probes.trying -= 1
            self.outlook.stale()

    def landed(self, round: Round, context: int, waited: float | None) -> None:
        """What was found is drafted again in the next round; the token on its way told of it."""
        self.books.landed(round, context, waited)
        if round.agreement is not None:
            drafter = _drafter(round)
            self.acceptance[drafter].compared(round.agreement, round.confidence)
            if self.probes.compared(drafter, round.agreement):
                self.outlook.stale()

    def compared(self, round: Round) -> None:
        """A shadow token was, with the token that came."""
        assert round.agreement is not None
        drafter = _drafter(round)
        self.acceptance[drafter].saw_shadow(round.agreement, round.confidence)
        self.looked_aside(drafter, round.agreement)

    def looked_aside(self, drafter: int, agreement: float | None) -> None:
        """A shadow token was seen, or the drafter had none: one that does not pay does not pay for that."""
        self.probes.shadowed(drafter, agreement)
        if (agreement or 0.0) <= 0.5 and not self.outlook.wants(drafter):
            return
        if not self.acceptance[drafter].opening:  # there the plan follows what was judged without that
            self.outlook.stale()


def _drafter(round: Round) -> int:
    assert round.drafter is not None
    return round.drafter
