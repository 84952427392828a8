"""The adaptive policy: in every round the draft length with the most expected tokens per second.

Two rules are added to that choice:

  probing   While plain decoding is the best, nothing is learned about the drafter. So one token is drafted and
            verified when the plain tokens since the last draft have paid for it. Probes cost PROBE_SHARE of the
            time at most, and none is made if even the most predictable text would not make drafting pay.
  account   The sequences of a pair share an account of the plain tokens won and lost. A draft is made only if
            the account stays above -BUFFER even if all of it is rejected. A plain token pays EPSILON in, and no
            more than BUFFER is kept. README.md proves the bound that follows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mlx_spec.policy.acceptance import Acceptance, Belief
import mlx_spec.policy.costs as co
from mlx_spec.policy.costs import CostModel, Costs, Table
from mlx_spec.policy.planner import best_length
from mlx_spec.types import MAX_DRAFT_TOKENS, Choice, Decision, Reason, RequestDrafter, Round

Floats = NDArray[np.float64]
Gains = Callable[[], Sequence[float]]

MARGIN = 1.01  # times plain decoding: the speed that a draft must promise
EPSILON = 0.01  # share of the time that drafting may lose in the long run
BUFFER = 3.0  # plain tokens that drafting may lose beyond that
PROBE_SHARE = 0.005  # share of the time for probes
FIRST_RISK = 0.3  # plain tokens: the expected loss of an answer's first draft, if its first token is rejected
ENOUGH_TOKENS = 16  # of an answer, before its speed says whether speculation pays
ASSUME_AFTER = 8  # plain tokens timed before costs that could not be measured are assumed


class Account:
    """Plain tokens won by drafting, between -BUFFER and BUFFER; shared by the sequences of a pair."""

    def __init__(self) -> None:
        self.lead = 0.0

    def affords(self, steps: float, wait: float) -> bool:
        """Return whether a round of so many steps may be lost, and the wait for a plain token after it."""
        return max(steps, 1 + wait) + wait - (1 + EPSILON) <= self.lead + BUFFER

    def enter(self, tokens: float, steps: float) -> None:
        """Enter a round: its tokens were won, its steps were spent."""
        self.lead = min(self.lead + (1 + EPSILON) * tokens - steps, BUFFER)


class Proposal:
    """One drafter in one sequence: its belief, and the plain tokens since its last draft."""

    def __init__(self, acceptance: Acceptance, gains: Gains | None = None) -> None:
        self.belief = Belief(acceptance)
        self.gains = gains
        self.request: RequestDrafter | None = None
        self.since = 0  # plain tokens since the last draft
        self.judged = False  # in this answer

    def begin(self) -> None:
        """Begin an answer."""
        self.belief.begin()
        self.judged = False

    def expected_tokens(self) -> Floats:
        """Return the expected tokens of a round by the number of draft tokens, 0 included."""
        if self.gains is None:
            return self.belief.expected_tokens()
        gains = list(self.gains())[:MAX_DRAFT_TOKENS]
        return 1 + np.cumsum([0.0, *gains, *[0.0] * (MAX_DRAFT_TOKENS - len(gains))])

    def available(self, history: Sequence[int], queued: bool) -> int:
        """Return how many tokens it may have; a queued token uses the first one up."""
        if self.request is None:
            return MAX_DRAFT_TOKENS
        return min(self.request.available(history) - queued, MAX_DRAFT_TOKENS)


class AdaptivePolicy:
    """The policy of one sequence. `costs`, `acceptance` and `account` are shared by all sequences of a pair."""

    def __init__(self, shared: AdaptivePolicies, clock: Callable[[], float], gains: Mapping[int, Gains]) -> None:
        self._shared, self._clock = shared, clock
        self._drafters = [Proposal(a, gains.get(i)) for i, a in enumerate(shared.acceptance)]
        self._proposals = self._drafters
        self._decided = self._done = 0.0  # times of the last decision and of the end of the last round
        self.begin()

    def begin(self, request_drafters: Sequence[RequestDrafter] = ()) -> None:
        """Begin an answer: its text may be of any kind. The account goes on."""
        extras = [Proposal(Acceptance.with_mean(extra.prior)) for extra in request_drafters]
        for proposal, extra in zip(extras, request_drafters, strict=True):
            proposal.request = extra
        for proposal in self._drafters:
            proposal.begin()
        self._proposals = [*self._drafters, *extras]
        self._choices: tuple[Choice, ...] = ()  # of the last decision
        self._queued = False  # the engine has queued the next token
        self._waiting = False  # a draft was wanted and none was available
        self._idle = True  # the last round had no draft
        self._tokens, self._steps = 0, 0.0  # of this answer
        if self._shared.costs is not None:
            costs = self._shared.costs.at(1)
            self._shared.account.enter(0, -costs.table.host / costs.plain)  # plain decoding would wait, too

    def decide(self, history: Sequence[int]) -> Decision:
        """Return the drafters that pay, the best first; a probe if one is due; else plain decoding."""
        self._decided, costs = self._clock(), self._shared.costs
        if costs is None:
            self._choices = ()
            return Decision((), Reason.LEARNING if self._proposals else Reason.NO_DRAFTER)
        self._costs = costs.at(len(history))
        self._choices, reason = self._choose(history)
        return Decision(self._choices, reason, self._costs.plain)

    def _choose(self, history: Sequence[int]) -> tuple[tuple[Choice, ...], Reason]:
        if not self._proposals:
            return (), Reason.NO_DRAFTER
        plain = self._costs.plain
        paying: list[tuple[float, int, int]] = []  # speed, drafter, length
        others: list[int] = []
        empty = False
        for index, proposal in enumerate(self._proposals):
            limit = proposal.available(history, self._queued)
            if limit < 1:
                empty = True
                continue
            length, speed = best_length(proposal.expected_tokens(), self._seconds(index), limit)
            if speed * plain > MARGIN:
                paying.append((speed, index, length))
            else:
                others.append(index)
        paying.sort(reverse=True)
        limits = [(index, self._limit(index, length)) for _, index, length in paying]
        choices = tuple(Choice(index, limit) for index, limit in limits if limit)
        hopeful = [index for index in others if self._could_pay(index)]
        probes = tuple(Choice(index, 1) for index in hopeful if self._idle and self._probe_due(index))
        if choices:
            return choices + probes, self._reason_on()
        if probes:
            return probes, Reason.PROBE
        if paying:
            return (), Reason.BUDGET
        if hopeful:
            return (), Reason.ACCEPTANCE
        return (), Reason.COST if others or not empty else Reason.WAITING

    def _reason_on(self) -> Reason:
        """Return PAYS only if this answer has gained time, over enough tokens to mean it."""
        if self._waiting:
            return Reason.WAITING
        gained = self._tokens >= ENOUGH_TOKENS and self._steps < self._tokens
        return Reason.PAYS if gained else Reason.LEARNING

    def _seconds(self, index: int) -> Floats:
        """Return the seconds of a round by the number of draft tokens. Request drafters take no time."""
        return self._costs.rounds[index] if index < len(self._drafters) else self._costs.passes

    def _limit(self, index: int, length: int) -> int:
        """Return the longest draft, up to `length`, that the account affords; the first one is cautious."""
        proposal, seconds = self._proposals[index], self._seconds(index)
        plain, wait = self._costs.plain, self._costs.table.host / self._costs.plain
        length = min(length, co.GROW * self._costs.longest)
        if not proposal.judged:
            risk = 1 - proposal.belief.first_rate()
            while length > 1 and risk * (seconds[length] / plain - 1) > FIRST_RISK:
                length -= 1
        while length and not self._shared.account.affords(
            float(seconds[length] + self._thrown_away(index, length)) / plain, wait
        ):
            length -= 1
        return length

    def _thrown_away(self, index: int, length: int) -> float:
        """Return the seconds of a draft that is made beside a queued token, and made again in the next round."""
        return self._costs.drafting(index, length) if self._waiting and self._queued else 0.0

    def _could_pay(self, index: int) -> bool:
        """Return whether drafting would pay on the most predictable text."""
        tokens = self._proposals[index].belief.shared.tokens[-1]
        _, speed = best_length(tokens, self._seconds(index), MAX_DRAFT_TOKENS)
        return speed * self._costs.plain > MARGIN

    def _probe_due(self, index: int) -> bool:
        """Return whether the plain tokens since the last draft have paid for a probe."""
        proposal, costs = self._proposals[index], self._costs
        steps = float(self._seconds(index)[1] + costs.table.host) / costs.plain
        loss = max(steps - 1 - proposal.belief.first_rate(), 0.01)
        return proposal.since * PROBE_SHARE >= loss and self._limit(index, 1) > 0

    def observe(self, round: Round) -> None:
        """Learn from a finished round what it took and what was accepted."""
        now, tokens = self._clock(), len(round.tokens)
        if self._shared.costs is None:
            if self._queued and round.kind == "plain":
                self._shared.assume(now - self._done)
        elif round.kind == "draft" and round.drafter is not None:
            self._observe_draft(round, round.drafter, now)
        else:
            self._observe_plain(round, now)
        self._queued, self._done = round.kind == "plain", now
        self._tokens += tokens
        for proposal in self._proposals:
            proposal.belief.advance(tokens)

    def _observe_draft(self, round: Round, drafter: int, now: float) -> None:
        proposal, plain, seconds = self._proposals[drafter], self._costs.plain, now - self._decided
        rows = round.nodes or round.drafted
        believed = self._costs.observe_round(drafter, rows, rows, seconds)
        self._shared.account.enter(len(round.tokens), believed / plain)
        self._steps += seconds / plain
        if proposal.gains is None:
            stopped = len(round.tokens) == round.accepted  # a stop token hides the verdict on the rest
            proposal.belief.update(round.accepted, round.accepted < round.drafted and not stopped)
        proposal.since, proposal.judged = 0, True
        self._idle = self._waiting = False

    def _observe_plain(self, round: Round, now: float) -> None:
        plain = self._costs.plain
        steps = 1.0 if self._queued else 1 + self._costs.table.host / plain
        if self._choices and self._queued and round.kind == "landed":
            steps += max(self._thrown_away(c.drafter, c.limit) for c in self._choices) / plain
        self._shared.account.enter(1, steps)
        self._steps += steps
        if self._choices:
            self._waiting = round.kind == "plain" or not self._queued
        self._idle = True
        for proposal in self._proposals:
            proposal.since += 1
        paused = self._decided - self._done > plain / 2  # the reader took its time
        if self._queued and round.kind == "plain" and not paused:
            self._costs.observe_plain(now - self._done)


class AdaptivePolicies:
    """Makes the adaptive policies of a pair, and holds what its sequences share."""

    def __init__(self, drafters: int, table: Table | None = None) -> None:
        self.acceptance = [Acceptance() for _ in range(drafters)]
        self.account = Account()
        self.costs = None if table is None else Costs(table)
        self._plain_samples: list[float] = []

    def policy(
        self, clock: Callable[[], float] = time.perf_counter, gains: Mapping[int, Gains] | None = None
    ) -> AdaptivePolicy:
        """Return the policy of a new sequence."""
        return AdaptivePolicy(self, clock, gains or {})

    def assume(self, plain_seconds: float) -> None:
        """Assume costs once enough plain tokens were timed."""
        self._plain_samples.append(plain_seconds)
        if len(self._plain_samples) >= ASSUME_AFTER:
            plain = statistics.median(self._plain_samples)
            self.costs = Costs(Table.assumed(plain, len(self.acceptance)))
