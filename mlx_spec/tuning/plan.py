"""From costs and acceptance to what the next rounds should do."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mlx_spec.tuning.acceptance import Acceptance
from mlx_spec.tuning.costs import Costs
from mlx_spec.tuning.probes import Look
from mlx_spec.tuning.programme import (
    Action,
    Drafting,
    Rule,
    brought,
    fitted,
    hopeless,
    selective,
    steady,
)
from mlx_spec.types import Choice, Reason

BEGIN, STAY = 1.01, 0.99  # of plain decoding's rate: what speculation must promise to begin, and to go on
STEPS, CLOSE = 3, 0.01  # towards the best rate: at most so many, or until one changes it by less than this
FIRST_LENGTH = 2  # tokens drafted first where little is known: a wrong guess costs little
UNPROVEN = 0.75  # plain steps that a longer first draft of an answer may lose
TRIES = 8  # rounds that a drafter gets behind another that pays, whatever is believed of it ...
HOPE = 0.3  # ... unless fewer first tokens of this answer are expected to pass
LIKELY = 0.5  # chance of no draft at all, above which plain decoding goes on one token ahead
PERFECT = 0.98  # acceptance, at best
WORTH, WORTH_SHARE = 0.01, 0.005  # tokens, and share of a round's, that reading confidence must promise


@dataclass(frozen=True)
class Plan:
    """What pays at one moment."""

    choices: tuple[Choice, ...]  # none: plain decoding
    reason: Reason
    actions: tuple[Action, ...]  # by drafter, whether it pays or not

    def best(self, plain: float) -> Choice:
        """What comes nearest to paying, even where nothing does."""
        drafter = max(range(len(self.actions)), key=lambda d: self.actions[d].value(1 / plain))
        return Choice(drafter, self.actions[drafter].limit)


@dataclass
class Planner:
    """Makes plans. Keeps what takes long to work out: what to verify by confidence, and its worth."""

    costs: Costs
    acceptance: Sequence[Acceptance]
    rules: dict[int, Rule] = field(default_factory=dict)  # by drafter
    _chosen: dict[int, Action] = field(default_factory=dict)  # what to do where confidence is read
    _worth: dict[int, float] = field(default_factory=dict)  # tokens a round that reading it brings
    _plain: float = 1.0  # seconds of a plain token
    _drafting: list[Drafting] = field(default_factory=list)
    _rounds: list[list[float]] = field(default_factory=list)
    _prices: list[float] = field(default_factory=list)  # by drafter: of a shadow token
    _hopeful: list[bool] | None = None  # by drafter; where that was asked since costs were looked at
    _rates: list[float] = field(init=False)  # by drafter: tokens a second that it and plain decoding bring
    _on: frozenset[int] = frozenset()  # drafters that pay

    def __post_init__(self) -> None:
        self._rates = [0.0] * len(self.acceptance)

    def begin(self) -> None:
        """Another text: what confidence was worth in the last one may not hold."""
        self._worth.clear()

    def look(self, context: int, *, again: bool) -> Plan:
        """The plan now. `again` works out anew what confidence is worth, which takes longer."""
        plain, verify = self.costs.plain(context), self.costs.verify_curve(context)
        assert plain is not None and verify is not None
        rows = [max(seconds, plain) for seconds in verify]  # no pass is faster than a pipelined one
        for acceptance in self.acceptance:
            acceptance.refresh()
        self._plain = plain
        self._drafting = [self._priced(d, rows, context) for d in range(len(self.acceptance))]
        self._rounds = [
            [1.0, *((d + v) / plain for d, v in zip(priced.draft[1:], rows[2:], strict=True))]
            for priced in self._drafting
        ]
        self._prices = [priced.draft[1] / plain for priced in self._drafting]
        self._hopeful = None
        if again:
            self._solve(context)
        return self.adjust()

    def adjust(self) -> Plan:
        """The plan of `look`, for a text that has become easier or harder since."""
        order, actions = self._ranked()
        self._on = frozenset(order)
        choices = tuple(Choice(d, actions[d].limit, actions[d].selective) for d in order)
        reason = Reason.PAYS if choices else self.why_not(range(len(self.acceptance)))
        return Plan(choices, reason, tuple(actions))

    def unlikely(self, choices: Sequence[Choice]) -> bool:
        """Whether none of them will have a draft, more often than not."""
        return math.prod(1 - self.acceptance[choice.drafter].had for choice in choices) > LIKELY

    def why_not(self, drafters: Iterable[int]) -> Reason:
        """Why none of them pays: COST when even drafts that are all accepted would not, else ACCEPTANCE."""
        if self._hopeful is None:
            rate = 1 / self._plain
            tokens = [brought(d, [PERFECT] * len(d.offered)) for d in self._drafting]
            perfect = [steady(d, t, rate).value(rate) for d, t in zip(self._drafting, tokens, strict=True)]
            self._hopeful = [value > BEGIN - 1 for value in perfect]
        return Reason.ACCEPTANCE if any(self._hopeful[d] for d in drafters) else Reason.COST

    def rounds(self, drafter: int) -> Sequence[float]:
        """Plain steps [K + 1] of a round by length; 0 is plain decoding."""
        return self._rounds[drafter]

    @property
    def landing(self) -> float:
        """Plain steps that are lost when a token on its way is waited for and nothing was begun behind it."""
        return self._drafting[0].verify[1] / self._plain - 1

    def price(self, drafter: int) -> float:
        """Plain steps that a shadow token takes, beside its own."""
        return self._prices[drafter]

    def least(self, drafter: int) -> float:
        """Plain steps that a draft of one token takes beside its own, when that is rejected."""
        return self._rounds[drafter][1] - 1

    def tells(self, drafter: int, room: float, landing: float) -> bool:
        """Whether a draft of one token, which tells as much as a shadow token, is expected to take less.

        It may lose `room` plain steps; `landing` are those that waiting for a token on its way takes.
        """
        least = self.least(drafter)
        expected = least + landing - self.acceptance[drafter].first_rate()
        return least <= room and expected < self._prices[drafter]

    def looks(self, drafters: Iterable[int]) -> dict[int, Look]:
        """What a shadow token takes and promises."""
        return {d: Look(self._prices[d], self.acceptance[d].first_rate()) for d in drafters}

    def untried(self, drafters: Iterable[int], room: Callable[[int], float]) -> tuple[Choice, ...]:
        """Drafters that have been judged too seldom to be believed not to pay; each may lose its `room`."""
        acceptance = self.acceptance
        few = [d for d in drafters if acceptance[d].tries < TRIES and acceptance[d].first_rate() > HOPE]
        limits = [_affordable(self._rounds[d][: FIRST_LENGTH + 1], room(d)) for d in few]
        return tuple(Choice(d, limit) for d, limit in zip(few, limits, strict=True) if limit)

    def afforded(
        self, choices: Sequence[Choice], room: Callable[[int], float], proven: Collection[int]
    ) -> tuple[Choice, ...]:
        """Choices that lose no more than the drafter's `room`, in plain steps, when nothing is accepted.

        Shorter ones that pay, if need be. Of a drafter that was not `proven` right in this answer no more
        than a few tokens, even where only more of them would pay.
        """
        shortened = [self._shortened(c, room(c.drafter), proven=c.drafter in proven) for c in choices]
        return tuple(choice for choice in shortened if choice.limit)

    def trial(self, plan: Plan, room: float) -> tuple[Choice, ...]:
        """What comes nearest to paying, a few tokens of it, if that loses no more than `room`."""
        best = plan.best(self._plain)
        steps = self._rounds[best.drafter][: min(best.limit, FIRST_LENGTH) + 1]
        limit = _affordable(steps, room)
        return (replace(best, limit=limit),) if limit else ()

    def _shortened(self, choice: Choice, room: float, *, proven: bool) -> Choice:
        steps = self._rounds[choice.drafter][: choice.limit + 1]
        most = room if proven else min(room, max(UNPROVEN, steps[: FIRST_LENGTH + 1][-1] - 1))
        if steps[-1] - 1 <= most:
            return choice
        if choice.selective:  # what is not sure of itself is not verified
            return replace(choice, limit=_affordable(steps, most))
        rates = self.acceptance[choice.drafter].rates()[: choice.limit]
        gained, reach, tokens = [0.0], 1.0, 1.0
        for rate, seconds in zip(rates, steps[1:], strict=True):
            reach *= rate
            tokens += reach
            gained.append(tokens - seconds)
        lengths = [length for length in range(1, len(steps)) if steps[length] - 1 <= most]
        best = max(lengths, key=gained.__getitem__, default=0)
        # One that does not pay by itself may open the way to those that do.
        opens = 0.0 if proven else rates[0] * max(gained[-1], 0.0)
        return replace(choice, limit=best if gained[best] + opens > 0 else 0)

    def _priced(self, drafter: int, rows: Sequence[float], context: int) -> Drafting:
        tokens = self.costs.draft_curve(drafter, context)
        assert tokens is not None
        return Drafting(tokens, rows, self.acceptance[drafter].lengths)

    def _solve(self, context: int) -> None:
        """What the confidence of each drafter is worth now, over the best length without it."""
        host = self.costs.host(context) or 0.0
        for drafter, acceptance in enumerate(self.acceptance):
            rate = max(self._rates[drafter], 1 / self._plain)
            now = np.array(acceptance.rates())
            if not acceptance.told or hopeless(self._drafting[drafter], now, host, rate):
                self._worth.pop(drafter, None)
                continue
            first, later = acceptance.histograms()
            chances = fitted(np.array(acceptance.by_confidence()), np.array(first), np.array(later), now)
            action, rule = selective(self._drafting[drafter], chances, host, rate)
            fixed = steady(self._drafting[drafter], brought(self._drafting[drafter], chances.blind()), rate)
            self._worth[drafter] = action.value(rate) - fixed.value(rate)
            self._chosen[drafter], self.rules[drafter] = action, rule

    def _ranked(self) -> tuple[list[int], list[Action]]:
        """The drafters that pay, the best first, and what to do with each, whether it pays or not.

        Each is judged by itself against plain decoding: what one brings where it has a draft says nothing
        against another where it has none.
        """
        tokens = [brought(d, a.rates()) for d, a in zip(self._drafting, self.acceptance, strict=True)]
        actions, rates = zip(*(self._alone(d, expected) for d, expected in enumerate(tokens)), strict=True)
        least = [(STAY if d in self._on else BEGIN) / self._plain for d in range(len(rates))]
        order = [d for d, rate in enumerate(rates) if rate > least[d]]
        order.sort(key=lambda d: -actions[d].tokens / actions[d].seconds)
        return order, list(actions)

    def _alone(self, drafter: int, tokens: Sequence[float]) -> tuple[Action, float]:
        """The best it can do, and the rate of tokens that this and plain decoding between bring."""
        rate = max(self._rates[drafter], 1 / self._plain)
        had = self.acceptance[drafter].had
        left = 1 - had
        # A pass that was not begun ahead must wait for the token on its way.
        lost = self._drafting[drafter].verify[1] - self._plain
        lost *= had if left > LIKELY else left * (1 - left**2)
        for _ in range(STEPS):
            action = self._best(drafter, tokens, rate)
            mixed = (had * action.tokens + left) / (had * action.seconds + left * self._plain + lost)
            last, rate = rate, max(mixed, 1 / self._plain)
            if abs(rate / last - 1) < CLOSE:
                break
        self._rates[drafter] = rate
        return action, mixed

    def _best(self, drafter: int, tokens: Sequence[float], rate: float) -> Action:
        fixed = steady(self._drafting[drafter], tokens, rate)
        worth = self._worth.get(drafter, 0.0)
        if worth < WORTH + WORTH_SHARE * fixed.tokens:
            return fixed
        chosen = self._chosen[drafter]
        value = fixed.value(rate) + worth
        return Action(chosen.limit, value + rate * chosen.seconds, chosen.seconds, selective=True)


def _affordable(steps: Sequence[float], room: float) -> int:
    """The longest draft of a round that loses no more than `room` plain steps; `steps` by length."""
    return max((length for length, s in enumerate(steps) if s - 1 <= room), default=0)
