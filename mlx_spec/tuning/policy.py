"""The adaptive policy: how many tokens to draft in the next round, 0 included."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from mlx_spec.tuning.acceptance import Acceptance, Experience, bin_of
from mlx_spec.tuning.books import Books
from mlx_spec.tuning.costs import Costs
from mlx_spec.tuning.curiosity import Curiosity
from mlx_spec.tuning.hold import LONGEST, Hold
from mlx_spec.tuning.lessons import Lessons
from mlx_spec.tuning.outlook import Outlook
from mlx_spec.tuning.plan import FIRST_LENGTH, Plan, Planner
from mlx_spec.tuning.probes import Probes
from mlx_spec.tuning.room import Room
from mlx_spec.types import Choice, Decision, Reason, Round

WARM_UP = 2  # plain tokens timed before anything is drafted
SURE = 0.9  # acceptance from which on a first draft is not preceded by a shadow token
REVIEWS = (2, 16, 128)  # rounds in a row without the wanted draft, after which the plan is made anew


class Adaptive:
    """What pays, from measured costs and observed acceptance; plain decoding where nothing does.

    `costs` and `experience` are shared by all sequences of a pair, everything else is of one sequence. The
    drafters in `free` take no time worth a mention and have a draft now and then, as lookup does.
    """

    def __init__(
        self,
        costs: Costs,
        drafters: int = 1,
        clock: Callable[[], float] = time.perf_counter,
        experience: Sequence[Experience] | None = None,
        free: Collection[int] = (),
    ) -> None:
        self._costs, self._clock = costs, clock
        self._acceptance = [Acceptance(e) for e in experience or [Experience() for _ in range(drafters)]]
        self._planner = Planner(costs, self._acceptance)
        compares = len(self._acceptance) == 1 and not free  # one drafter that always has a draft
        self._books = Books(costs, self._acceptance[0] if compares else None)
        self._probes = Probes(len(self._acceptance), free)
        self._outlook, self._hold = Outlook(self._planner, self._acceptance, clock), Hold()
        self._curiosity = Curiosity(self._acceptance)
        self._lessons = Lessons(self._acceptance, self._books, self._probes, self._outlook, self._curiosity)
        self._room = Room(self._planner, self._probes, self._books)
        self._decision: Decision | None = None  # given, and not yet observed
        self._held = False  # it held from the round before
        self._context = 0
        self._asked = self._done = 0.0  # times of the last decision and the last observation
        self._missed = 0  # rounds in a row in which a draft was wanted and none came
        self._begins = True  # the answer has no round yet

    def decide(self, history: Sequence[int]) -> Decision:
        """What to draft now. The same answer until the round is observed."""
        self._asked, held = self._clock(), self._hold.decision
        self._held = held is not None
        if held is not None:
            self._decision = held
        elif self._decision is None or self._context != len(history):
            self._wake()
            self._context = len(history)
            self._decision = self._next()
            if self._begins:
                self._decision = replace(self._decision, certainty=True)
        return self._decision

    def begin(self) -> None:
        """A new answer begins, in the same conversation or with the same parts."""
        self._wake()
        for acceptance in self._acceptance:
            acceptance.begin()
        self._books.begin()
        rates = {d: self._acceptance[d].first_rate() for d in self._probes.free}
        self._probes.begin({d: rate for d, rate in rates.items() if rate < SURE})
        self._outlook.begin()
        self._missed, self._begins = 0, True

    def cut(self, drafter: int, confidence: Sequence[float]) -> int:
        """How many to verify; token j by `confidence[: j + 1]` alone."""
        rule = self._planner.rules.get(drafter)
        if rule is None or not self._outlook.reads(drafter):
            return len(confidence)
        return rule.cut([bin_of(c) for c in confidence])

    def observe(self, round: Round) -> None:
        """Learn what the round took and what was accepted."""
        now, decision = self._clock(), self._decision
        assert decision is not None, "a round was observed that was never decided on"
        self._decision = None
        if not self._hold.lasts(round, now - self._asked):
            self._wake()
        elif self._held:
            self._hold.pass_by(round, self._asked - self._done, now - self._done)
            self._done = now
            return
        if round.certainty is not None:
            for acceptance in self._acceptance:
                acceptance.begins(round.certainty)
            self._outlook.moved()
        self._passes(now - self._asked, judged=round.drafter is not None)
        if round.drafter is not None:
            self._drafted(round, decision, now - self._asked)
        else:
            self._plainly(round, decision, now)
        self._done, self._begins = now, False

    def _wake(self) -> None:
        """What held does no longer: what the rounds of it teach."""
        decision, rounds = self._hold.end()
        if decision is None or not rounds:
            return
        if rounds[0].round.drafted:
            for round, waited, took in rounds:
                self._passes(took - waited, judged=True)
                self._lessons.drafted(round, decision.choices, self._context, took - waited)
            return
        looked = [r.round for r in rounds if r.round.agreement is not None]
        self._passes(sum(r.took - r.waited for r in rounds), len(rounds), judged=bool(looked))
        self._none_came(decision, len(rounds) - len(looked))
        for round, waited, took in rounds:
            self._time_plain(waited, took)
            self._books.steadily(round)
        for round in looked:
            self._lessons.compared(round)

    def _passes(self, seconds: float, rounds: int = 1, *, judged: bool) -> None:
        """Time goes by: so many rounds, which took so long."""
        self._outlook.tick(seconds, rounds, judged=judged)
        for acceptance in self._acceptance:
            acceptance.tick(rounds)

    def _next(self) -> Decision:
        context, probes = self._context, self._probes
        plain = self._costs.plain(context)
        if plain is None or not self._acceptance:
            return Decision((), Reason.LEARNING if self._acceptance else Reason.NO_DRAFTER, None, plain)
        if probes.timing > 0 or self._costs.timed(context) < WARM_UP:
            return Decision((), Reason.PROBE if self._outlook.plan else Reason.LEARNING, None, plain)
        plan, held = self._look(context), self._books.hindsight.length
        if plan.choices or held:
            return self._draft(plan, plain)
        rounds = self._rest(range(len(self._acceptance)), hopeful=plan.reason is Reason.ACCEPTANCE)
        return self._trial(plan, plain) or self._holding(self._aside(plan.reason, plain), *rounds)

    def _draft(self, plan: Plan, plain: float) -> Decision:
        """A draft, if the ledger allows it."""
        probes, held = self._probes, self._books.hindsight.length
        wanted: tuple[Choice, ...] = (Choice(0, held),) if held else plan.choices
        sure = [c for c in wanted if c.drafter not in probes.doubted]
        free = self._probes.free if sure else ()  # no longer, where another one drafts
        choices = tuple(c for c in wanted if c in sure or c.drafter in free)
        doubted = next((c.drafter for c in wanted if c.drafter in probes.doubted), None)
        others = [d for d in range(len(self._acceptance)) if all(c.drafter != d for c in choices)]
        if not held:
            choices = self._curiosity.asked(choices)
        if self._costs.guessed(self._context):
            choices = tuple(Choice(c.drafter, min(c.limit, FIRST_LENGTH)) for c in choices)
        afforded = self._planner.afforded(choices, self._room.left, probes.proven)
        afforded += self._planner.untried((d for d in others if d not in probes.doubted), self._room.left)
        asked = {*others, *probes.proven, *(c.drafter for c in afforded)}
        others += [c.drafter for c in choices if c.drafter not in asked]  # to be looked at beside the rest
        reason = Reason.WAITING if self._missed > 1 else Reason.PAYS
        if not afforded:
            reason = Reason.BUDGET if choices else self._why_none()
        if afforded and not (others and self._missed > 1):
            probes.drafting()
            decision = Decision(afforded, reason, None, plain, self._planner.unlikely(afforded))
            if afforded == wanted and reason is Reason.PAYS and not self._books.flight:
                repeats, most = self._room.repeats(afforded)
                self._hold.begin_drafts(decision, repeats, probes.drafting, most * plain)
            return self._holding(decision, LONGEST, probes.drafting)
        rounds = self._rest(others, hopeful=True, first=None if afforded else doubted)
        if reason is Reason.BUDGET and (trial := self._trial(plan, plain)):
            return trial
        return self._holding(self._aside(reason, plain, afforded), *rounds)

    def _why_none(self) -> Reason:
        """Why none of those that take time is to draft; where there are none, a free one is looked at."""
        slow = [d for d in range(len(self._acceptance)) if d not in self._probes.free]
        return self._planner.why_not(slow) if slow else Reason.PROBE

    def _trial(self, plan: Plan, plain: float) -> Decision | None:
        """A draft that is not thought to pay, where one is due: only that shows what it costs."""
        room = self._books.ledger.trial_room
        choices = self._planner.trial(plan, room) if self._probes.trying else ()
        return Decision(choices, Reason.PROBE, None, plain) if choices else None

    def _rest(
        self, drafters: Sequence[int], *, hopeful: bool, first: int | None = None
    ) -> tuple[float, Callable[[int], None]]:
        """A plain round: for how many more nothing is due, and what to do in those."""
        looks = self._planner.looks(d for d in drafters if self._room.affords(d))
        self._probes.pass_by(drafters, hopeful=hopeful)
        rounds = self._probes.resting(looks, hopeful=hopeful, first=first if first in looks else None)
        return rounds, partial(self._probes.pass_by, drafters, hopeful=hopeful)

    def _holding(self, decision: Decision, rounds: float, passing: Callable[[int], None]) -> Decision:
        """The decision, which holds for some rounds if it is one to wait or to decode plainly."""
        idle = not decision.choices or decision.reason is Reason.WAITING
        if idle and self._books.flight and (decision.shadow is None or decision.shadow in self._probes.free):
            self._hold.begin(decision, rounds, passing)
        return decision

    def _aside(self, reason: Reason, plain: float, choices: tuple[Choice, ...] = ()) -> Decision:
        """A shadow token where one is due, or what tells as much; else these choices or plain decoding."""
        drafter = self._probes.shadow
        if drafter is None:
            return Decision(choices, reason, None, plain)
        if self._room.tells(drafter):
            return Decision((*choices, Choice(drafter, 1)), Reason.PROBE, None, plain)
        return Decision((), reason if drafter in self._probes.free else Reason.PROBE, drafter, plain)

    def _look(self, context: int) -> Plan:
        """The plan now."""
        before, plan = self._outlook.plan, self._outlook.now(context)
        if plan is not before:
            self._books.price(self._planner.rounds(0))
        return plan

    def _plainly(self, round: Round, decision: Decision, now: float) -> None:
        """A round without a draft."""
        books, flight, wanted = self._books, self._books.flight, bool(decision.choices)
        waited, took, shadow = self._asked - self._done, now - self._done, decision.shadow
        patient = decision.unlikely or self._missed > 1
        landing = flight and wanted and not patient
        if not landing:
            self._none_came(decision, 1)
        if shadow is not None and shadow not in self._probes.free:  # a free one is asked until it has one
            self._lessons.looked_aside(shadow, None)
        goes_on = not landing and (not wanted or decision.unlikely or self._missed > 1)
        if landing:
            books.landed(round, self._context, None if books.paused(self._context, waited) else took)
        elif not flight:
            books.plainly(round, self._context, now - self._asked, goes_on=goes_on)
        else:
            if not round.finish_reason:
                self._time_plain(waited, took)
            books.flight = goes_on
            books.steadily(round)
        if self._probes.timing and not wanted:
            self._probes.timing -= (flight and not landing) or decision.reason is not Reason.PROBE

    def _none_came(self, decision: Decision, rounds: int) -> None:
        """So many rounds in which whoever was asked for a draft had none."""
        wanted, shadow = [choice.drafter for choice in decision.choices], decision.shadow
        if wanted:
            before, self._missed = self._missed, self._missed + rounds
            if any(before < review <= self._missed for review in REVIEWS):
                self._outlook.stale()
        for drafter in wanted if shadow is None else [shadow]:
            if drafter in self._probes.free or not self._begins:  # some have their first in the second round
                self._acceptance[drafter].missed(rounds)

    def _time_plain(self, waited: float, took: float) -> None:
        """A plain token came so long after the one before, and was waited for so late."""
        if self._books.timed(self._context, waited, took):
            self._probes.retime()

    def _drafted(self, round: Round, decision: Decision, seconds: float) -> None:
        """A round with a draft, verified or not."""
        if not decision.choices:
            self._shadowed(round, seconds)
            return
        flight, self._books.flight, self._missed = self._books.flight, False, 0
        if flight and not round.drafted:
            paused = self._books.paused(self._context, self._asked - self._done)
            self._lessons.landed(round, self._context, None if paused else seconds)
        else:
            self._lessons.drafted(round, decision.choices, self._context, seconds)

    def _shadowed(self, round: Round, seconds: float) -> None:
        """A token was drafted and not verified."""
        assert round.drafter is not None
        price, free = self._planner.price(round.drafter), self._books.flight
        self._books.shadowed(round, self._context, seconds, price, free=free)
        self._lessons.compared(round)
