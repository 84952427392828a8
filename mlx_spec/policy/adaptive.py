"""The adaptive policy: in every round the draft length with the most expected tokens per second.

While plain decoding is the best, nothing is learned about the drafter. So now and then one token is drafted
and verified: a probe. The plain tokens since the last draft have paid for it. An account of plain tokens won
and lost bounds what drafting may lose. README.md has the formulas and the proof. `FixedPolicy` always drafts
the length that a user chose.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Self

import numpy as np

from mlx_spec.errors import InvalidValue, Mismatch, NotFound
from mlx_spec.model.row_class import RowClass
from mlx_spec.policy import saved_costs
from mlx_spec.policy.acceptance import Belief, DrafterStatistics
from mlx_spec.policy.ahead_costs import AheadCosts
from mlx_spec.policy.costs import EPSILON, LEAST_LOSS, BadCosts, CostModel, Costs, Floats, Table, best_length
from mlx_spec.policy.ratios import Ratios
from mlx_spec.policy.saved_costs import Key
from mlx_spec.types import MAX_DRAFT_TOKENS, Cost, Decision, DraftChoice, Reason, RequestDrafter, Round

Clock = Callable[[], float]
Reach = Callable[[], Sequence[float]]
Available = Callable[[Sequence[int]], int]  # how many tokens a drafter can draft after a history

BUFFER = 3.0  # plain tokens that drafting may lose beyond EPSILON
PROBE_SHARE = 0.005  # share of the time for probes
TICK = 1e-6  # seconds: the least time of a round, because a clock may stand still

_log = logging.getLogger("mlx_spec")


@dataclass
class Account:
    """Plain tokens won by drafting, between -BUFFER and BUFFER; shared by the sequences of a pair."""

    lead: float = 0.0

    def affords(self, cost: float, wait: float) -> bool:
        """Return True if the account covers losing a round of this cost and the plain token after it."""
        return max(cost, 1 + wait) + wait - (1 + EPSILON) <= self.lead + BUFFER

    def enter(self, tokens: float, cost: float) -> None:
        """Enter the tokens and the cost of a round, which is its time in plain tokens."""
        self.lead = min(self.lead + (1 + EPSILON) * tokens - cost, BUFFER)


class Proposal:
    """One drafter in one answer: its belief, and whether it has drafted yet."""

    def __init__(
        self,
        acceptance: DrafterStatistics,
        reach: Reach | None = None,
        request_drafter: RequestDrafter | None = None,
        draftable: Available | None = None,
    ) -> None:
        self.belief, self.reach, self._draftable = Belief(acceptance), reach, draftable
        self.request_drafter = request_drafter
        self.verified = False  # one of its drafts was verified in this answer

    def expected_tokens(self) -> Floats:
        """Return the expected tokens of a round by the number of draft tokens, 0 included."""
        if self.reach is None:
            return self.belief.expected_tokens()
        reach = np.zeros(MAX_DRAFT_TOKENS + 1)
        beginning = list(self.reach())[:MAX_DRAFT_TOKENS]
        reach[1 : len(beginning) + 1] = beginning
        return 1 + np.cumsum(reach)

    def first_rate(self) -> float:
        """Return the probability that the first draft token is accepted."""
        return float(self.expected_tokens()[1]) - 1

    def available(self, history: Sequence[int], queued: bool) -> int:
        """Return the most tokens it may draft after a history; a queued token replaces the first one.

        A policy of one sequence asks this. Whether the drafter has a draft is known after it has drafted.
        """
        if self.request_drafter is None:
            return MAX_DRAFT_TOKENS
        return min(self.request_drafter.available(history) - queued, MAX_DRAFT_TOKENS)

    def available_now(self, history: Sequence[int]) -> int:
        """Return how many tokens it has to draft if no token is queued. A batch asks this before it drafts.

        A drafter that cannot tell before it drafts is expected to have as many as it may draft.
        """
        return self.available(history, False) if self._draftable is None else self._draftable(history)


class AdaptivePolicy:
    """The policy of one sequence. The sequences of a pair share costs, acceptance and the account."""

    def __init__(
        self,
        shared: AdaptivePolicies,
        clock: Clock,
        reach: Mapping[int, Reach],
        available: Mapping[int, Available],
    ) -> None:
        self._shared, self._clock = shared, clock
        self._drafters = [
            Proposal(a, reach.get(i), None, available.get(i)) for i, a in enumerate(shared.acceptance)
        ]
        self._costs: CostModel | None = None  # at the length of the history
        self._decided = self._done = 0.0  # times of the last decision and of the end of the last round
        self._reset(())

    def begin(self, request_drafters: Sequence[RequestDrafter] = ()) -> None:
        """Begin an answer with new beliefs. The account goes on."""
        self._reset(request_drafters)
        self._shared.save(least_change=0.1)  # log seconds: less is not worth a write
        if self._shared.costs is not None:
            costs = self._shared.costs.at(1)
            self._shared.account.enter(0, -costs.host / costs.plain)  # plain decoding would wait, too

    def without_drafters(self) -> Self:
        """Draft nothing from now on. Return this policy."""
        self._drafters = []
        self.begin()
        return self

    def _reset(self, request_drafters: Sequence[RequestDrafter]) -> None:
        for proposal in self._drafters:
            proposal.belief, proposal.verified = Belief(proposal.belief.shared), False
        extras = [Proposal(DrafterStatistics.with_mean(r.prior), None, r) for r in request_drafters]
        self._proposals = [*self._drafters, *extras]
        self._names = (*self._shared.names, *(drafter.name for drafter in request_drafters))
        self._choices: tuple[DraftChoice, ...] = ()  # of the last decision
        self._queued = False  # the next token is queued
        self._waiting = False  # a draft was wanted and none was available
        self._idle = True  # the last round had no draft
        self._tokens, self._spent = 0, 0.0  # tokens of this answer, and their time in plain tokens
        self._too_dear = False  # a drafter was too dear to try in this answer

    def decide(self, history: Sequence[int]) -> Decision:
        """Return the drafters that pay, the best first; a probe if one is due; else plain decoding."""
        self._decided, costs = self._clock(), self._shared.costs
        self._costs = None if costs is None else costs.at(len(history))
        if not self._proposals or self._costs is None:
            self._choices = ()
            return Decision((), Reason.LEARNING if self._proposals else Reason.NO_DRAFTER)
        self._choices, reason = self._choose(history, self._costs)
        if self._choices and self._shared.ratios.wants_plain():
            self._choices = ()
        return Decision(self._choices, reason, self._costs.plain, self._cost)

    def _cost(self, index: int, tokens: int) -> Cost | None:
        assert self._costs is not None
        tokens = min(tokens, MAX_DRAFT_TOKENS)
        table = self._costs.table
        measured = self._costs.measured(index, tokens) / table.plain
        return self._shared.ratios.cost((1, index), tokens, measured, table.error)

    def _choose(self, history: Sequence[int], costs: CostModel) -> tuple[tuple[DraftChoice, ...], Reason]:
        paying: list[tuple[float, int, int, bool]] = []  # speed, drafter, length, ahead
        others: list[int] = []
        if (most := self._shared.rows.most_rows(len(history) - 1 + self._queued) - 1) < 1:
            return (), Reason.EXACT
        for index, proposal in enumerate(self._proposals):
            if (limit := min(proposal.available(history, self._queued), most)) < 1:
                continue
            length, speed, ahead = self._best(index, limit, costs)
            if speed * costs.plain > 1 + EPSILON:
                paying.append((speed, index, length, ahead))
            else:
                others.append(index)
        paying.sort(reverse=True)
        limits = [(i, self._limit(i, length, costs, ahead), ahead) for _, i, length, ahead in paying]
        choices = tuple(self.choice(*limit) for limit in limits if limit[1])
        hopeful = [i for i in others if _could_pay(self._proposals[i].belief.shared, costs, i, most)]
        probes = tuple(self.choice(i, 1) for i in hopeful if self._idle and self._probe_due(i, costs))
        if len(hopeful) < len(others) and not self._too_dear:
            self._too_dear = True
            self._shared.too_dear += 1
        if choices:
            return choices + probes, self._reason_on()
        if probes:
            return probes, Reason.PROBE
        if paying or hopeful:
            return (), Reason.BUDGET if paying else Reason.ACCEPTANCE
        return (), Reason.COST if others else Reason.WAITING

    def choice(self, drafter: int, limit: int, ahead: bool = False) -> DraftChoice:
        return DraftChoice(drafter, limit, self._names[drafter], ahead)

    def _best(self, index: int, limit: int, costs: CostModel) -> tuple[int, float, bool]:
        """Return the fastest draft length of a drafter, its speed, and `DraftChoice.ahead`."""
        tokens, ahead_costs = self._proposals[index].expected_tokens(), self._shared.ahead_costs.get(index)
        if ahead_costs is not None:
            return ahead_costs.best(tokens, costs, index, limit)
        return *best_length(tokens, costs.rounds(index), limit), False

    def _reason_on(self) -> Reason:
        """Return the reason for drafting. PAYS only if this answer gained time over 16 tokens or more."""
        if self._waiting:
            return Reason.WAITING
        gained = self._tokens >= 16 and self._spent < self._tokens
        return Reason.PAYS if gained else Reason.LEARNING

    def _limit(self, index: int, length: int, costs: CostModel, ahead: bool = False) -> int:
        """Return the longest draft, up to `length`, that the account affords.

        The first draft of an answer also limits its expected loss. Lengths that were never timed are
        approached by doubling, because their costs may be wrong.
        """
        proposal, account, wait = self._proposals[index], self._shared.account, costs.host / costs.plain
        risk = 0.0 if proposal.verified else 1 - proposal.first_rate()
        length = min(length, costs.longest)
        # At most 0.4 plain tokens: the loss if the first token is rejected, times the probability of that.
        while length > 1 and risk * (costs.seconds(index, length) / costs.plain - 1) > 0.4:
            length -= 1
        while length:
            seconds = costs.seconds(index, length) + self._cost_of_repeated_draft(index, length, costs)
            seconds += self._shared.ahead_costs[index].extra(costs, length) if ahead else 0.0
            if account.affords(seconds / costs.plain, wait):
                break
            length -= 1
        return length

    def _cost_of_repeated_draft(self, index: int, length: int, costs: CostModel) -> float:
        """Return the seconds of a draft made beside a queued token, which the next round has to repeat."""
        return costs.drafting(index, length) if self._waiting and self._queued else 0.0

    def _probe_due(self, index: int, costs: CostModel) -> bool:
        """Return True if the plain tokens since the last draft have paid for a probe."""
        proposal = self._proposals[index]
        cost = (costs.seconds(index, 1) + costs.host) / costs.plain
        loss = max(cost - 1 - proposal.first_rate(), LEAST_LOSS)
        return proposal.belief.shared.since * PROBE_SHARE >= loss and self._limit(index, 1, costs) > 0

    def observe(self, round: Round) -> None:
        """Learn from the time and the accepted tokens of a finished round."""
        now, costs = max(self._clock(), self._decided + TICK, self._done + TICK), self._costs
        if round.kind == "draft" and round.drafter_index is not None and costs is not None:
            self._observe_draft(round, round.drafter_index, now - self._decided, costs)
        elif costs is not None:
            self._observe_plain(round, now, costs)
        self._queued, self._done = round.kind == "plain", now
        self._tokens += len(round.tokens)
        for proposal in self._proposals:
            proposal.belief.advance(len(round.tokens))

    def settle(self) -> None:
        """Finish learning from the last round: what the next decision does without."""
        self._shared.ratios.settle()
        if self._costs is not None:
            self._costs.settle()
        for proposal in self._proposals:
            proposal.belief.shared.settle()

    def _observe_draft(self, round: Round, drafter: int, seconds: float, costs: CostModel) -> None:
        proposal, plain, tokens = self._proposals[drafter], costs.plain, round.nodes or round.drafted
        self._shared.ratios.observe_draft(1, ((1, drafter), tokens), seconds, costs.measured(drafter, tokens))
        charged = self._observe_costs(round, drafter, seconds, costs)
        self._shared.account.enter(len(round.tokens), charged / plain)
        self._spent += seconds / plain
        self._learn(proposal, round)
        self._idle = self._waiting = False

    def _observe_costs(self, round: Round, drafter: int, seconds: float, costs: CostModel) -> float:
        """Learn from the seconds of a draft and its pass. Return the seconds to charge."""
        ahead_costs = self._shared.ahead_costs.get(drafter)
        if ahead_costs is None:
            return costs.observe_round(drafter, round.nodes or round.drafted, seconds)
        ahead = any(choice.ahead for choice in self._choices if choice.drafter_index == drafter)
        return ahead_costs.observe(round, costs, drafter, seconds, ahead)

    def _learn(self, proposal: Proposal, round: Round) -> None:
        if proposal.reach is None:
            stopped = len(round.tokens) == round.accepted  # a stop token hides the verdict on the rest
            proposal.belief.update(round.accepted, round.accepted < round.drafted and not stopped)
        proposal.belief.shared.since, proposal.verified = 0, True

    def _observe_plain(self, round: Round, now: float, costs: CostModel) -> None:
        cost = 1.0 if self._queued else 1 + costs.host / costs.plain
        if self._choices and round.kind == "drained":
            cost += (
                max(self._cost_of_repeated_draft(c.drafter_index, c.limit, costs) for c in self._choices)
                / costs.plain
            )
        self._shared.account.enter(1, cost)
        self._spent += cost
        if self._choices:
            self._waiting = round.kind == "plain" or not self._queued
        self._idle = True
        for proposal in self._proposals:
            proposal.belief.shared.since += 1
        timed = self._queued and round.kind == "plain"  # the end of a drained one came with the token before
        if timed and self._decided - self._done < costs.plain / 2:  # else the reader took its time
            costs.observe_plain(now - self._done)
            self._shared.ratios.observe_plain(1, now - self._done, costs.table.plain)


class AdaptivePolicies:
    """Makes the adaptive policies of a pair, and holds the state that its sequences share.

    `names` are its drafters in order. Drafters in `copying` copy text in no time. Drafters in
    `ahead_costs` measure the costs of their own rounds; this has no effect on copying ones. Drafters in
    `together` draft for several sequences in one pass. With `key` and `folder`, costs are loaded from a file
    and saved there.
    """

    policy_class: ClassVar[type[AdaptivePolicy]] = AdaptivePolicy

    def __init__(
        self,
        names: Sequence[str],
        copying: Collection[str] = (),
        *,
        ahead_costs: Mapping[str, AheadCosts] = MappingProxyType({}),
        together: Collection[str] = (),
        key: Key | None = None,
        folder: Path | None = None,
    ) -> None:
        self.names, self.key, self.folder = tuple(names), key, folder
        self.copying = frozenset(index for index, name in enumerate(names) if name in copying)
        self.together = frozenset(index for index, name in enumerate(names) if name in together)
        timed = [(i, name) for i, name in enumerate(names) if i not in self.copying]
        self.ahead_costs = {i: ahead_costs[name] for i, name in timed if name in ahead_costs}
        self.acceptance = [DrafterStatistics() for _ in names]
        self.account, self.ratios = Account(), Ratios()
        self.rows = RowClass()  # the passes that drafts may take
        self.costs: Costs | None = None
        self.measured: str | None = None  # date of the costs
        self._saved: Mapping[int, float] = {}  # seconds of passes by rows, as in the file
        self.too_dear = 0  # answers in which a drafter was too dear to try
        self._next_check = 1  # value of `too_dear` at which costs are measured again
        if key is not None and folder is not None:
            self._load(folder / saved_costs.file_name(key), key)

    def _load(self, file: Path, key: Key) -> None:
        """Use saved costs. A damaged file, or one with another key, is ignored with one warning."""
        try:
            self._set(*saved_costs.read(file, key))
        except NotFound:
            pass
        except (BadCosts, Mismatch) as error:
            _log.warning("%s: it is not used and will be replaced", error)

    def policy(
        self,
        clock: Clock = time.perf_counter,
        reach: Mapping[int, Reach] = MappingProxyType({}),
        available: Mapping[int, Available] = MappingProxyType({}),
    ) -> AdaptivePolicy:
        """Return the policy of a new sequence.

        Both mappings are by drafter index. `reach` tells the expected accepted tokens that each further
        draft token adds, for drafters that measure it themselves. `available` is for drafters that know the
        length of a draft before they make it.
        """
        return self.policy_class(self, clock, reach, available)

    def plain(self) -> AdaptivePolicy:
        """Return the policy of a sequence whose drafters failed: it drafts nothing."""
        return self.policy().without_drafters()

    def use(self, table: Table, measured: str | None = None) -> None:
        """Use measured costs and save them. `measured` is their date, now if left out."""
        self._set(table, measured or datetime.now(UTC).isoformat(timespec="seconds"))
        self.save()

    def claim_check(self) -> bool:
        """Return True once after 1, 2, 4, 8, ... answers in which a drafter was too dear: measure again."""
        due = self.too_dear >= self._next_check
        self._next_check *= 2 if due else 1
        return due

    def save(self, least_change: float = 0.0) -> None:
        """Save the corrected costs if a pass changed by `least_change` log seconds or more."""
        if self.costs is None or self.measured is None or self.key is None or self.folder is None:
            return
        table = self.costs.table()
        if max(abs(math.log(table.verify[rows] / s)) for rows, s in self._saved.items()) >= least_change:
            self._saved, file = table.verify, self.folder / saved_costs.file_name(self.key)
            try:
                saved_costs.write(file, self.key, self.measured, table)
            except BadCosts as error:
                _log.warning("%s: costs will be measured again", error)

    def _set(self, table: Table, measured: str) -> None:
        self.costs, self.measured, self._saved = Costs(table), measured, table.verify


class FixedPolicy:
    """Always drafts the same number of tokens, with the first drafter that has any.

    `names` are the drafters' names; a request's drafters come first, with the same limit. With 0 tokens
    nothing is drafted. With `ahead`, drafters also draft ahead in every round. With `ratios` a plain token is
    timed now and then, so that the gain is known.
    """

    def __init__(
        self,
        num_draft_tokens: int,
        reason: Reason = Reason.FIXED,
        names: Sequence[str] = ("drafter",),
        ahead: bool = False,
        ratios: Ratios | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        is_integer = isinstance(num_draft_tokens, (int, np.integer))
        if not is_integer or not 0 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise InvalidValue(
                f"num_draft_tokens is {num_draft_tokens}, it must be 0 to {MAX_DRAFT_TOKENS}: "
                "0 is plain decoding"
            )
        self.length, self._names, self._reason, self._ahead = num_draft_tokens, names, reason, ahead
        self._ratios, self._clock = ratios, clock
        self._decided = self._done = 0.0  # times of the last decision and of the end of the last round
        self.begin()

    def policy(
        self, clock: Clock = time.perf_counter, reach: object = None, available: object = None
    ) -> FixedPolicy:
        return FixedPolicy(self.length, self._reason, self._names, self._ahead, self._ratios, clock)

    def plain(self) -> FixedPolicy:
        return FixedPolicy(0, Reason.FAILED)

    def begin(self, request_drafters: Sequence[RequestDrafter] = ()) -> None:
        names = enumerate((*self._names, *(drafter.name for drafter in request_drafters)))
        choices = [DraftChoice(index, self.length, name, self._ahead) for index, name in names if self.length]
        of_pair = len(self._names)
        choices = [*choices[of_pair:], *choices[:of_pair]]
        cost = None if self._ratios is None else self._cost
        self._decision = Decision(tuple(choices), self._reason, cost=cost)
        self._queued = False  # the next token is queued
        self._is_alone = False  # no other sequence shares the pass

    def decide(self, history: Sequence[int]) -> Decision:
        self._decided = self._clock()
        if self._is_alone and self._ratios is not None and self._ratios.wants_plain():
            return replace(self._decision, choices=())
        return self._decision

    def _cost(self, drafter: int, tokens: int) -> Cost | None:
        assert self._ratios is not None
        return self._ratios.cost((1, drafter), tokens, None)

    def settle(self) -> None:
        if self._ratios is not None:
            self._ratios.settle()

    def observe(self, round: Round) -> None:
        """Learn the ratio of a round to a plain token, for figures: the draft length does not change."""
        now, self._is_alone = self._clock(), round.batch_size == 1
        if self._ratios is not None and self._is_alone:
            if round.kind == "draft":
                seconds = max(now - self._decided, TICK)
                shape = (1, round.drafter_index), round.nodes or round.drafted
                self._ratios.observe_draft(1, shape, seconds)
            elif (  # the end of a drained one came with the token before; else the host waited for it
                self._queued and round.kind == "plain" and self._decided - self._done < now - self._decided
            ):
                self._ratios.observe_plain(1, max(now - self._done, TICK))
        self._queued, self._done = round.kind == "plain", now


def _could_pay(acceptance: DrafterStatistics, costs: CostModel, drafter: int, most: int) -> bool:
    """Return True if drafting at most `most` tokens would pay on the most predictable text."""
    _, speed = best_length(acceptance.after(acceptance.FAR).tokens[-1], costs.rounds(drafter), most)
    return speed * costs.plain > 1 + EPSILON
