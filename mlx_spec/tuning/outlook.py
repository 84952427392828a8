"""When to make a plan anew: where it is old or the text has changed, and never for much of the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlx_spec.tuning.acceptance import Acceptance
from mlx_spec.tuning.costs import bucket
from mlx_spec.tuning.plan import Plan, Planner

LOOK = 16  # rounds after which the plan is made anew ...
QUIET = 0.25  # ... of which one counts so much in which no draft token was judged
MOVED = 0.4  # logits of drift of a drafter that it uses, after which it is made anew at once
RISEN = 0.1  # logits by which one that it does without must be right more often, for the same
SOLVE, LAST_SOLVE = 32, 256  # rounds after which it is worked out anew what confidence is worth
PLANNING = 0.0025  # of the time, for plans from new costs; following the text is cheap and always done
SOLVING = 0.0005  # of the time, for what confidence is worth


class Allowance:
    """Lets something be done while it takes no more than a share of the time since it was done last."""

    def __init__(self, share: float) -> None:
        self._share, self._rested = share, 0.0

    def grants(self, busy: float) -> bool:
        """Whether it may be done again after so many seconds of rounds."""
        return busy >= self._rested

    def spent(self, seconds: float, busy: float) -> None:
        """It took so long."""
        self._rested = busy + seconds / self._share

    def forgive(self) -> None:
        """Whatever it took, it may be done now."""
        self._rested = 0.0


class Outlook:
    """The plan of one sequence."""

    def __init__(
        self, planner: Planner, acceptance: Sequence[Acceptance], clock: Callable[[], float]
    ) -> None:
        self.plan: Plan | None = None
        self._planner, self._acceptance, self._clock = planner, acceptance, clock
        self._planning, self._solving = Allowance(PLANNING), Allowance(SOLVING)
        self._busy = 0.0  # seconds that rounds took: others may have their turns between them
        self._age = 0.0
        self._since_solve, self._solve_gap = 0, SOLVE // 2
        self._levels: list[float] = []  # by drafter, when the plan was made
        self._bucket = -1  # of context, when the plan was made
        self._other = False  # another text has begun since, or is seen to be another
        self._judged = False  # a draft or shadow token was, since the text was last compared with the plan's

    def begin(self) -> None:
        """Another text."""
        self._planner.begin()
        self._other, self._since_solve, self._solve_gap = True, 0, SOLVE // 2
        self._planning.forgive()

    def tick(self, seconds: float, rounds: int = 1, *, judged: bool) -> None:
        """Rounds took so long; `judged`: in each a draft token was compared with the target's."""
        self._busy += seconds
        self._judged = self._judged or judged
        self._age += rounds * (1 if judged else QUIET)
        self._since_solve += rounds

    def stale(self) -> None:
        """Something was seen that may change the plan."""
        self._age = LOOK

    def moved(self) -> None:
        """Something was seen that changes what is expected of this answer, and nothing else."""
        self._other = True

    def reads(self, drafter: int) -> bool:
        """Whether the plan has the drafter's confidence decide what to verify."""
        return self.plan is not None and any(c.selective for c in self.plan.choices if c.drafter == drafter)

    def wants(self, drafter: int) -> bool:
        """Whether the drafter pays by the plan."""
        return self.plan is not None and any(c.drafter == drafter for c in self.plan.choices)

    def now(self, context: int) -> Plan:
        """The plan for a round that begins now."""
        plan = self.plan
        old = plan is None or self._age >= LOOK or (self._other and bucket(context) != self._bucket)
        if plan is None or (old and self._planning.grants(self._busy)):
            return self._look(context)
        if self._other or self._judged:
            self._judged, levels = False, self._levels_now()
            if self._other or self._changes(plan, levels):
                self.plan = plan = self._planner.adjust()
                self._other, self._levels = False, levels
        return plan

    def _levels_now(self) -> list[float]:
        return [acceptance.level for acceptance in self._acceptance]

    def _changes(self, plan: Plan, levels: Sequence[float]) -> bool:
        """Whether a drafter is right more often than it was, or one that the plan uses is less often.

        What was not right often enough when the plan was made may be so when it is a little better.
        """
        used = {choice.drafter for choice in plan.choices}
        moved = [now - then for now, then in zip(levels, self._levels, strict=True)]
        return any(abs(by) > MOVED if drafter in used else by > RISEN for drafter, by in enumerate(moved))

    def _look(self, context: int) -> Plan:
        began = self._clock()
        again = self._since_solve >= self._solve_gap and self._solving.grants(self._busy)
        self.plan = plan = self._planner.look(context, again=again)
        self._levels, self._age = self._levels_now(), 0
        self._other, self._bucket = False, bucket(context)
        (self._solving if again else self._planning).spent(self._clock() - began, self._busy)
        if again:
            used = any(choice.selective for choice in plan.choices)
            self._since_solve, self._solve_gap = 0, SOLVE if used else min(2 * self._solve_gap, LAST_SOLVE)
        return plan
