"""What one request brings to draft from: text that its grammar forces, and what it predicts of the answer.

Such drafts cost no pass of a drafter. They come first where they are worth it, which is known from what
rounds took and brought; all other rounds are those of the pair's own policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mlx_spec.drafters.forced import Forced
from mlx_spec.drafters.legal import Legal
from mlx_spec.drafters.prediction import Prediction
from mlx_spec.grammar import Grammar, Matcher
from mlx_spec.reuse import Decoding
from mlx_spec.tuning.costs import MAX_DRAFT_TOKENS
from mlx_spec.tuning.fixed import Fixed
from mlx_spec.types import Choice, Decision, Drafter, DraftLengthPolicy, Reason, Round, Target

KEEP = 0.9  # of what was seen of an extra drafter, a round of it
KEEP_OTHERS = 0.95  # of what was seen of the other rounds, one of them
TRUST = 6  # rounds that are believed to pay before others were seen
LEAST = 2.5  # other rounds, after which their speed counts
FIRST_PAUSE, LAST_PAUSE = 16, 1024  # offers that are passed over before the next try of what did not pay
TRY = 2  # tokens of such a try


class Offering(Protocol):
    """A drafter that says beforehand how much it has."""

    def available(self, history: Sequence[int]) -> int:
        """The most tokens that it would draft after `history`."""
        ...


@dataclass(frozen=True)
class Offered(Decoding):
    """The parts of one sequence for one request; `names` are those of its last drafters."""

    names: tuple[str, ...] = ()


def offered(
    decoding: Decoding,
    prompt: Sequence[int],
    *,
    grammar: Grammar | None = None,
    prediction: Sequence[int] = (),
) -> Offered:
    """`decoding` with what a request with this grammar and predicted tokens brings to draft from.

    The drafters of `decoding` keep their indices. Where it is to draft nothing it still does not.
    """
    policy, prompt_length = decoding.policy, len(prompt)
    disabled = isinstance(policy, Fixed) and policy.decide(prompt).reason is Reason.DISABLED
    if disabled or (grammar is None and not prediction):
        return Offered(decoding.target, decoding.drafters, policy)
    drafters, extras = decoding.drafters, list[Extra]()
    matcher = None if grammar is None else grammar.matcher(prompt)
    if matcher is not None:
        drafters = tuple(Legal(drafter, matcher, prompt_length) for drafter in drafters)
        forced = Forced(matcher, prompt_length)
        extras.append(Extra("grammar", forced, forced, len(drafters), Worth(right=20.0, wrong=0.1)))
    if prediction:
        drafter = Prediction(prediction, prompt)
        judged = _judged(drafter, matcher, prompt_length)
        place = len(drafters) + len(extras)
        extras.append(Extra("prediction", drafter, judged, place, Worth(right=3.0, wrong=1.0)))
    return Offered(
        decoding.target,
        (*drafters, *(extra.drafter for extra in extras)),
        Extended(policy, decoding.target, extras),
        tuple(extra.name for extra in extras),
    )


def _judged(drafter: Drafter, matcher: Matcher | None, prompt_length: int) -> Drafter:
    return drafter if matcher is None else Legal(drafter, matcher, prompt_length)


@dataclass
class Worth:
    """What drafts of one kind were seen to bring and to take. Old rounds count less."""

    right: float  # tokens accepted, a prior included
    wrong: float  # tokens rejected, where the ones before were accepted

    def __post_init__(self) -> None:
        self._unblamed = TRUST  # rounds left without anything to compare with, as long as nothing is rejected
        self._seconds = np.zeros(MAX_DRAFT_TOKENS + 1)  # of rounds, by draft tokens
        self._rounds = np.zeros(MAX_DRAFT_TOKENS + 1)

    @property
    def trusted(self) -> bool:
        """Whether to draft although nothing is known of other rounds."""
        return self._unblamed > 0

    def saw(self, round: Round) -> None:
        """A round of such a draft. One that was cut by a stop token rejected nothing."""
        rejected = round.accepted < min(round.drafted, len(round.tokens))
        self._unblamed = 0 if rejected else self._unblamed - 1
        self.right = KEEP * self.right + round.accepted
        self.wrong = KEEP * self.wrong + rejected
        self._seconds[round.drafted] = KEEP * self._seconds[round.drafted] + round.seconds
        self._rounds[round.drafted] = KEEP * self._rounds[round.drafted] + 1.0

    def best(self, most: int, plain: float) -> tuple[int, float]:
        """The number of draft tokens, 1 to `most`, that brings the most tokens a second; both.

        `plain` is the time of a round without a draft. What a size takes that was not seen lies between those
        that were, and is hoped to be no more than the largest of them.
        """
        sizes = np.arange(most + 1)
        seen = np.flatnonzero(self._rounds)
        seconds = np.interp(sizes, [0, *seen], [plain, *(self._seconds[seen] / self._rounds[seen])])
        rate = self.right / (self.right + self.wrong)
        speeds = np.cumsum(rate**sizes)[1:] / seconds[1:]
        best = int(speeds.argmax())
        return best + 1, float(speeds[best])


@dataclass
class Extra:
    """A drafter of one request."""

    name: str
    source: Offering
    drafter: Drafter
    place: int  # its index among the drafters
    worth: Worth
    pause: int = FIRST_PAUSE
    passed: int = 0  # offers passed over since the last round of it

    def limit(self, history: Sequence[int], flying: int, others: tuple[float, float] | None) -> int:
        """How many tokens to draft now; 0: none. The first `flying` tokens are on their way already.

        `others` are the tokens a second and the seconds of the other rounds, where they are known.
        """
        most = min(self.source.available(history) - flying, MAX_DRAFT_TOKENS)
        if most < 1:
            return 0
        if others is None:
            return most + flying if self.worth.trusted else 0
        length, speed = self.worth.best(most, others[1])
        if speed > others[0]:
            self.passed, self.pause = 0, FIRST_PAUSE
            return length + flying
        self.passed += 1
        if self.passed < self.pause:
            return 0
        self.passed, self.pause = 0, min(2 * self.pause, LAST_PAUSE)
        return min(most, TRY) + flying


class Extended:
    """A policy that asks the extra drafters of a request first, and another policy about all other rounds.

    The other policy never hears of a round that it did not decide on.
    """

    def __init__(self, policy: DraftLengthPolicy, target: Target, extras: Sequence[Extra]) -> None:
        self._policy, self._target, self._extras = policy, target, extras
        self._asked: Extra | None = None  # the extra that the next round is of
        self._plain: float | None = None  # seconds of a plain token
        self._tokens = self._seconds = self._rounds = 0.0  # of the other rounds

    def begin(self) -> None:
        """As the other policy has it."""
        self._policy.begin()

    def decide(self, history: Sequence[int]) -> Decision:
        """An extra drafter that is worth it, or what the other policy says."""
        flying = min(self._target.on_trial, 1)
        for extra in self._extras:
            limit = extra.limit(history, flying, self._others())
            if limit:
                self._asked = extra
                choice = Choice(extra.place, min(limit, MAX_DRAFT_TOKENS))
                return Decision((choice,), Reason.PAYS, None, self._plain)
        self._asked = None
        decision = self._policy.decide(history)
        self._plain = decision.plain_seconds
        return decision

    def cut(self, drafter: int, confidence: Sequence[float]) -> int:
        """As the other policy has it: extra drafters are not selective."""
        return self._policy.cut(drafter, confidence)

    def observe(self, round: Round) -> None:
        """Learn what an extra is worth, or let the other policy learn."""
        if self._asked is None:
            self._tokens = KEEP_OTHERS * self._tokens + len(round.tokens)
            self._seconds = KEEP_OTHERS * self._seconds + round.seconds
            self._rounds = KEEP_OTHERS * self._rounds + 1.0
            self._policy.observe(round)
        elif round.drafter == self._asked.place and round.drafted:
            self._asked.worth.saw(round)

    def _others(self) -> tuple[float, float] | None:
        """Tokens a second and seconds of a round of the other policy; None: too few were seen."""
        if self._rounds < LEAST:
            return None if self._plain is None else (1 / self._plain, self._plain)
        plain = self._plain or self._seconds / self._rounds
        return self._tokens / self._seconds, plain
