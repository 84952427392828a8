"""What may be lost now, in plain steps, and what that is enough for."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_spec.tuning.books import Books
from mlx_spec.tuning.costs import CLAMP
from mlx_spec.tuning.ledger import EPSILON
from mlx_spec.tuning.plan import Planner
from mlx_spec.tuning.probes import Probes
from mlx_spec.types import Choice

UNSEEN = 3  # rounds of the same draft in a row, learned from together
CREDIBLE = 0.2  # first tokens expected to pass, above which a drafter may lose what others have spared


class Room:
    """Of one sequence."""

    def __init__(self, planner: Planner, probes: Probes, books: Books) -> None:
        self._planner, self._probes, self._books = planner, probes, books

    def left(self, drafter: int) -> float:
        """What a draft may lose: one that is just afforded must be so when what is on its way has landed."""
        ledger, credible = self._books.ledger, self._planner.acceptance[drafter].first_rate() > CREDIBLE
        return ledger.room + (ledger.loan if credible else 0.0) - self._landing

    def repeats(self, choices: Sequence[Choice]) -> tuple[float, float]:
        """How often these may be drafted again unseen, and after how many plain steps a round is late.

        As often as the lead allows when nothing is accepted; never before the drafter has been right.
        """
        steps = max(self._planner.rounds(choice.drafter)[choice.limit] for choice in choices)
        proven = all(choice.drafter in self._probes.proven for choice in choices)
        rounds = min(self._books.ledger.room / max(steps - 1, EPSILON), UNSEEN) if proven else 1
        return rounds - 1, CLAMP * steps

    @property
    def _landing(self) -> float:
        """Plain steps that a draft now takes beside its own."""
        return self._books.flight * (self._planner.landing + EPSILON)

    def affords(self, drafter: int) -> bool:
        """A shadow token; one that takes time is of no use where a draft could not be afforded after it."""
        price = self._planner.price(drafter)
        if drafter in self._probes.free:
            return price <= self._books.ledger.room
        return price + self._planner.least(drafter) <= self.left(drafter) or self.tells(drafter)

    def tells(self, drafter: int) -> bool:
        """Whether a draft of one token takes the place of a shadow token."""
        if drafter in self._probes.free or drafter in self._probes.doubted:
            return False
        return self._planner.tells(drafter, self.left(drafter), self._landing)
