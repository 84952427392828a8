"""The costs of drafting ahead: how often a draft is ready, and how much slower passes are meanwhile.

A pass that ran beside drafting ahead corrects only the slowdown, other passes correct only the table. So now
and then a round does the opposite: it does not draft ahead while that pays, and drafts ahead while it does
not.
"""

from __future__ import annotations

import math

import numpy as np

from mlx_spec.policy.costs import EPSILON, LEAST_LOSS, CostModel, Floats, best_length
from mlx_spec.types import Round


class AheadCosts:
    """The costs of drafting ahead with one drafter. Shared by all sequences of a pair."""

    MEMORY = 16  # rounds that the running means remember

    def __init__(self) -> None:
        self.slowdown = 0.0  # log ratio of a pass beside drafting ahead to a pass without it
        self.hits = 0.5  # share of drafts that are ready
        # Rounds in the means. The initial values weigh as much as two.
        self._measured = self._looked_up = 2
        self._since = 0  # rounds without drafting ahead in a row
        self._streak = 0  # rounds with it in a row

    def best(self, tokens: Floats, costs: CostModel, drafter: int, limit: int) -> tuple[int, float, bool]:
        """Return the draft length with the most tokens per second, that speed, and whether to draft ahead."""
        length, speed = best_length(tokens, costs.rounds(drafter), limit)
        longer, faster = best_length(tokens, self.rounds(costs, drafter), limit)
        if not self.wanted(faster / speed, needed=speed * costs.plain <= 1 + EPSILON):
            return length, speed, False
        return (longer, faster, True) if faster > speed else (length, speed, True)

    def observe(self, round: Round, costs: CostModel, drafter: int, seconds: float, ahead: bool) -> float:
        """Learn from a round that drafted, perhaps ahead. Return the seconds to charge for it."""
        rows = round.nodes or round.drafted
        self.observe_round(round.ahead, ahead=ahead)
        if not ahead:
            return costs.observe_round(drafter, rows, seconds, drafted=not round.ahead)
        drafting = 0.0 if round.ahead else costs.drafting(drafter, rows)
        return self.observe_pass(costs, rows, seconds, drafting)

    def rounds(self, costs: CostModel, drafter: int) -> Floats:
        """Return the expected seconds of a round that drafts ahead, by draft tokens."""
        drafting = costs.rounds(drafter) - costs.passes
        seconds: Floats = math.exp(self.slowdown) * costs.passes + (1 - self.hits) * drafting
        return seconds

    def extra(self, costs: CostModel, tokens: int) -> float:
        """Return the seconds that drafting ahead adds to a pass."""
        return max(math.expm1(self.slowdown), 0.0) * float(costs.passes[tokens])

    def wanted(self, ratio: float, *, needed: bool) -> bool:
        """Return True to draft ahead now. `ratio` is the speed with it over the speed without it.

        `needed` is True if drafting pays with it only.
        """
        if ratio > 1:
            # After 32 rounds with drafting ahead, a round without it corrects the table.
            return needed or self._streak < 32
        # A 400th of the time goes to rounds that check whether drafting ahead pays by now.
        return not needed and self._since * 0.0025 >= max(1 / ratio - 1, LEAST_LOSS)

    def observe_pass(self, costs: CostModel, tokens: int, seconds: float, drafting: float) -> float:
        """Learn from a round that drafted ahead. Return the seconds to charge for it."""
        passed = max(seconds - drafting, 0.1 * seconds)
        surprise = math.log(passed / float(costs.passes[tokens])) - self.slowdown
        self._measured = min(self._measured + 1, self.MEMORY)
        most = math.log(1.5)  # A larger surprise counts as this much, because it may be a pause.
        self.slowdown += float(np.clip(surprise, -most, most)) / self._measured
        costs.allow_longer(tokens)
        return min(seconds, drafting + (tokens + 1) * costs.plain + self.extra(costs, tokens))

    def observe_round(self, hit: bool | None, *, ahead: bool) -> None:
        """Count a round. `hit` is True if its draft was ready; None if no draft was made ahead."""
        if hit is not None:
            self._looked_up = min(self._looked_up + 1, self.MEMORY)
            self.hits += (hit - self.hits) / self._looked_up
        self._since, self._streak = (0, self._streak + 1) if ahead else (self._since + 1, 0)
