"""Draft-length policies: how many tokens to draft in the next round, 0 included."""

from __future__ import annotations

from mlx_spec.errors import InvalidValue
from mlx_spec.types import Decision, Reason, Round

MAX_DRAFT_TOKENS = 16
LENGTHS = (0, 1, 2, 3, 4, 6, 8)  # draft lengths the running estimate chooses from
WARM_UP = (0, 0, 0, 4, 4, 2, 2)  # the first round of a length pays for compilation and is not counted
MEMORY = 0.9  # weight of the past in a running mean of seconds
DECAY = 0.97  # the same for acceptance, a round
PRIOR = (1.4, 2.0)  # accepted, tried: what is believed of a position before anything was seen
FIRST_PAUSE, LAST_PAUSE = 16, 512  # plain rounds between two probes; doubles while probes do not pay
REFRESH = 64  # speculative rounds after which one plain round is timed again
MARGIN = 1.02  # speculation must promise this much more than plain decoding


class Fixed:
    """Always the same number of draft tokens."""

    def __init__(self, num_draft_tokens: int, reason: Reason = Reason.FIXED) -> None:
        if not 0 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise InvalidValue(
                f"num_draft_tokens is {num_draft_tokens}, it must be 0 to {MAX_DRAFT_TOKENS}: "
                "0 is plain decoding"
            )
        self._decision = Decision(num_draft_tokens, reason)

    def decide(self) -> Decision:
        """The fixed number."""
        return self._decision

    def observe(self, round: Round) -> None:
        """Nothing to learn."""


class Adaptive:
    """A running estimate per position: what each draft length was seen to cost and to bring.

    Tokens of a round with k draft tokens are 1 + sum over i <= k of the product of a_j, j <= i, where a_j is
    how often position j was accepted once the ones before it were (Leviathan et al., arXiv:2211.17192, with
    a rate per position). The length with the most tokens a second is drafted; plain decoding is length 0.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # a round that drafted this many
        self._seen: dict[int, int] = {}
        self._accepted = [PRIOR[0]] * MAX_DRAFT_TOKENS
        self._tried = [PRIOR[1]] * MAX_DRAFT_TOKENS
        self._rounds = 0
        self._since = 0  # rounds since the other mode, plain or speculative, was last tried
        self._pause = FIRST_PAUSE
        self._decision = Decision(0, Reason.WARMING_UP)

    def decide(self) -> Decision:
        """The length to draft now. The same answer until the next round is observed."""
        return self._decision

    def observe(self, round: Round) -> None:
        """Learn what the round cost and which positions were accepted; decide the next."""
        self._rounds += 1
        self._learn_cost(round)
        self._learn_acceptance(round)
        self._decision = self._next(round)

    def _learn_cost(self, round: Round) -> None:
        k, seconds = round.drafted, round.seconds
        self._seen[k] = self._seen.get(k, 0) + 1
        if k not in self._seconds or self._seen[k] == 2:
            self._seconds[k] = seconds
            return
        clamped = min(seconds, 2 * self._seconds[k])  # a pause of the machine is not a cost of the round
        self._seconds[k] += (1 - MEMORY) * (clamped - self._seconds[k])

    def _learn_acceptance(self, round: Round) -> None:
        for position in range(min(round.accepted + 1, round.drafted)):
            self._accepted[position] = DECAY * self._accepted[position] + (position < round.accepted)
            self._tried[position] = DECAY * self._tried[position] + 1

    def _next(self, round: Round) -> Decision:
        if self._rounds < len(WARM_UP):
            return Decision(WARM_UP[self._rounds], Reason.WARMING_UP)
        best = max(LENGTHS, key=self._rate)
        pays = best > 0 and self._rate(best) > MARGIN * self._rate(0)
        speculative = round.drafted > 0
        self._since += 1
        if pays:
            self._pause = FIRST_PAUSE
            if self._since < REFRESH:
                return Decision(best, Reason.PAYS)
            self._since = 0
            return Decision(0, Reason.PROBE)
        if speculative:
            self._since = 0
        if self._since < self._pause:
            return Decision(0, self._why_not())
        self._since, self._pause = 0, min(2 * self._pause, LAST_PAUSE)
        return Decision(max(LENGTHS[1:], key=self._rate), Reason.PROBE)

    def _rate(self, k: int) -> float:
        """Tokens a second expected of rounds that draft k."""
        return self._tokens(k) / self._cost(k)

    def _tokens(self, k: int) -> float:
        reach, total = 1.0, 1.0
        for position in range(k):
            reach *= self._accepted[position] / self._tried[position]
            total += reach
        return total

    def _cost(self, k: int) -> float:
        """Seconds of a round that drafts k, from the nearest measured lengths on both sides."""
        if k in self._seconds:
            return self._seconds[k]
        below = max((m for m in self._seconds if m < k), default=0)
        above = min((m for m in self._seconds if m > k), default=None)
        if above is None and below == 0:
            return self._seconds[0]  # nothing was ever drafted: trying costs no more than plain decoding
        if above is None:
            below, above = sorted(self._seconds)[-2:]
        slope = (self._seconds[above] - self._seconds[below]) / (above - below)
        return max(self._seconds[below] + slope * (k - below), self._seconds[below])

    def _why_not(self) -> Reason:
        """COST when even drafts that are all accepted would not pay, else ACCEPTANCE."""
        perfect = max((k + 1) / self._cost(k) for k in LENGTHS[1:])
        return Reason.COST if perfect <= MARGIN * self._rate(0) else Reason.ACCEPTANCE
