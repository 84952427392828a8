"""What rounds took: entered in the ledger, and learned for the costs."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_spec.tuning.acceptance import Acceptance
from mlx_spec.tuning.costs import Costs
from mlx_spec.tuning.hindsight import Hindsight
from mlx_spec.tuning.ledger import PAUSE, Ledger
from mlx_spec.types import Choice, Round

UNSURE = 0.05  # deviation of a plain token after which the next ones are timed, too


class Books:
    """Keeps the time of one sequence's rounds; `context` is in tokens, times are seconds.

    `only` is the acceptance of a single drafter, of which fixed lengths are compared in hindsight.
    """

    def __init__(self, costs: Costs, only: Acceptance | None) -> None:
        self.ledger, self.hindsight = Ledger(costs.purse), Hindsight()
        self.flight = False  # a token is on its way
        self._costs, self._only = costs, only
        self._opening = True  # nothing was entered in this answer
        self._excused = False  # the token on its way was begun by a round that was slow for once
        self._begun: float | None = None  # seconds of the plain round that nothing was begun for

    def begin(self) -> None:
        """Another answer begins."""
        self.ledger.begin()
        self.hindsight.begin()
        self.flight, self._opening, self._excused, self._begun = False, True, False, None

    def price(self, rounds: Sequence[float]) -> None:
        """What rounds of each length take now, plain steps."""
        if self._only is not None:
            self.hindsight.price(rounds)

    def plainly(self, round: Round, context: int, took: float, *, goes_on: bool) -> None:
        """A plain round that nothing was begun for; `goes_on`: the next token is on its way now."""
        plain = self._costs.plain(context)
        self.flight, self._begun = goes_on, None
        if plain is None:
            return
        one = max(self._costs.verify(1, context) or plain, plain)
        steps = min(took, PAUSE * one) / plain
        self._excused = self._opening
        if self._opening:  # plain decoding begins like this as well
            steps = min(steps, one / plain)
        if goes_on:
            self._begun = None if self._opening else took
            steps = self.ledger.ahead(steps, one / plain)
        elif not self._opening:
            self._costs.saw_begin(context, took)
        self._enter(round, steps)

    def paused(self, context: int, waited: float) -> bool:
        """Whether the caller took its time before a round, or another sequence had its turn."""
        plain = self._costs.plain(context)
        return plain is not None and waited > plain / 2

    def timed(self, context: int, waited: float, took: float) -> bool:
        """A plain token took so long, if it was not the caller who did. Whether that was not expected."""
        if self.paused(context, waited):
            self._costs.went_by(context)
            return False
        plain = self._costs.plain(context)
        self._costs.saw_plain(context, took)
        return plain is not None and abs(took / plain - 1) > UNSURE

    def steadily(self, round: Round) -> None:
        """A plain round that was begun in the one before, as the next one was in it."""
        self._enter(round, 1.0)

    def landed(self, round: Round, context: int, waited: float | None) -> None:
        """A round that only waited for the token on its way; None: it may have come while nobody waited."""
        plain = self._costs.plain(context)
        self.flight = False
        if plain is None:
            return
        if self._begun is not None and waited is not None:
            # Some backends wait for both tokens in the first of the two rounds.
            self._costs.saw_begin(context, self._begun + min(waited, plain) - plain)
        self._begun = None
        steps = None if waited is None or self._excused else waited / plain
        self._enter(round, self.ledger.landed(steps))

    def shadowed(self, round: Round, context: int, took: float, price: float, *, free: bool) -> None:
        """A round with a shadow token, which takes `price` plain steps; `free`: it was one ahead."""
        plain = self._costs.plain(context)
        assert plain is not None
        steps, first = 1 + price, self._first(round, verified=False)
        if not free:
            self._begun, self._excused = None, first
            steps = self.ledger.ahead(steps if first else min(took / plain, 2 * PAUSE), steps)
        self.flight = True
        self._enter(round, steps)

    def drafted(self, round: Round, choice: Choice, context: int, took: float) -> bool:
        """A round with a draft. Whether it was late."""
        kind = (choice.drafter, round.proposed, round.nodes or round.drafted)
        plain, expected = self._costs.plain(context), self._costs.round(*kind, context)
        assert plain is not None and expected is not None
        read = choice.selective and not round.nodes
        expected += read * (self._costs.host(context) or 0.0)
        counted, late = self.ledger.counted(took, expected)
        if self._first(round, verified=True) and not self._costs.guessed(context):
            took = counted = min(counted, expected)
        self._costs.saw_round(*kind, context, took, selective=read)
        self._enter(round, counted / plain)
        return late

    def _first(self, round: Round, *, verified: bool) -> bool:
        """Whether this process had no such draft of the drafter yet: what that takes is paid once."""
        assert round.drafter is not None
        kind, warm = (round.drafter, verified), self._costs.warm
        first = kind not in warm
        warm.add(kind)
        return first

    def _enter(self, round: Round, steps: float) -> None:
        self._opening = False
        self.ledger.enter(len(round.tokens), steps)
        if self._only is not None:
            rejected = round.drafted > 0 and len(round.tokens) > round.accepted < round.drafted
            chance = self._only.next(round) if round.agreement is None else round.agreement
            self.hindsight.enter(round.accepted, rejected=rejected, next_right=chance, steps=steps)
