"""Decoders that take turns, so that slow changes of the machine meet all of them alike.

Speeds of arms that run one after the other differ by more than what they are to show: the machine warms up,
and other programs come and go. Here every arm decodes a short burst, then the next one.

An answer is timed from the end of its prompt, all of it but the last token. A pipelined decoder begins the
second token before it gives the first, one that is about to draft does not: timed from the first token on,
the latter would pay for a pass that the former had for nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from mlx_spec.engine import prefill
from mlx_spec.pair import Pair
from mlx_spec.policy import Fixed
from mlx_spec.sequence import SequenceParts
from mlx_spec.types import Round

BURST = 8  # tokens


@dataclass(frozen=True)
class Arm:
    """A way to decode. What it opens keeps its policy from one prompt to the next."""

    name: str
    decoding: SequenceParts


@dataclass(frozen=True)
class Run:
    """One answer of an arm."""

    tokens: tuple[int, ...]
    seconds: float  # from the end of the prompt
    drafted: int
    accepted: int
    speculative: int  # rounds that drafted
    kept: int  # tokens of those rounds

    @property
    def tokens_per_second(self) -> float:
        """From the end of the prompt."""
        return len(self.tokens) / self.seconds


def arm(pair: Pair, name: str, num_draft_tokens: int | None) -> Arm:
    """With so many draft tokens of the pair's drafter: 0 is plain decoding, None the pair's own policy."""
    parts = pair.open()
    if num_draft_tokens is None:
        return Arm(name, parts)
    drafters = parts.drafters[:1] if num_draft_tokens else ()
    return Arm(name, SequenceParts(parts.target, drafters, Fixed(num_draft_tokens)))


def in_turns(pair: Pair, arms: Sequence[Arm], prompt: Sequence[int], count: int, start: int) -> list[Run]:
    """One answer of at most `count` tokens of each arm. Turn i begins with arm start + i."""
    going = [_Going(_rounds(pair, each, prompt, count)) for each in arms]
    turn = start
    while not all(each.done for each in going):
        for i in range(len(going)):
            going[(turn + i) % len(going)].go(BURST)
        turn += 1
    return [each.run() for each in going]


def _rounds(pair: Pair, each: Arm, prompt: Sequence[int], count: int) -> Iterator[Round]:
    """The rounds of an answer whose prompt has been read."""
    target, drafters = each.decoding.target, each.decoding.drafters
    target.rewind(0)
    rounds = pair.run(each.decoding, prompt, max_tokens=count)
    for _ in prefill(target, drafters, list(prompt)):
        pass
    return rounds


@dataclass
class _Going:
    """An answer under way."""

    rounds: Iterator[Round]
    done: bool = False
    seconds: float = 0.0
    seen: list[Round] = field(default_factory=list)

    def go(self, burst: int) -> None:
        """At least so many tokens more.

        What was queued beyond the last of them is waited for and counts, unless the answer has ended.
        """
        if self.done:
            return
        left = burst
        started = time.perf_counter()
        while left > 0 and not self.done:
            self.seen.append(next(self.rounds))
            left -= len(self.seen[-1].tokens)
            self.done = self.seen[-1].finish_reason is not None
        if not self.done:
            mx.synchronize()
        self.seconds += time.perf_counter() - started

    def run(self) -> Run:
        """What it came to."""
        speculative = [round for round in self.seen if round.drafted]
        return Run(
            tokens=tuple(token for round in self.seen for token in round.tokens),
            seconds=self.seconds,
            drafted=sum(round.drafted for round in speculative),
            accepted=sum(round.accepted for round in speculative),
            speculative=len(speculative),
            kept=sum(len(round.tokens) for round in speculative),
        )


@dataclass(frozen=True)
class Speed:
    """What the answers of one arm came to."""

    name: str
    tokens_per_second: float  # median of its answers
    gain: float  # to plain decoding of the same prompt in the same turns: median
    spread: tuple[float, float]  # quartiles of that
    accepted: float | None  # share of the draft tokens; None: it drafted none
    length: float | None  # tokens of a round that drafted
    other_text: int  # answers whose tokens are not those of plain decoding


def speeds(arms: Sequence[Arm], answers: Sequence[Sequence[Run]]) -> list[Speed]:
    """Of all arms, of which the first is plain decoding; `answers` holds one list of runs for each prompt."""
    long = [runs for runs in answers if all(len(run.tokens) > 1 for run in runs)]
    return [_speed(each.name, [(runs[0], runs[i]) for runs in long]) for i, each in enumerate(arms)]


def _speed(name: str, runs: Sequence[tuple[Run, Run]]) -> Speed:
    ratios = [own.tokens_per_second / plain.tokens_per_second for plain, own in runs]
    drafted, rounds = sum(own.drafted for _, own in runs), sum(own.speculative for _, own in runs)
    return Speed(
        name,
        statistics.median(own.tokens_per_second for _, own in runs) if runs else 0.0,
        statistics.median(ratios) if ratios else 0.0,
        _quartiles(ratios),
        sum(own.accepted for _, own in runs) / drafted if drafted else None,
        sum(own.kept for _, own in runs) / rounds if rounds else None,
        sum(own.tokens != plain.tokens for plain, own in runs),
    )


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return (values[0], values[0]) if values else (0.0, 0.0)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
