"""Draft lengths of sequences that share a pass: one plan for all of them, an account for each.

If the longest draft has D tokens, a pass of N sequences computes N * (D + 1) rows, padding included. It costs
as much as these rows of one sequence, corrected by the rounds of this batch. The more sequences there are,
the more a draft token costs: lengths fall to 0 as the batch fills.

A sequence waits for the drafts of others. So each has an account in plain rounds of its batch. A draft must
be affordable for all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_spec.policy.acceptance import LEVELS
from mlx_spec.policy.adaptive import (
    BUFFER,
    PROBE_SHARE,
    TICK,
    AdaptivePolicies,
    AdaptivePolicy,
    Clock,
)
from mlx_spec.policy.costs import EPSILON, CostModel, Floats, best_length, interpolate
from mlx_spec.types import (
    MAX_DRAFT_TOKENS,
    Cost,
    Decision,
    DraftChoice,
    DraftLengthPolicy,
    Reason,
    RequestDrafter,
    Round,
)

BATCH_EPSILON = 0.05  # share of the time that one sequence may lose to the drafts of all in the long run
FEWEST_RUNNING, MOST_RUNNING = 4, 16  # bounds of the sequences that run at a time, by default
LENGTHS = np.arange(MAX_DRAFT_TOKENS + 1)
BEST_TOKENS: Floats = np.cumsum(max(LEVELS) ** LENGTHS)  # of a round, by length, on the most predictable text


class SharedPasses:
    """Learns the costs of passes of several sequences, from the rounds of a pair.

    Costs are in plain tokens of one sequence. A round of one sequence may change the table at lengths that
    it did not have. That change must not outweigh what was measured here.
    """

    def __init__(self) -> None:
        # By the number of sequences and the longest draft: log plain tokens, and the rounds they come from.
        self._known: dict[int, dict[int, tuple[float, int]]] = {}

    def seconds(self, costs: CostModel, count: int) -> Floats:
        """Return the expected seconds [MAX_DRAFT_TOKENS + 1] of a pass by the longest draft."""
        expected = _pass_seconds(costs, count)
        if not self._known:
            return expected
        nearest = min(self._known, key=lambda other: abs(other - count))
        alone = np.log((expected if nearest == count else _pass_seconds(costs, nearest)) / costs.plain)
        known = {0: (0.0, 0)}
        for length, (tokens, rounds) in self._known[nearest].items():
            known[length] = tokens - float(alone[length]), rounds
        lengths = sorted(known)
        values = [known[length][0] for length in lengths]
        errors = np.interp(LENGTHS, lengths, values)
        for i in range(1, len(lengths)):
            rounds = known[lengths[i]][1]
            prior = np.interp(lengths[i], lengths[:i] + lengths[i + 1 :], values[:i] + values[i + 1 :])
            # The corrections of the lengths around this one are worth two rounds.
            errors[lengths[i]] = (rounds * values[i] + 2 * prior) / (rounds + 2)
        seconds: Floats = expected * np.exp(errors)
        return seconds

    def observe(self, costs: CostModel, count: int, longest: int, seconds: float) -> None:
        """Learn from a pass of `count` sequences, whose longest draft had `longest` tokens."""
        if longest not in self._known.get(count, {}):
            before, rounds = math.log(float(self.seconds(costs, count)[longest]) / costs.plain), 0
        else:
            before, rounds = self._known[count][longest]
        rounds = min(rounds + 1, 16)  # The correction of a cost remembers 16 rounds.
        error = math.log(seconds / costs.plain) - before
        # A round that took more than 1.5 times the known seconds was delayed: it counts as 1.5.
        self._known.setdefault(count, {})[longest] = before + min(error, math.log(1.5)) / rounds, rounds


class MemberPolicy(AdaptivePolicy):
    """The adaptive policy of one sequence. In a batch a `BatchPolicy` decides and passes on the rounds."""

    def begin(self, request_drafters: Sequence[RequestDrafter] = ()) -> None:
        """Begin an answer, with its own account for rounds in a batch."""
        super().begin(request_drafters)
        self._lead = 0.0  # plain rounds of its batch won by drafts, at most BUFFER
        self._hit_rates = [1.0] * len(self._proposals)  # share of the drafts in a batch that were available

    def affordable_rounds(self, wait: float) -> float:
        """Return how long a lost round and the wait after it may be, in plain rounds."""
        return self._lead + BUFFER + 1 + BATCH_EPSILON - wait

    def candidates(self, history: Sequence[int]) -> list[tuple[int, Floats]]:
        """Return the drafters that may have a draft, each with its expected tokens by draft length."""
        expected = []
        for index, proposal in enumerate(self._proposals):
            limit = min(proposal.available_now(history), MAX_DRAFT_TOKENS)
            if limit >= 1:
                reached = self._hit_rates[index] * (proposal.expected_tokens()[: limit + 1] - 1)
                expected.append((index, 1 + reached))
        return expected

    def reason(self, reason: Reason) -> Reason:
        """Return the reason to show for a draft, if the batch drafts for this reason."""
        return self._reason_on() if reason is Reason.PAYS else reason

    def idle_tokens(self, drafter: int) -> int:
        """Return the plain tokens of all sequences since the last draft of this drafter."""
        return self._proposals[drafter].belief.shared.since

    def observe_shared(self, round: Round, wanted: Sequence[DraftChoice], plain_rounds: float) -> None:
        """Learn from a round that took as long as `plain_rounds`; `wanted` are the choices for it."""
        drafter = round.drafter_index
        for choice in wanted:
            hit = choice.drafter_index == drafter
            before = self._hit_rates[choice.drafter_index]
            self._hit_rates[choice.drafter_index] = before + (hit - before) / 8  # drafts are remembered
            if hit:
                break
        if drafter is not None:
            self._learn(self._proposals[drafter], round)
        self._queued, self._waiting, self._idle = False, False, drafter is None
        self._tokens += len(round.tokens)
        self._spent += plain_rounds
        self._lead = min(self._lead + (1 + BATCH_EPSILON) * len(round.tokens) - plain_rounds, BUFFER)
        for proposal in self._proposals:
            proposal.belief.shared.since += drafter is None
            proposal.belief.advance(len(round.tokens))


class BatchPolicies(AdaptivePolicies):
    """Adaptive policies of a pair whose sequences may share passes."""

    policy_class = MemberPolicy

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._passes = SharedPasses()

    def most_running(self) -> int:
        """Return how many sequences may share passes so that each is at least half as fast as alone."""
        if self.costs is None:
            return FEWEST_RUNNING
        costs = self.costs.at(1)
        passes = _row_seconds(costs, np.arange(1, MOST_RUNNING + 1))
        return max(FEWEST_RUNNING, int((passes - costs.host <= 2 * costs.plain).sum()))

    def group(self, clock: Clock = time.perf_counter) -> BatchPolicy:
        """Return the policy of sequences that share passes."""
        return BatchPolicy(self, self._passes, clock)


@dataclass(frozen=True)
class Plan:
    """The decisions of one round, and the costs that they rest on."""

    policies: Sequence[MemberPolicy]
    choices: Sequence[tuple[DraftChoice, ...]]
    costs: CostModel
    seconds: Floats  # of a round, by its longest draft
    plain: float  # seconds of a plain round
    began: float  # clock time


class BatchPolicy:
    """Decides for the sequences of a batch, whose pair learns the costs of `passes` together.

    If a sequence has a `FixedPolicy`, each decides for itself.
    """

    def __init__(
        self, shared: AdaptivePolicies, passes: SharedPasses, clock: Clock = time.perf_counter
    ) -> None:
        self._shared, self._passes, self._clock = shared, passes, clock
        self._plan: Plan | None = None  # None if nothing is known of costs
        self._alone: Sequence[DraftLengthPolicy] = ()  # policies that decided for themselves
        self._queued = 0  # sequences whose next token is queued
        self._done = 0.0  # time of the end of the last round

    def decide(
        self, policies: Sequence[DraftLengthPolicy], histories: Sequence[Sequence[int]]
    ) -> list[Decision]:
        """Return the lengths with the most expected tokens per second of all sequences together."""
        adaptive = [policy for policy in policies if isinstance(policy, MemberPolicy)]
        began, count, self._plan, self._alone = self._clock(), len(policies), None, ()
        if len(adaptive) < count:
            self._alone = policies
            return [policy.decide(history) for policy, history in zip(policies, histories, strict=True)]
        if self._shared.costs is None:
            return [Decision((), Reason.LEARNING)] * count
        costs = self._shared.costs.at(sum(map(len, histories)) // count)
        pairs = zip(adaptive, histories, strict=True)
        candidates = [_best_first(policy.candidates(history), costs) for policy, history in pairs]
        drafters = [of_one[0][0] for of_one in candidates if of_one]
        seconds = self._passes.seconds(costs, count) + self._drafting(costs, drafters)
        # If not even plain passes of these sequences are in one class, drafts change nothing about that.
        rows = self._shared.rows.most_shared([len(history) - 1 for history in histories])
        most = rows - 1 if rows else MAX_DRAFT_TOKENS
        lengths, reason = self._lengths(adaptive, candidates, costs, seconds, most)
        choices = [
            tuple(policy.choice(index, min(length, len(tokens) - 1)) for index, tokens in of_one if length)
            for policy, of_one, length in zip(adaptive, candidates, lengths, strict=True)
        ]
        plain = float(seconds[0])
        self._plan = Plan(adaptive, choices, costs, seconds, plain, began)
        return [
            Decision(
                chosen,
                policy.reason(reason) if chosen else reason,
                plain,
                partial(self._cost, seconds, count),
            )
            for policy, chosen in zip(adaptive, choices, strict=True)
        ]

    def _cost(self, seconds: Floats, count: int, _: int, longest: int) -> Cost | None:
        """Return the cost of a pass of `count` sequences, in their plain passes."""
        measured = float(seconds[longest] / seconds[0])
        return self._shared.ratios.cost((count, "sequences"), longest, measured)

    def _lengths(
        self,
        policies: Sequence[MemberPolicy],
        candidates: Sequence[list[tuple[int, Floats]]],
        costs: CostModel,
        seconds: Floats,
        most: int,
    ) -> tuple[list[int], Reason]:
        """Return the draft lengths, at most `most`, and why. `seconds` of a round are by longest draft."""
        if most < 1:
            return [0] * len(policies), Reason.EXACT
        count, plain, wait = len(policies), float(seconds[0]), costs.host / float(seconds[0])
        pairs = [(policy, of_one[0]) for policy, of_one in zip(policies, candidates, strict=True) if of_one]
        firsts = [first for _, first in pairs]
        if not firsts:
            return [0] * count, Reason.WAITING
        affordable = min(policy.affordable_rounds(wait) for policy in policies)
        limit = 0
        while limit < min(most, costs.longest) and seconds[limit + 1] <= affordable * plain:
            limit += 1
        tokens = np.sum([_extended(tokens) for _, tokens in firsts], axis=0) + count - len(firsts)
        if limit:
            length, speed = best_length(tokens, seconds, limit)
            if speed * plain > (1 + EPSILON) * count:
                return [self._length_of(of_one, length, speed, costs) for of_one in candidates], Reason.PAYS
        # Even high costs allow a probe: they may be wrong, if measured beside other programs.
        loss = max(count * (float(seconds[1]) + costs.host) / plain - float(tokens[1]), 0.01)
        if limit and min(policy.idle_tokens(index) for policy, (index, _) in pairs) * PROBE_SHARE >= loss:
            return [int(bool(of_one)) for of_one in candidates], Reason.PROBE
        best = BEST_TOKENS * len(firsts) + count - len(firsts)
        if best_length(best, seconds, most)[1] * plain <= (1 + EPSILON) * count:
            return [0] * count, Reason.COST
        return [0] * count, Reason.ACCEPTANCE if limit else Reason.BUDGET

    def observe(self, rounds: Sequence[Round | None]) -> None:
        """Learn from the finished round of each sequence; None if it failed."""
        for policy, round in zip(self._alone, rounds, strict=False):
            if round is not None:
                policy.observe(round)
        now, plan, count = self._clock(), self._plan, len(rounds)
        queued = any(round is not None and round.kind == "plain" for round in rounds)
        if plan is not None:
            longest = max((round.drafted for round in rounds if round is not None), default=0)
            plain_rounds = self._plain_rounds(plan, longest, queued, now, count)
            for policy, round, wanted in zip(plan.policies, rounds, plan.choices, strict=True):
                if round is not None:
                    policy.observe_shared(round, wanted if longest else (), plain_rounds)
        self._queued, self._done = count if queued else 0, now

    def _plain_rounds(self, plan: Plan, longest: int, queued: bool, now: float, count: int) -> float:
        """Return the time of a round in plain rounds. Learn the cost of its pass."""
        if longest:
            seconds = max(now - plan.began, TICK)
            drafters = [choices[0].drafter_index for choices in plan.choices if choices]
            drafting = float(self._drafting(plan.costs, drafters)[longest])
            self._passes.observe(plan.costs, count, longest, max(seconds - drafting, 0.1 * seconds))
            plan.costs.allow_longer(longest)
            shape, expected = ((count, "sequences"), longest), plan.seconds[longest]
            self._shared.ratios.observe_draft(count, shape, seconds, float(expected))
            return min(seconds / plan.plain, longest + 1 + drafting / plan.plain)
        if queued and self._queued == count and plan.began - self._done < plan.plain / 2:
            self._passes.observe(plan.costs, count, 0, max(now - self._done, TICK))
            self._shared.ratios.observe_plain(count, max(now - self._done, TICK))
        return 1.0 if self._queued == count else 1 + plan.costs.host / plan.plain

    def _drafting(self, costs: CostModel, drafters: Sequence[int]) -> Floats:
        """Return the seconds of all drafts of a round by their length. `drafters` has an index a sequence."""
        together = self._shared.together
        counts = {index: 1 if index in together else drafters.count(index) for index in set(drafters)}
        seconds = np.zeros(MAX_DRAFT_TOKENS + 1)
        for index, count in counts.items():
            seconds += count * _draft_seconds(costs, index)
        return seconds

    def _length_of(
        self, candidates: list[tuple[int, Floats]], longest: int, speed: float, costs: CostModel
    ) -> int:
        """Return the draft length of one sequence, up to `longest`.

        The pass has rows for `longest` tokens anyway, so only its drafting costs time. If the drafter drafts
        for all sequences in one pass, that costs nothing either.
        """
        if not candidates:
            return 0
        index, tokens = candidates[0]
        alone = index not in self._shared.together
        net_tokens = tokens - alone * speed * _draft_seconds(costs, index)[: len(tokens)]
        return int(net_tokens[: longest + 1].argmax())


def _best_first(candidates: list[tuple[int, Floats]], costs: CostModel) -> list[tuple[int, Floats]]:
    """Return drafters and their expected tokens by length, sorted by tokens less drafting time."""

    def value(candidate: tuple[int, Floats]) -> float:
        index, tokens = candidate
        return float((tokens - _draft_seconds(costs, index)[: len(tokens)] / costs.plain).max())

    return sorted(candidates, key=value, reverse=True)


def _extended(tokens: Floats) -> Floats:
    """Return expected tokens for all lengths. Beyond a drafter's own limit they stay the same."""
    return np.concatenate([tokens, np.full(MAX_DRAFT_TOKENS + 1 - len(tokens), tokens[-1])])


def _pass_seconds(costs: CostModel, count: int) -> Floats:
    """Return the seconds of a pass of `count` sequences by the longest draft, from passes of one."""
    seconds = _row_seconds(costs, count * (LENGTHS + 1))
    seconds[0] = max(seconds[0] - costs.host, costs.plain)  # a plain pass is queued
    return seconds


def _row_seconds(costs: CostModel, rows: NDArray[np.int64]) -> Floats:
    """Return the seconds of passes with these numbers of rows, including the wait of the host."""
    few, most = np.minimum(rows, len(costs.passes)), len(costs.passes)
    verify = costs.table.verify
    beyond = interpolate(verify, rows) / interpolate(verify, np.array([most]))
    seconds: Floats = np.where(rows <= most, costs.passes[few - 1], costs.passes[-1] * beyond)
    return seconds


def _draft_seconds(costs: CostModel, drafter: int) -> Floats:
    seconds: Floats = costs.rounds(drafter) - costs.passes
    return seconds
