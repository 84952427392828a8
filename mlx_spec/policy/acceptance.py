"""The number of draft tokens that will be accepted: a hidden Markov model of how predictable the text is.

At every token the text is on one of a few levels. On level s a draft token is accepted with probability r_s.
With probability CHANGE per token the level is drawn anew from the frequencies seen so far. Every verified
draft token updates the belief about the level by Bayes' rule (the forward filter). Without evidence the
belief returns to the frequencies. So a drafter that was given up is tried again after a while. Drafts of
texts with a period, such as tables, are rejected a certain number of tokens after a rejection. These numbers
are counted, and change the probabilities where they clearly differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

import numpy as np

from mlx_spec.policy.costs import Floats
from mlx_spec.types import MAX_DRAFT_TOKENS

# Probability of acceptance on each level -> probability of the level for a new pair; the mean is 0.6.
LEVELS = {0.03: 0.12, 0.15: 0.10, 0.35: 0.10, 0.55: 0.13, 0.75: 0.20, 0.9: 0.23, 0.97: 0.12}
CHANGE = 0.02  # probability per token that the level changes: a stretch of text has about 50 tokens


@dataclass(frozen=True)
class Rates:
    """Acceptance of a draft by level. The levels come in the order of LEVELS."""

    by_position: list[list[float]]  # [position][level]
    tokens: Floats  # [level, K]: expected of a round with K draft tokens
    # Of n accepted tokens, by level: [if none was rejected, if one was][n]
    likelihoods: list[list[list[float]]]

    @classmethod
    def of(cls, rates: Floats) -> Rates:
        """Return what follows from rates [level, position]."""
        reach = np.ones((len(LEVELS), MAX_DRAFT_TOKENS + 1))
        reach[:, 1:] = np.cumprod(rates, axis=1)
        missed = reach[:, :-1] * (1 - rates)
        likelihoods = [[list(map(float, column)) for column in table.T] for table in (reach, missed)]
        by_position = [list(map(float, column)) for column in rates.T]
        return cls(by_position, np.cumsum(reach, axis=1), likelihoods)


class DrafterStatistics:
    """Acceptance of one drafter, shared by all answers. `prior` weighs as much as `worth` drafts."""

    MEMORY = 200  # verified drafts that frequencies remember, so that they follow a change of use
    DECLINE_REFRESH = 8  # verified drafts between two computations of the declines, which change slowly
    FAR = 16  # tokens after a rejection: positions beyond are not told apart

    def __init__(self, prior: Sequence[float] = tuple(LEVELS.values()), worth: int = 16) -> None:
        self.frequencies, self._worth = list(prior), worth
        self._drafts = 0
        self.since = 0  # plain tokens since the last draft
        self._accepted, self._expected = [0.0] * MAX_DRAFT_TOKENS, [0.0] * MAX_DRAFT_TOKENS
        # By the tokens since a rejection: accepted, expected, and its variance.
        self._by_distance = [[0.0] * self.FAR for _ in range(3)]
        # Verified drafts, not counted yet: the belief before, the tokens since a rejection, accepted tokens,
        # and whether one was rejected.
        self._uncounted: list[tuple[Sequence[float], int, int, bool]] = []
        self._is_due = False  # the rates have to be computed again
        self._compute_rates()

    @classmethod
    def with_mean(cls, mean: float) -> DrafterStatistics:
        """Return statistics of a request's drafter: the text follows it with this probability, or never."""
        # The prior weighs as much as 4 drafts: the drafter of one request must show soon whether it fits.
        return cls([1 - mean, *[0.0] * (len(LEVELS) - 2), mean], 4)

    def learn(self, belief: Sequence[float]) -> None:
        """Average the belief after a verified draft into the frequencies."""
        self._drafts += 1
        step = 1 / min(self._worth + self._drafts, self.MEMORY)
        self.frequencies = [f + step * (b - f) for f, b in zip(self.frequencies, belief, strict=True)]
        self._is_due |= self._drafts % self.DECLINE_REFRESH == 0

    def after(self, distance: int) -> Rates:
        """Return the rates of a draft that begins `distance` tokens after a rejection."""
        return self._rates[min(max(distance, 0), self.FAR)]

    def posterior(self, belief: Sequence[float], distance: int, accepted: int, rejected: bool) -> list[float]:
        """Return the belief after a draft `distance` tokens after a rejection. `settle` will count it."""
        self._uncounted.append((belief, distance, accepted, rejected))
        levels = list(map(mul, belief, self.after(distance).likelihoods[rejected][accepted]))
        total = sum(levels)
        return [level / total for level in levels]

    def settle(self) -> None:
        """Count the last drafts by position; compute the rates if they are due."""
        for levels, distance, accepted, rejected in self._uncounted:
            rates, usual = self.after(distance).by_position, self._rates[self.FAR].by_position
            for position in range(accepted + rejected):
                weight, was_accepted = sum(levels), position < accepted
                self._accepted[position] += was_accepted
                self._expected[position] += sum(map(mul, levels, LEVELS)) / weight
                if distance + position < self.FAR:
                    rate = sum(map(mul, levels, usual[position])) / weight
                    counts = was_accepted, rate, rate * (1 - rate)
                    for sums, count in zip(self._by_distance, counts, strict=True):
                        sums[distance + position] += count
                levels = list(map(mul, levels, rates[position]))
        self._uncounted.clear()
        if self._is_due:
            self._compute_rates()

    def _compute_rates(self) -> None:
        """Compute acceptance by level and position: drafters may get worse within a draft."""
        keep = 1 - self.DECLINE_REFRESH / (5 * self.MEMORY)
        decline, factor = [], 1.0
        for position in range(MAX_DRAFT_TOKENS):
            accepted, expected = self._accepted[position], self._expected[position]
            prior = 20.0  # accepted tokens: the weight of the assumption "as the position before"
            factor = min((accepted + prior * factor) / (expected + prior), 1.03)
            decline.append(factor)
            self._accepted[position] *= keep
            self._expected[position] *= keep
        rates, factors = np.outer(list(LEVELS), decline), self._factors(keep)
        self._rates = [Rates.of(np.minimum(rates, 0.985))] * (self.FAR + 1)
        for distance in range(self.FAR):
            known = np.ones(MAX_DRAFT_TOKENS)
            known[: self.FAR - distance] = factors[distance : distance + MAX_DRAFT_TOKENS]
            if (known != 1).any():
                self._rates[distance] = Rates.of(np.minimum(rates * known, 0.985))
        self._is_due = False

    def _factors(self, keep: float, surprise: float = 3.0) -> Floats:
        """Return how the rates differ by the tokens since a rejection; 1 within `surprise` deviations."""
        accepted, expected, variance = np.array(self._by_distance)
        self._by_distance = [[count * keep for count in sums] for sums in self._by_distance]
        is_clear = np.abs(accepted - expected) > surprise * np.sqrt(variance + 0.3)
        factors: Floats = np.where(is_clear, (accepted + 0.02) / (expected + 0.02), 1.0)
        return factors


class Belief:
    """Probabilities of the levels for one drafter in one answer. They begin as the shared frequencies."""

    def __init__(self, shared: DrafterStatistics) -> None:
        self.shared = shared
        self.levels: list[float] = shared.frequencies
        self._distance = shared.FAR  # tokens since a rejection

    def expected_tokens(self) -> Floats:
        """Return the expected tokens of a round, by the number of draft tokens, 0 included."""
        expected: Floats = np.dot(self.levels, self.shared.after(self._distance).tokens)
        return expected

    def advance(self, tokens: int) -> None:
        """Let the level change over some emitted tokens."""
        self._distance += tokens
        stay = (1 - CHANGE) ** tokens
        change = 1 - stay
        pairs = zip(self.levels, self.shared.frequencies, strict=True)
        self.levels = [stay * b + change * f for b, f in pairs]

    def update(self, accepted: int, rejected: bool) -> None:
        """Learn that `accepted` tokens of a draft were accepted and, if `rejected`, the next one was not.

        `advance` follows, by these tokens and the one after them.
        """
        self.levels = self.shared.posterior(self.levels, self._distance, accepted, rejected)
        if rejected:
            self._distance = -accepted - 1
        self.shared.learn(self.levels)
