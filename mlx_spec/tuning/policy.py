"""The adaptive policy: how many tokens to draft in the next round, 0 included."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

from mlx_spec.tuning.acceptance import Acceptance, Experience, bin_of
from mlx_spec.tuning.costs import CLAMP, Costs
from mlx_spec.tuning.hindsight import Hindsight
from mlx_spec.tuning.ledger import EPSILON, Ledger
from mlx_spec.tuning.lull import LONGEST, Lull
from mlx_spec.tuning.outlook import Outlook
from mlx_spec.tuning.plan import FIRST_LENGTH, Plan, Planner
from mlx_spec.tuning.probes import Probes
from mlx_spec.types import Choice, Decision, Reason, Round

WARM_UP = 2  # plain tokens timed before anything is drafted
OFTEN = 0.5  # of the rounds a drafter must have a draft for its shadow tokens to tell soon
SURE = 0.9  # acceptance from which on a first draft is not preceded by a shadow token
REVIEWS = (2, 16, 128)  # rounds in a row without the wanted draft, after which the plan is made anew
UNSURE = 0.05  # deviation of a plain token after which the next ones are timed, too
LEARN, RELEARN = 16, 64  # rounds whose confidence is read to learn its worth: the first, then one of so many
PAUSE = 3.0  # times the expected seconds; what goes beyond, after rounds that did not, the machine was paused


class Adaptive:
    """What pays, from measured costs and observed acceptance; plain decoding where nothing does.

    `costs` and `experience` are shared by all sequences of a pair, everything else is of one sequence. Of the
    drafters in `beside`, which read nothing of the target, shadow tokens do not break plain decoding's queue.
    """

    def __init__(
        self,
        costs: Costs,
        drafters: int = 1,
        clock: Callable[[], float] = time.perf_counter,
        experience: Sequence[Experience] | None = None,
        beside: Collection[int] = (),
    ) -> None:
        self._costs, self._clock = costs, clock
        self._acceptance = [Acceptance(e) for e in experience or [Experience() for _ in range(drafters)]]
        self._planner = Planner(costs, self._acceptance, beside)
        self._ledger, self._hindsight = Ledger(), Hindsight()
        self._compares = len(self._acceptance) == 1 and not beside  # one drafter that always has a draft
        self._probes = Probes(len(self._acceptance), beside)
        self._outlook, self._lull = Outlook(self._planner, self._acceptance, clock), Lull()
        self._decision: Decision | None = None  # given, and not yet observed
        self._context = 0
        self._asked = self._done = 0.0  # times of the last decision and the last observation
        self._flight = False  # a token is on its way
        self._missed = 0  # rounds in a row in which a draft was wanted and none came
        self._read = [0] * len(self._acceptance)  # selective rounds by drafter
        self._unread = RELEARN  # rounds since confidence was last read
        self._in_line = 0  # speculative rounds in a row that took the expected time

    def decide(self, history: Sequence[int]) -> Decision:
        """What to draft now. The same answer until the round is observed."""
        self._asked = self._clock()
        if self._decision is None or self._context != len(history):
            self._context = len(history)
            self._decision = self._next()
        return self._decision

    def begin(self) -> None:
        """A new answer begins, in the same conversation or with the same parts."""
        for acceptance in self._acceptance:
            acceptance.begin()
        self._ledger.begin()
        self._probes.begin(d for d in self._planner.beside if self._acceptance[d].first_rate() < SURE)
        self._hindsight.begin()
        self._outlook.begin()
        self._lull.end()
        self._flight, self._missed = False, 0

    def cut(self, drafter: int, confidence: Sequence[float]) -> int:
        """How many to verify; token j by `confidence[: j + 1]` alone."""
        rule = self._planner.rules.get(drafter)
        if rule is None or not self._outlook.reads(drafter):
            return len(confidence)
        return rule.cut([bin_of(c) for c in confidence])

    def observe(self, round: Round) -> None:
        """Learn what the round took and what was accepted."""
        now = self._clock()
        decision = self._decision
        assert decision is not None, "a round was observed that was never decided on"
        self._decision = None
        self._outlook.tick(judged=round.drafter is not None)
        if round.drafter is not None:
            self._lull.end()
        for acceptance in self._acceptance:
            acceptance.tick()
        if decision.choices and round.drafter is not None:
            self._drafted(round, decision, now - self._asked)
        elif round.agreement is not None:
            self._shadowed(round, decision, now - self._asked)
        else:
            self._plainly(round, decision, now)
        self._done = now

    def _next(self) -> Decision:
        context, probes = self._context, self._probes
        plain = self._costs.plain(context)
        if plain is None or not self._acceptance:
            return Decision((), Reason.WARMING_UP if self._acceptance else Reason.NO_DRAFTER, None, plain)
        if probes.timing > 0 or self._costs.timed(context) < WARM_UP:
            return Decision((), Reason.PROBE if self._outlook.plan else Reason.WARMING_UP, None, plain)
        plan, held = self._look(context), self._hindsight.length
        same = None if held else self._lull.decision(plan, self._room)
        if same is not None:
            return same
        if plan.choices or held:
            return self._draft(plan, plain)
        rounds = self._rest(range(len(self._acceptance)), hopeful=plan.reason is Reason.ACCEPTANCE)
        trial = self._planner.trial(plan, self._ledger.room) if probes.trying else ()
        if trial:
            return Decision(trial, Reason.PROBE, None, plain)
        return self._holding(plan, self._aside(plan.reason, plain), *rounds)

    def _draft(self, plan: Plan, plain: float) -> Decision:
        """A draft, if the ledger allows it."""
        probes, held = self._probes, self._hindsight.length
        wanted: tuple[Choice, ...] = (Choice(0, held),) if held else plan.choices
        sure = [c for c in wanted if c.drafter not in probes.doubted]
        free = self._planner.beside if sure else ()  # no longer, where another one drafts
        choices = tuple(c for c in wanted if c in sure or c.drafter in free)
        doubted = next((c.drafter for c in wanted if c.drafter in probes.doubted), None)
        others = [d for d in range(len(self._acceptance)) if all(c.drafter != d for c in choices)]
        if not held and self._unread >= RELEARN:
            choices = tuple(map(self._curious, choices))
        choices += self._planner.untried(d for d in others if d not in probes.doubted)
        if self._costs.guessed(self._context):
            choices = tuple(Choice(c.drafter, min(c.limit, FIRST_LENGTH)) for c in choices)
        afforded = self._planner.afforded(choices, self._room, probes.proven)
        reason = Reason.WAITING if self._missed > 1 else Reason.PAYS
        if not afforded:
            reason = Reason.LEDGER if choices else Reason.ACCEPTANCE
        if afforded and not (others and self._missed > 1):
            probes.drafting()
            decision = Decision(afforded, reason, None, plain, self._planner.unlikely(afforded))
            return self._holding(plan, decision, LONGEST, probes.drafting)
        if not afforded:  # as little as can be risked does not pay: a shadow token may raise what is believed
            others += [c.drafter for c in choices if c.drafter not in {*probes.proven, *others}]
        rounds = self._rest(others, hopeful=True)
        probes.shadow = probes.shadow if doubted is None or afforded else doubted
        return self._holding(plan, self._aside(reason, plain, afforded), *rounds)

    def _rest(self, drafters: Sequence[int], *, hopeful: bool) -> tuple[float, Callable[[], None]]:
        """A plain round: for how many more nothing is due, and what to do in those."""
        rounds = self._probes.resting(self._planner.looks(drafters), hopeful=hopeful)
        return rounds, partial(self._probes.pass_by, drafters, hopeful=hopeful)

    def _holding(
        self, plan: Plan, decision: Decision, rounds: float, passing: Callable[[], None]
    ) -> Decision:
        """The decision, which holds for some rounds if it is one to wait or to decode plainly."""
        idle = not decision.choices or decision.reason is Reason.WAITING
        if idle and self._flight and (decision.shadow is None or decision.beside):
            self._lull.hold(plan, decision, self._planner.risk(decision.choices), rounds, passing)
        return decision

    @property
    def _room(self) -> float:
        """What a draft may lose: one that is just afforded must be so when what is on its way has landed."""
        return self._ledger.room - self._flight * (self._planner.landing + EPSILON)

    def _aside(self, reason: Reason, plain: float, choices: tuple[Choice, ...] = ()) -> Decision:
        """A shadow token where one is due and can be afforded, else these choices or plain decoding.

        One that takes time is of no use where a draft could not be afforded after it.
        """
        drafter, planner, room = self._probes.shadow, self._planner, self._ledger.room
        beside = drafter in planner.beside
        if drafter is None or planner.price(drafter) + (0.0 if beside else planner.least(drafter)) > room:
            return Decision(choices, reason, None, plain)
        return Decision((), Reason.PROBE, drafter, plain, beside=beside)

    def _look(self, context: int) -> Plan:
        """The plan now."""
        before, plan = self._outlook.plan, self._outlook.now(context, self._asked)
        if plan is not before and self._compares:
            self._hindsight.price(self._planner.rounds(0))
        return plan

    def _curious(self, choice: Choice) -> Choice:
        """With the confidence read, to learn what it is worth."""
        known = self._acceptance[choice.drafter].told or not self._read[choice.drafter]
        return Choice(choice.drafter, choice.limit, selective=True) if known else choice

    def _plainly(self, round: Round, decision: Decision, now: float) -> None:
        """A round without a draft."""
        plain, flight = self._costs.plain(self._context), self._flight
        wanted, shadow = [choice.drafter for choice in decision.choices], decision.shadow
        patient = decision.unlikely or self._missed > 1
        landing = flight and ((shadow is not None and not decision.beside) or (bool(wanted) and not patient))
        steady = flight and not landing
        if wanted and not landing:
            self._missed += 1
            if self._missed in REVIEWS:
                self._outlook.stale()
        for drafter in () if landing else wanted if shadow is None else [shadow]:
            self._acceptance[drafter].missed()
        if shadow is not None and not landing and not decision.beside:  # there, it is asked until it has one
            self._looked_aside(shadow, None)
        if steady and not round.finish_reason and (plain is None or self._asked - self._done <= plain / 2):
            self._time_plain(now - self._done)
        if self._probes.timing and not wanted:
            self._probes.timing -= steady or decision.reason is not Reason.PROBE
        self._flight = not landing and (not wanted or decision.unlikely or self._missed > 1)
        if plain is None:
            return
        if steady or landing:
            steps = 1.0 if steady else self._ledger.landed((now - self._done) / plain)
        else:
            one = max(self._costs.verify(1, self._context) or plain, plain)
            steps = min(now - self._asked, PAUSE * one) / plain
            if self._flight and not flight:
                steps = self._ledger.ahead(steps, one / plain)
        self._enter(round, steps)

    def _time_plain(self, seconds: float) -> None:
        plain = self._costs.plain(self._context)
        self._costs.saw_plain(self._context, seconds)
        if plain is not None and abs(seconds / plain - 1) > UNSURE:
            self._probes.retime()

    def _shadowed(self, round: Round, decision: Decision, seconds: float) -> None:
        """A token was drafted and not verified."""
        plain = self._costs.plain(self._context)
        assert round.drafter is not None and round.agreement is not None and plain is not None
        steps = expected = 1 + self._planner.price(round.drafter)
        if not (decision.beside and self._flight):
            steps = self._ledger.ahead(min(seconds / plain, 2 * PAUSE), expected)
        self._enter(round, steps)
        self._acceptance[round.drafter].saw_shadow(round.agreement, round.confidence)
        self._looked_aside(round.drafter, round.agreement)
        self._flight = True

    def _looked_aside(self, drafter: int, agreement: float | None) -> None:
        self._probes.shadowed(drafter, agreement)
        self._outlook.stale()

    def _drafted(self, round: Round, decision: Decision, seconds: float) -> None:
        """A round with a draft."""
        drafter = round.drafter
        assert drafter is not None
        choice = next(c for c in decision.choices if c.drafter == drafter)
        landed, self._flight, self._missed = self._flight, False, 0
        if landed and not round.drafted:
            return self._landed(drafter, round, seconds)
        read = choice.selective and not round.nodes
        self._read[drafter] += read
        if not read:
            self._unread += 1
        elif self._read[drafter] >= LEARN:
            self._unread = 0
        for other in decision.choices[: decision.choices.index(choice)]:
            self._acceptance[other.drafter].missed()
        self._acceptance[drafter].saw(round, choice.limit)
        often = self._acceptance[drafter].had > OFTEN
        self._probes.drafted(drafter, accepted=round.accepted > 0, often=often)
        self._charge(round, choice, seconds)
        if self._probes.trying:
            self._probes.trying -= 1
            self._outlook.stale()

    def _landed(self, drafter: int, round: Round, seconds: float) -> None:
        """What was found is drafted again in the next round; the token on its way told of it."""
        self._enter(round, self._ledger.landed(seconds / (self._costs.plain(self._context) or seconds)))
        if round.agreement is not None:
            self._acceptance[drafter].compared(round.agreement, round.confidence)
            if self._probes.compared(drafter, round.agreement):
                self._outlook.stale()

    def _enter(self, round: Round, steps: float) -> None:
        """In the books: what a round brought and took."""
        self._ledger.enter(len(round.tokens), steps)
        if self._compares:
            rejected = round.drafted > 0 and len(round.tokens) > round.accepted < round.drafted
            chance = self._acceptance[0].next(round) if round.agreement is None else round.agreement
            self._hindsight.enter(round.accepted, rejected=rejected, next_right=chance, steps=steps)

    def _charge(self, round: Round, choice: Choice, seconds: float) -> None:
        """Learn what the round took, and enter it in the ledger."""
        context, kind = self._context, (choice.drafter, round.proposed, round.nodes or round.drafted)
        plain, expected = self._costs.plain(context), self._costs.round(*kind, context)
        assert plain is not None and expected is not None
        read = choice.selective and not round.nodes
        expected += read * (self._costs.host(context) or 0.0)
        counted, late = seconds, seconds > CLAMP * expected
        if late:
            counted = min(seconds, PAUSE * expected) if self._in_line > 1 else seconds
            self._outlook.stale()
        self._in_line = 0 if late else self._in_line + 1
        self._costs.saw_round(*kind, context, seconds, selective=read)
        self._enter(round, counted / plain)
