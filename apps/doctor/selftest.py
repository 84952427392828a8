"""The self-test of a loaded pair: lossless, how much is accepted, and what it gains, within a minute."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mlx_spec.apps.doctor.lossless import (
    OWN,
    Answer,
    Comparison,
    Watch,
    answered,
    compared,
    decoders,
    noise,
    plain,
)
from mlx_spec.apps.doctor.ties import Gap, allowed
from mlx_spec.apps.questions import Question, asked, long_text
from mlx_spec.apps.turns import Run, Speed, arm, in_turns, speeds
from mlx_spec.hub.progress import StageProgress
from mlx_spec.pair import GREEDY, Pair
from mlx_spec.sampling import Sampling
from mlx_spec.session import Statistics, added

SEEDED = Sampling(temperature=0.8, seed=11)
LEAST = 16  # tokens of an answer, however slow they come
SHARES = 0.55, 0.7  # of the time, by when greedy and seeded answers must be done
WAYS = 3.0  # times plain decoding that it takes to answer in all ways
PREFILL = 1 / 32  # of the time of a plain token, for one of a long prompt, at most


@dataclass(frozen=True)
class Effort:
    """How much to test."""

    seconds: float  # at most, short of what one prompt takes to be read
    questions: int
    tokens: int  # of an answer
    repeats: int  # of the questions, to measure speed


LONG, QUICK = Effort(60.0, 4, 64, 3), Effort(15.0, 2, 32, 1)


@dataclass(frozen=True)
class SelfTest:
    """What was found."""

    comparisons: tuple[Comparison, ...]
    left_out: int  # prompts for which the time was too short
    window: int | None  # tokens of sliding attention; None: there is none
    past_window: bool  # whether an answer went past it
    accepted: Statistics | None  # of fixed draft lengths; None: there is no drafter
    plain: Speed | None  # None: the answers are wrong
    gain: Speed | None  # of the pair's own policy; None: there is no drafter, or they are wrong
    noise: Gap | None  # the largest between caches without anything rolled back; None: not measured
    seconds: float

    @property
    def allowed(self) -> float:
        """Roundings up to which another token is a near-tie and another logit no defect."""
        return allowed(self.noise)

    @property
    def wrong(self) -> list[Comparison]:
        """Those with a defect."""
        return [each for each in self.comparisons if each.is_wrong(self.allowed)]

    @property
    def near_ties(self) -> list[Comparison]:
        """Those that part where rounding explains it."""
        parted = [each for each in self.comparisons if each.divergence is not None]
        return [each for each in parted if not each.is_wrong(self.allowed)]

    @property
    def blocks_differ(self) -> bool:
        """Whether passes over several rows give something else than one row at a time, rollback or not."""
        return self.noise is not None and not self.noise.within(self.noise.scale.limit)

    @property
    def passed(self) -> bool:
        """Whether all is well."""
        return bool(self.comparisons) and not self.wrong and not self.blocks_differ


def self_test(pair: Pair, window: int | None, effort: Effort, progress: StageProgress) -> SelfTest:
    """Test a pair whose target has sliding attention over `window` tokens, or none."""
    return _SelfTest(pair, window, effort, progress).run()


class _SelfTest:
    def __init__(self, pair: Pair, window: int | None, effort: Effort, progress: StageProgress) -> None:
        self._pair, self._window, self._effort, self._progress = pair, window, effort, progress
        self._started = time.monotonic()
        self._questions = asked(pair.text)[: effort.questions]
        self._token = 0.0  # seconds of plain decoding
        self._comparisons: list[Comparison] = []
        self._statistics: list[Statistics] = []  # of the pair's own drafts
        self._noise: Gap | None = None
        self._left_out, self._past_window = 0, False

    def run(self) -> SelfTest:
        count = self._warm_up()
        self._progress.stage("self-test: greedy text with drafts and without")
        for question in self._prompts(count):
            self._compare(question, GREEDY, count, self._until(SHARES[0]))
        self._progress.stage("self-test: seeded text with drafts and without")
        for question in self._questions[:2]:
            self._compare(question, SEEDED, count, self._until(SHARES[1]))
        found = self._result(None, None)
        if found.passed:
            self._progress.stage("self-test: speed, in turns")
            base, *others = self._speeds(count)
            found = self._result(base, others[0] if others else None)
        self._progress.end()
        return found

    def _until(self, share: float) -> Watch:
        return Watch(self._started + share * self._effort.seconds - time.monotonic())

    def _warm_up(self) -> int:
        """Read weights and compile kernels. Returns how long answers may be."""
        first = self._questions[0]
        for _ in range(2):
            answer = plain(self._pair, first, GREEDY, 8, self._until(SHARES[0]))
        timed = answer.statistics
        self._token = timed.decode_seconds / max(timed.generated_tokens, 1)
        cases = len(self._questions) + 4
        room = SHARES[1] * self._effort.seconds / (cases * WAYS * max(self._token, 1e-6))
        return min(max(int(room), LEAST), self._effort.tokens)

    def _prompts(self, count: int) -> Iterator[Question]:
        """The most telling first: the time may not be enough for all."""
        yield self._questions[0]
        room = self._pair.info.context_length
        if self._window is not None:
            across, past = self._window - count // 2, self._window + self._window // 2
            for length in (max(across, 2), past):
                if room is None or length + count <= room:
                    yield long_text(self._pair.text, length)
        yield from self._questions[1:]

    def _compare(self, question: Question, sampling: Sampling, count: int, watch: Watch) -> None:
        """Decode in all ways for which there is time."""
        reading = len(question.tokens) * PREFILL * self._token
        if watch.left <= reading:
            self._left_out += 1
            return
        expected = plain(self._pair, question, sampling, count, watch)
        if expected.error is not None or not expected.tokens:
            self._comparisons.append(compared(self._pair, question, "plain", sampling, expected, expected))
            return
        self._measure_noise(noise(self._pair, question, sampling, expected, watch))
        for name, parts in decoders(self._pair, question, expected.tokens).items():
            if watch.left <= expected.seconds and self._comparisons:
                self._left_out += 1
                return
            found = answered(self._pair, parts(), question.tokens, sampling, len(expected.tokens), watch)
            self._note(question, name, sampling, expected, found)

    def _measure_noise(self, found: Gap | None) -> None:
        if self._noise is None or (found is not None and found.roundings > self._noise.roundings):
            self._noise = found

    def _note(
        self, question: Question, name: str, sampling: Sampling, expected: Answer, found: Answer
    ) -> None:
        self._comparisons.append(compared(self._pair, question, name, sampling, expected, found))
        if name == OWN and sampling is GREEDY and question in self._questions:
            self._statistics.append(found.statistics)
        if self._window is not None and len(question.tokens) + len(found.tokens) > self._window:
            self._past_window = True

    def _speeds(self, count: int) -> list[Speed]:
        """Plain decoding and the pair's own policy, as often as there is time for."""
        arms = [arm(self._pair, "plain", 0)]
        arms += [arm(self._pair, "adaptive", None)] if self._pair.drafter_names else []
        watch, answers = self._until(1.0), list[Sequence[Run]]()
        for turn in range(self._effort.repeats * len(self._questions)):
            question = self._questions[turn % len(self._questions)]
            if answers and watch.left <= len(arms) * count * self._token:
                break
            answers.append(in_turns(self._pair, arms, question.tokens, count, turn))
        return speeds(arms, answers)

    def _result(self, base: Speed | None, gain: Speed | None) -> SelfTest:
        return SelfTest(
            comparisons=tuple(self._comparisons),
            left_out=self._left_out,
            window=self._window,
            past_window=self._past_window,
            accepted=added(self._statistics) if self._statistics else None,
            plain=base,
            gain=gain,
            noise=self._noise,
            seconds=time.monotonic() - self._started,
        )
