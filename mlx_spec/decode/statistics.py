"""Counts, times and the gain of an answer, from its rounds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from mlx_spec.types import Cost, FinishReason, Reason, Round


@dataclass(frozen=True)
class Positions:
    """Draft tokens of one drafter by their position in a draft."""

    drafted: tuple[int, ...] = ()  # [i]: rounds that drafted more than i tokens
    accepted: tuple[int, ...] = ()  # [i]: rounds that had more than i accepted

    def plus(self, more: Positions) -> Positions:
        return Positions(_sums([self.drafted, more.drafted]), _sums([self.accepted, more.accepted]))


@dataclass(frozen=True)
class Statistics:
    """Counts and times of an answer."""

    prompt_tokens: int = 0
    reused_tokens: int = 0  # of the prompt, found in the cache
    drafter_cold: int = 0  # reused tokens that the drafter has not processed: its acceptance is lower
    # Of the prompt, known before and read again: their caches were dropped for others, or have no rewind
    # point where the prompt goes on.
    reread_evicted: int = 0
    reread_no_place: int = 0
    generated_tokens: int = 0
    rounds: int = 0
    batch_size_sum: int = 0  # sequences in the passes of these rounds, added up
    speculative_rounds: int = 0  # rounds that drafted
    speculative_tokens: int = 0  # generated in speculative rounds
    drafted: int = 0
    accepted: int = 0
    ahead_hits: int = 0  # drafts that were made while the pass before them ran
    ahead_misses: int = 0  # drafts whose history was not among the outcomes that were drafted ahead
    by_drafter: Mapping[str, Positions] = field(default_factory=dict)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0  # of all rounds, without the time that the reader of the answer takes
    compared_tokens: int = 0  # tokens of the rounds whose cost in plain tokens is known
    costs: Mapping[Hashable, tuple[int, Cost]] = field(default_factory=dict)  # rounds by shape, and the cost
    finish_reason: FinishReason | None = None  # None while it goes on, or if interrupted
    reasons: Mapping[Reason, int] = field(default_factory=dict)  # tokens by the reason of their round
    exact_tokens: int = 0  # from the first one on, as many as have the bits of plain decoding
    doubt: str | None = None  # why the token after them may not have them; None if all have

    @property
    def tokens_per_second(self) -> float:
        """Return the generated tokens by decode seconds; 0 before there are any."""
        return self.generated_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def batch_size(self) -> float:
        """Return the sequences that shared a pass, on average; 0 before there were any."""
        return self.batch_size_sum / self.rounds if self.rounds else 0.0

    @property
    def acceptance_length(self) -> float:
        """Return the tokens of a speculative round, the drawn one included; 0 if there was none."""
        return self.speculative_tokens / self.speculative_rounds if self.speculative_rounds else 0.0

    @property
    def read_tokens(self) -> int:
        return self.prompt_tokens - self.reused_tokens

    @property
    def reread_tokens(self) -> int:
        """Return the tokens of the prompt that were known before and read again."""
        return self.reread_evicted + self.reread_no_place

    @property
    def reread_words(self) -> str | None:
        """Return why tokens were read again, as users read it; None if none were."""
        reasons = {"their caches were not in memory": self.reread_evicted}
        reasons["no place to go back to"] = self.reread_no_place
        return "; ".join(reason for reason, tokens in reasons.items() if tokens) or None

    @property
    def prompt_per_second(self) -> float | None:
        """Return how many prompt tokens were read a second; None before any were."""
        return self.read_tokens / self.prefill_seconds if self.prefill_seconds > 0 else None

    @property
    def gain(self) -> float | None:
        """Return the speed as a multiple of plain decoding, the one that users see first.

        It is `known_gain`, or, while that is None, the bound `gain_at_least`. So it is never too high because
        little was timed. None if the costs of some rounds are not known at all.
        """
        return self.gain_at_least if self.known_gain is None else self.known_gain

    @property
    def known_gain(self) -> float | None:
        """Return the speed as a multiple of plain decoding: exactly 1 if nothing was drafted.

        Plain decoding has one row a pass here. If the passes of this answer had two, its plain tokens count
        as slower. The gain does not depend on the load of the machine. None if it may be wrong by more than
        15 %, or by more than the gain itself.
        """
        if not self.drafted and all(cost.plain_tokens == 1 for _, cost in self.costs.values()):
            return 1.0 if self.generated_tokens else None
        costs = [(rounds * cost.plain_tokens, cost.error) for rounds, cost in self.costs.values()]
        if not (total := sum(cost for cost, _ in costs)) or self.compared_tokens < self.generated_tokens:
            return None
        gain, error = self.compared_tokens / total, sum(cost * error for cost, error in costs) / total
        return gain if error <= min(0.075, abs(math.log(gain))) else None  # two deviations are 15 %

    @property
    def gain_at_least(self) -> float | None:
        """Return a bound that the gain hardly falls below: two deviations of the costs that are known so far.

        It does not depend on the load either. None if the costs of some rounds are not known at all.
        """
        return self._gain_with(2.0)

    @property
    def gain_at_most(self) -> float | None:
        """Return the bound above the gain. No round takes less time than a plain token."""
        return self._gain_with(-2.0)

    def _gain_with(self, deviations: float) -> float | None:
        costs = [
            (rounds, max(cost.plain_tokens * math.exp(deviations * cost.error), 1.0))
            for rounds, cost in self.costs.values()
        ]
        total = sum(rounds * cost for rounds, cost in costs)
        is_known = total and self.compared_tokens >= self.generated_tokens
        return self.compared_tokens / total if is_known else None

    @property
    def gain_words(self) -> str | None:
        """Return the gain as users read it, or its bounds while it is not known; None without any."""
        if (gain := self.known_gain) is None:
            return self._bound_words()
        if gain == 1:
            return "as fast as plain"
        multiple = f"{gain:.2f}" if 0.95 < gain < 1.095 else f"{gain:.1f}"
        return f"{multiple} × faster" if gain > 1 else f"{multiple} × plain speed"

    def _bound_words(self) -> str | None:
        low, high = self.gain_at_least, self.gain_at_most
        if low is None or high is None:
            return None
        low, high = math.floor(10 * low) / 10, math.ceil(10 * high) / 10
        return f"at least {low:.1f} × faster" if low > 1 else f"{low:.1f} to {high:.1f} × plain speed"

    @property
    def tokens_per_pass(self) -> float | None:
        """Return the generated tokens by rounds, which no load changes; None before there are any."""
        return self.generated_tokens / self.rounds if self.rounds else None

    @property
    def reason(self) -> Reason:
        """Return the reason of most tokens; PAYS or LOST by the gain if drafts gave any.

        A drafter that failed is always named.
        """
        if Reason.FAILED in self.reasons:
            return Reason.FAILED
        reason = max(self.reasons, key=self.reasons.__getitem__, default=Reason.NO_DRAFTER)
        is_judged = reason in (Reason.PAYS, Reason.LEARNING)
        if self.accepted and any(reason.is_on for reason in self.reasons):
            is_judged = reason is not Reason.FIXED
        if not (self.drafted and is_judged):
            return reason
        if (gain := self.known_gain) is not None:
            return Reason.PAYS if gain > 1 else Reason.LOST
        return Reason.PAYS if (self.gain_at_least or 0.0) > 1 else Reason.LEARNING

    @property
    def reason_words(self) -> str:
        """Return the reason as users read it, and why other tokens were not drafted."""
        off = {reason: count for reason, count in self.reasons.items() if not reason.is_on}
        count = sum(self.reasons.values()) - sum(off.values())
        if not (self.reason.is_on and off and count):
            return self.reason.words
        why = max(off, key=off.__getitem__).words.replace("off, ", "off: ", 1)
        return f"on for {count} of {sum(self.reasons.values())} tokens; else {why}"

    @property
    def exact(self) -> bool:
        """Return True if every token has the bits of plain decoding, or is in single precision."""
        return self.doubt is None

    @property
    def exact_words(self) -> str:
        """Return what is known about the bits of the tokens, as users read it."""
        if self.doubt is None:
            return "every token exact"
        return f"exact up to token {self.exact_tokens}, then likely: {self.doubt}"

    @property
    def drafted_at(self) -> tuple[int, ...]:
        """Return by position how many rounds drafted a token there, with any drafter."""
        return _sums([positions.drafted for positions in self.by_drafter.values()])

    @property
    def accepted_at(self) -> tuple[int, ...]:
        """Return by position how many rounds had a token accepted there, with any drafter."""
        return _sums([positions.accepted for positions in self.by_drafter.values()])

    @property
    def draft_length(self) -> int:
        """Return the most frequent draft length of speculative rounds; 0 if there were none."""
        longer = (*self.drafted_at[1:], 0)
        exactly = [a - b for a, b in zip(self.drafted_at, longer, strict=False)]
        return exactly.index(max(exactly)) + 1 if exactly else 0

    def as_dict(self) -> dict[str, Any]:
        """Return all figures by name, ready for JSON. All programs use these names."""
        by_drafter = {
            name: {"drafted_at": list(counts.drafted), "accepted_at": list(counts.accepted)}
            for name, counts in self.by_drafter.items()
        }
        return {
            **{name: vars(self)[name] for name in SUMMED},
            **{name: getattr(self, name) for name in DERIVED},
            "by_drafter": by_drafter,
            "speculation": "on" if self.reason.is_on else "off",
            "reason": self.reason.value,
        }

    def without_prompt(self) -> Statistics:
        """Return the figures without the tokens of the prompt, which another answer to it counts."""
        return replace(
            self, prompt_tokens=0, reused_tokens=0, drafter_cold=0, reread_evicted=0, reread_no_place=0
        )

    def plus(self, round: Round, seconds: float) -> Statistics:
        """Add a round, for which the caller waited `seconds`; the first one may include prefill."""
        prefill = max(seconds - round.seconds, 0.0) if not self.rounds else 0.0
        cost, count = round.cost, len(round.tokens)
        speculative, doubt = round.drafted > 0, self.doubt or round.doubt
        return replace(
            self,
            exact_tokens=self.exact_tokens + count * (doubt is None),
            doubt=doubt,
            generated_tokens=self.generated_tokens + count,
            rounds=self.rounds + 1,
            batch_size_sum=self.batch_size_sum + round.batch_size,
            speculative_rounds=self.speculative_rounds + speculative,
            speculative_tokens=self.speculative_tokens + count * speculative,
            drafted=self.drafted + round.drafted,
            accepted=self.accepted + round.accepted,
            ahead_hits=self.ahead_hits + (round.ahead is True),
            ahead_misses=self.ahead_misses + (round.ahead is False),
            by_drafter=self._positions(round),
            prefill_seconds=self.prefill_seconds + prefill,
            decode_seconds=self.decode_seconds + round.seconds,
            compared_tokens=self.compared_tokens + (count if cost else 0),
            costs=_merged(self.costs, {cost.shape: (1, cost)} if cost else {}),
            finish_reason=round.finish_reason,
            reasons={**self.reasons, round.reason: self.reasons.get(round.reason, 0) + count},
        )

    def _positions(self, round: Round) -> Mapping[str, Positions]:
        if round.source is None:
            return self.by_drafter
        before = self.by_drafter.get(round.source, Positions())
        now = Positions((1,) * round.drafted, (1,) * round.accepted)
        return {**self.by_drafter, round.source: before.plus(now)}


def source_words(source: str) -> str:
    """Return the words that users read for a source. All drafters with a model are "drafter"."""
    others = {
        "lookup": "copied from the text",
        "earlier": "from earlier answers",
        "prediction": "copied from the prediction",
    }
    return {"grammar": "forced by the format", **others}.get(source, "drafter")


# The fields of `Statistics` that are counts and times, and its properties that are figures.
SUMMED = [name for name, value in vars(Statistics()).items() if isinstance(value, int | float)]
DERIVED = [
    name for name, member in vars(Statistics).items() if isinstance(member, property) and name != "reason"
]


def added(answers: Sequence[Statistics]) -> Statistics:
    """Return the sums over several answers."""
    if not answers:
        return Statistics()
    by_drafter: dict[str, Positions] = {}
    reasons, costs = Counter[Reason](), dict[Hashable, tuple[int, Cost]]()
    for answer in answers:
        for drafter, positions in answer.by_drafter.items():
            by_drafter[drafter] = by_drafter.get(drafter, Positions()).plus(positions)
        reasons.update(answer.reasons)
        costs = _merged(costs, answer.costs)
    sums = {name: sum(vars(answer)[name] for answer in answers) for name in SUMMED}
    doubt = next((answer.doubt for answer in answers if answer.doubt), None)
    return replace(answers[-1], by_drafter=by_drafter, reasons=reasons, costs=costs, doubt=doubt, **sums)


def _merged(
    costs: Mapping[Hashable, tuple[int, Cost]], newer: Mapping[Hashable, tuple[int, Cost]]
) -> dict[Hashable, tuple[int, Cost]]:
    """Return the sums of the rounds by shape, each with the newer cost."""
    return {**costs, **{shape: (costs.get(shape, (0,))[0] + n, cost) for shape, (n, cost) in newer.items()}}


def _sums(counts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the sums by position; shorter counts end in zeros."""
    return tuple(sum(position) for position in zip_longest(*counts, fillvalue=0))
