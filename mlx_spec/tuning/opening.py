"""What the first tokens of an answer say about the rest of it.

Answers are of kinds: one drafter may be right about 95 % of a list of facts and 5 % of a story. An average of
both is right about neither, and moving it a little with every token takes as long as the answer. So the
acceptance rate of an answer is one of a few, by chances that the answers before have shown, and every token
judged is weighed by Bayes' rule: one rejected draft says nearly all there is to say. Before any is, there
is how sure the target is of the answer's first token, and what that meant in the answers before.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from itertools import pairwise
from operator import mul

from mlx_spec.types import MAX_DRAFT_TOKENS

UNKNOWN = -1  # the sort of an answer of which only its kind is asked
RATES = (0.03, 0.15, 0.35, 0.55, 0.75, 0.9, 0.97)
PRIOR = (0.2, 0.16, 0.16, 0.2, 0.32, 0.4, 0.24)  # answers of each rate that are assumed before any was seen
MEMORY = 32  # answers; a long one counts once for every so many tokens as here:
LENGTH = 32  # tokens judged, from none to all of which the answer's own rates by position take over
POWERS = [[rate**length for rate in RATES] for length in range(MAX_DRAFT_TOKENS + 1)]
SORTS = (0.5, 0.9, 0.99)  # answers are told apart by these probabilities of their first token ...
ALIKE = 2.0  # ... once there are so many of one sort; before that, most is by what is seen of all of them
CHANGE = 0.04  # chance that the text has become one of another kind, a token judged


class Kinds:
    """How often answers of each rate were seen. Shared by all sequences of a pair."""

    def __init__(self) -> None:
        self._seen = [[0.0] * len(RATES) for _ in range(len(SORTS) + 2)]  # by sort; the last: not known

    def begin(self) -> None:
        """One more answer is about to be counted; old ones count less."""
        self._seen = [[(1 - 1 / MEMORY) * count for count in counts] for counts in self._seen]

    def move(self, before: Sequence[float], after: Sequence[float], sort: int = UNKNOWN) -> None:
        """The answer that is counted is of another kind than was thought."""
        counts = zip(self._seen[sort], before, after, strict=True)
        self._seen[sort] = [count + more - less for count, less, more in counts]

    def shares(self, sort: int = UNKNOWN) -> list[float]:
        """The chance of each rate."""
        # Answers told at the same time age each other: some counts fall below 0.
        counts = [[max(count, 0.0) for count in counts] for counts in self._seen]
        seen = _shares([sum(column) for column in zip(PRIOR, *counts, strict=True)])
        if sort != UNKNOWN:
            seen = _shares([ALIKE * every + own for every, own in zip(seen, counts[sort], strict=True)])
        return seen


class Opening:
    """One drafter in one answer."""

    def __init__(self, kinds: Kinds) -> None:
        self._kinds = kinds
        self.begin()

    def begin(self) -> None:
        """An answer begins."""
        self._prior = self._chances = self._kinds.shares()
        self._counted = [0.0] * len(RATES)
        self._judged, self._parts, self._sort = 0.0, 0, UNKNOWN
        self._cached: list[float] | None = None

    @property
    def share(self) -> float:
        """The weight of this view of the answer, against rates by position."""
        return max(1 - self._judged / LENGTH, 0.0)

    def begins(self, certainty: float) -> None:
        """The target was so sure of the first token: its highest probability, 0 to 1."""
        self._sort = bisect(SORTS, certainty)
        shares = self._kinds.shares(self._sort)
        odds = [c * s / p for c, s, p in zip(self._chances, shares, self._prior, strict=True)]
        self._chances, self._prior = _shares(odds), shares
        self._cached = None

    def saw(self, accepted: float, rejected: float) -> None:
        """So many tokens were accepted, and so many not; of a token that was not verified, the chances."""
        if self._judged // LENGTH >= self._parts:
            self._parts += 1
            self._counted = [0.0] * len(RATES)
            self._kinds.begin()
        self._judged += accepted + rejected
        old = zip(self._chances, self._prior, RATES, strict=True)
        odds = [((1 - CHANGE) * c + CHANGE * p) * r**accepted * (1 - r) ** rejected for c, p, r in old]
        self._chances = _shares(odds)
        self._kinds.move(self._counted, self._chances, self._sort)
        self._counted, self._cached = self._chances, None

    @property
    def first(self) -> float:
        """The rate of the first position."""
        return sum(c * r for c, r in zip(self._chances, RATES, strict=True))

    def rates(self) -> list[float]:
        """The rate of every position, given that those before were accepted."""
        if self._cached is None:
            reach = [sum(map(mul, self._chances, powers)) for powers in POWERS]
            self._cached = [longer / length for length, longer in pairwise(reach)]
        return self._cached


def _shares(counts: Sequence[float]) -> list[float]:
    """Of each in the sum of all."""
    total = sum(counts)
    return [count / total for count in counts]
