"""Prompts are read beside sequences that decode: nobody waits too long, and the prompt goes on.

Time is counted: a clock goes on by what a pass would take on a device, by its rows and its position.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import mlx.core as mx
import pytest
from support import tiny
from support.lossless import Scripted

from mlx_spec.decode.pace import CHUNKS, MAX_DEFERRAL_S, MAX_PAUSE_S, PromptPace
from mlx_spec.decode.running import PREFILL_STEP, PrefillStep, RunningSequence
from mlx_spec.decode.scheduler import Batch
from mlx_spec.model.target import LMTarget
from mlx_spec.model.target_batch import TargetBatch
from mlx_spec.policy import FixedPolicy
from mlx_spec.prompt import LazyRows, Prompt, Sight, Span
from mlx_spec.sampling import Sampling
from mlx_spec.types import Decision, DraftChoice, DraftLengthPolicy, Features, FeatureSpec, Reason, Round

MODEL = tiny.smallest()  # what passes take is counted
LAYERS = 34
PARTS = LAYERS + 1  # of a pass
LONG = 1500  # tokens of the prompt that is read while others decode
ROWS = 7  # sequences that decode meanwhile

TOO_SLOW = "a round takes all of the time"
# Milliseconds of a pass by its rows and its position, and the steps in which the long prompt should be read.
DEVICES: dict[str, tuple[Callable[[int, int], float], int]] = {
    "each row costs the same": (lambda rows, at: 2.2 * rows, 70),
    "a pass is dear, rows are not": (lambda rows, at: 25 + 0.3 * rows, 25),
    "rows cost almost nothing": (lambda rows, at: 35 + 0.01 * rows, 30),
    "attention grows": (lambda rows, at: rows * (1 + at / 500), 80),
    TOO_SLOW: (lambda rows, at: 95.0, 25),
}


class Clock:
    """Returns the seconds of all passes so far."""

    def __init__(self, milliseconds: Callable[[int, int], float]) -> None:
        self.milliseconds, self.now = milliseconds, 0.0

    def __call__(self) -> float:
        return self.now

    def count(self, rows: int, at: int) -> None:
        self.now += self.milliseconds(rows, at) / 1000


class CountedTarget(LMTarget):
    def __init__(self, clock: Clock) -> None:
        super().__init__(MODEL, sight=Sight(pad_token=0))
        self.clock = clock

    prefill_parts = PARTS

    def prefill(self, tokens: Sequence[int], spans: Sequence[Span] = (), **options: Any) -> Features:
        self.clock.count(len(tokens), self.size)
        return super().prefill(tokens, spans, **options)

    def prefill_by_layers(
        self, tokens: Sequence[int], spans: Sequence[Span] = (), **options: Any
    ) -> Iterator[Features | None]:
        milliseconds = self.clock.milliseconds(len(tokens), self.size) / LAYERS
        for _ in range(LAYERS):
            self.clock.now += milliseconds / 1000
            yield None
        yield LMTarget.prefill(self, tokens, spans, **options)

    def verify(self, tokens: mx.array, *, early: bool = True) -> mx.array:
        self.clock.count(tokens.size, self.size)
        return super().verify(tokens, early=early)


class LayeredTarget(CountedTarget):
    """A target of 34 layers whose pictures are read whole, as Gemma 3 4B reads them."""

    @property
    def reads_spans_whole(self) -> bool:
        return True


class CountedShared(TargetBatch):
    def __init__(self, clock: Clock) -> None:
        super().__init__(MODEL, FeatureSpec())
        self.clock = clock

    def prefill(self, tokens: mx.array, sizes: Sequence[int]) -> list[Features]:
        self.clock.count(max(sizes) * len(sizes), 0)
        return super().prefill(tokens, sizes)

    def verify(self, tokens: mx.array, sizes: Sequence[int], *, early: bool = True) -> mx.array:
        self.clock.count(tokens.size, 0)
        return super().verify(tokens, sizes, early=early)


class Probing:
    """Probes in every round."""

    def decide(
        self, policies: Sequence[DraftLengthPolicy], histories: Sequence[Sequence[int]]
    ) -> list[Decision]:
        return [Decision((DraftChoice(0, 2, "drafter"),), Reason.PROBE)] * len(policies)

    def observe(self, rounds: Sequence[Round | None]) -> None: ...


def picture(clock: Clock, steps: int, milliseconds: float) -> Span:
    """Return a span of a long prompt whose rows take that time in each step."""

    def encode() -> Generator[mx.array, None, mx.array]:
        for _ in range(steps):
            clock.now += milliseconds / 1000
            yield mx.zeros((1,))
        return mx.ones((280, 16))

    return Span(600, 280, b"", LazyRows(encode))


def running(
    clock: Clock, length: int, *spans: Span, kind: type[CountedTarget] = CountedTarget, **given: Any
) -> RunningSequence:
    prompt = Prompt(tuple(tiny.prompt(length, seed=length)), spans)
    drafters = (Scripted([7] * 2000),)
    parts = (kind(clock), drafters, FixedPolicy(0), Sampling().sampler(length, tiny.VOCAB), prompt)
    return RunningSequence(*parts, **{"max_tokens": 1000} | given)


STEPS = 6  # of a picture, each a turn of its own


@pytest.mark.parametrize("has_picture", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_nobody_waits_too_long_for_a_prompt(device: str, has_picture: bool) -> None:
    milliseconds, most = DEVICES[device]
    clock = Clock(milliseconds)
    batch = Batch(lambda: CountedShared(clock), ROWS + 1, clock=clock)
    for i in range(ROWS):  # the first one reads a large chunk, which says little of small ones
        batch.add(running(clock, 900 if i == 0 else 20 + i))
    batch.step()
    batch.step()
    assert batch.group_sizes == [1]  # its prompt was one chunk, because none decoded
    while sum(batch.group_sizes) < ROWS or len(batch.group_sizes) > 1:
        batch.step()
    for _ in range(3):
        batch.step()
    spans = [picture(clock, STEPS, 40)] if has_picture else []
    long = batch.add(running(clock, LONG, *spans, max_tokens=1))
    pauses, last = list[float](), clock()
    while not any(id == long for id, _ in batch.step()):
        pauses.append(clock() - last)
        last = clock()
    assert max(pauses) <= (0.2 if device == TOO_SLOW else MAX_PAUSE_S)
    assert len(pauses) <= most + has_picture * (STEPS + 2)  # the rows themselves, and a small chunk after all


@pytest.mark.parametrize("round_ms,row_ms,tower_ms", [(20, 1.4, 22), (12, 0.4, 8), (35, 2, 30)])
def test_nobody_waits_too_long_for_a_picture_that_is_read_whole(
    round_ms: float, row_ms: float, tower_ms: float
) -> None:
    """A tower of Gemma 3's size, and a pass of 280 rows: about an M4 Pro, faster and slower."""
    clock = Clock(lambda rows, at: round_ms + row_ms * (rows - ROWS))
    batch = Batch(lambda: CountedShared(clock), ROWS + 1, clock=clock)
    for i in range(ROWS):
        batch.add(running(clock, 20 + i))
    while batch.group_sizes != [ROWS]:
        batch.step()
    for _ in range(3):
        batch.step()
    given = {"kind": LayeredTarget, "max_tokens": 1}
    long = batch.add(running(clock, LONG, picture(clock, 27, tower_ms), **given))
    pauses, last = list[float](), clock()
    while not any(id == long for id, _ in batch.step()):
        pauses.append(clock() - last)
        last = clock()
    assert max(pauses) <= MAX_PAUSE_S
    assert clock.milliseconds(280, 0) > 100, "as one pass, its rows would keep the others waiting"


@pytest.mark.parametrize(
    "milliseconds,lengths,together",
    [
        (lambda rows, at: 200 + rows, range(20, 28), 8),  # one pass reads all
        (lambda rows, at: 80 + 0.1 * rows, range(300, 308), 8),  # eight passes take 0.8 s
        (lambda rows, at: 200 + 0.1 * rows, range(300, 308), 5),  # 1.8 s: the others are read later
        (lambda rows, at: 2.2 * rows, [20, 1500, 21], 2),  # the long one would take 3.3 s
        (lambda rows, at: 2.2 * rows, [1500, 20, 21], 2),  # it has a chunk of 1024 first, and then waits
    ],
)
def test_prompts_of_a_burst_begin_together_if_they_are_read_soon(
    milliseconds: Callable[[int, int], float], lengths: Sequence[int], together: int
) -> None:
    clock = Clock(milliseconds)
    batch = Batch(lambda: CountedShared(clock), len(lengths), clock=clock)
    for length in lengths:
        batch.add(running(clock, length))
    while not (found := batch.step()):
        pass
    own = milliseconds(min(lengths[0], PREFILL_STEP), 0) * -(-lengths[0] // PREFILL_STEP)
    first = milliseconds(CHUNKS[-1], 0) + 2 * milliseconds(together, 0)  # a chunk, a round, and a queued one
    assert clock() <= MAX_DEFERRAL_S + (own + first) / 1000
    assert len(found) == together
    for _ in range(100):
        batch.step()
    assert batch.group_sizes == [len(lengths)] or max(lengths) > 1000


@pytest.mark.parametrize("round_ms,token_ms", [(30.0, 2.2), (12.0, 0.2)])
def test_the_bound_is_kept_where_times_vary(round_ms: float, token_ms: float) -> None:
    clock, chance, written = Clock(lambda rows, at: rows), random.Random(5), 0
    pace, pauses = PromptPace(clock), list[float]()

    def take(milliseconds: float) -> None:
        """Take a time that varies by a fifth; one in 25 is up to 2.5 times as long."""
        delay = 1 + 1.5 * chance.random() * (chance.random() < 0.04)
        clock.now += milliseconds / 1000 * chance.lognormvariate(-0.02, 0.2) * delay

    pace.end_round(goes_on=True)
    for _ in range(300):  # nothing is read
        take(round_ms)
        pace.end_round(goes_on=True)
    done = 0.0  # share of a chunk
    while written < 10 * LONG:
        start, most_s, rows, seconds = clock.now, pace.seconds(), pace.chunk(), 0.0
        while not seconds or clock.now - start + max(seconds, pace.step_seconds(rows)) <= most_s:
            began = clock.now
            take((2 + token_ms * rows) / PARTS)
            seconds = clock.now - began
            pace.read(PrefillStep(rows, 1 / PARTS), seconds, PARTS)
            done += 1 / PARTS
            if done > 0.999:
                written, done, rows = written + rows, 0.0, pace.chunk()
        take(round_ms)
        pace.end_round(goes_on=True)
        pauses.append(clock.now - start)
    assert sorted(pauses)[int(0.99 * len(pauses))] <= MAX_PAUSE_S
    assert len(pauses) < 10 * LONG / 8


def chunks(token_ms: float, round_ms: Callable[[int], float], count: int = 12) -> list[int]:
    """Return the sizes of chunks that are read between rounds which take so many milliseconds."""
    clock, sizes = Clock(lambda rows, at: rows), list[int]()
    pace = PromptPace(clock)
    for _ in range(2):
        pace.read(PrefillStep(1100), 1100 * token_ms / 1000, PARTS)  # as a whole, while none decoded
    for i in range(count):
        sizes.append(pace.chunk())
        for _ in range(PARTS):
            pace.read(PrefillStep(sizes[-1], 1 / PARTS), sizes[-1] * token_ms / PARTS / 1000, PARTS)
        clock.now += round_ms(i) / 1000
        pace.end_round(goes_on=True)
    return sizes


@pytest.mark.parametrize("token_ms,size", [(0.2, 1024), (1.6, 1024), (2.0, 256), (8.0, 64), (90.0, 16)])
def test_the_load_does_not_change_the_size_of_a_chunk(token_ms: float, size: int) -> None:
    """Else the rounding of a prompt's numbers, and so the text, would depend on who else decodes."""
    loads = [lambda i: 5.0, lambda i: 95.0, lambda i: 30.0 if i % 4 else 150.0]
    assert [set(chunks(token_ms, load)) for load in loads] == [{size}] * 3


def test_one_late_step_does_not_change_the_size_of_a_chunk() -> None:
    pace = PromptPace(Clock(lambda rows, at: rows))
    for seconds in (0.02, 0.02, 0.3, 0.02):
        pace.read(PrefillStep(PREFILL_STEP, 1 / PARTS), seconds, PARTS)
    assert pace.chunk() == PREFILL_STEP
    pace.read(PrefillStep(PREFILL_STEP, 1 / PARTS), 0.3, PARTS)  # not late: as in each sixth layer
    assert pace.chunk() == 64


def test_nothing_is_probed_while_a_prompt_is_read() -> None:
    clock = Clock(lambda rows, at: rows)
    batch = Batch(lambda: CountedShared(clock), 3, Probing, clock=clock)
    first, second = (batch.add(running(clock, 20 + i)) for i in range(2))
    while batch.group_sizes != [2]:
        batch.step()
    batch.step()  # a token that the first round has queued
    assert all(round.drafted == 2 for _, round in batch.step())
    long = batch.add(running(clock, 200, max_tokens=1))
    while long not in (found := dict(batch.step())):
        for round in (found[first], found[second]):
            assert (round.drafted, round.reason) == (0, Reason.ACCEPTANCE)
