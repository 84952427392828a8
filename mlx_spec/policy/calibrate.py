"""Measure the cost table of a pair on a scratch sequence, one pass at a time.

A sample ends when its result has reached the host, as a round does. The first sample of a size pays for
compilation and is dropped. Samples of all sizes are interleaved and the lower quartile is kept, because other
programs only add time. The sizes that matter most come first. A big model fills the time limit with them, and
the others are interpolated. Before each pass the caller gets its longest expected time, and may do other
work. So a request waits for one pass, not for a whole measurement.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import mlx.core as mx

from mlx_spec.model.target import LMTarget
from mlx_spec.policy.costs import UNKNOWN_ERROR, Table
from mlx_spec.sampling import Sampling
from mlx_spec.types import MAX_DRAFT_TOKENS, Draft, Drafter

# Rows of a pass, the first three required. Kernels change in steps, so 13 sizes are timed. Only passes of
# several sequences have 33.
ROWS = (1, 2, 5, 3, 9, 4, 17, 33, 6, 7, 11, 8, 13)
DRAFTED = (1, 4, 2, 8)  # draft tokens, the first two required
RUN = 4  # plain tokens of one sample, each queued while the one before it runs

# Name of a sample: "plain", "host", its rows, or a drafter's index and its draft tokens.
Name = str | int | tuple[int, int]
Job = Callable[[], Iterator[None]]  # a sample, which yields between its passes


class Slice(NamedTuple):
    """The state of a measurement before its next pass."""

    share: float  # of the time limit that is spent, at most 1
    seconds: float  # that the pass takes at most


class Stopwatch:
    """Counts the seconds of a measurement, without the time in which its caller did other work.

    `token_s` is the known time of a plain token, 0 if unknown. A pass that may take more than `most_s` is
    left out if the result does not need it.
    """

    def __init__(
        self,
        limit_s: float,
        token_s: float = 0.0,
        most_s: float = math.inf,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self.limit_s, self.token_s, self.most_s, self.spent_s = limit_s, token_s, most_s, 0.0
        self._passes: dict[int, float] = {}  # seconds by rows
        self._drafts: dict[int, dict[int, float]] = {}  # by drafter, seconds by draft tokens
        self._last = clock()

    @property
    def share(self) -> float:
        """Return the time that is spent, divided by the limit."""
        self.stop()
        return self.spent_s / self.limit_s

    def before(self, name: Name) -> Slice:
        """Stop the watch before a pass or a draft. Return the state of the measurement."""
        return Slice(min(self.share, 1.0), self.bound(name))

    def stop(self) -> None:
        """Count the time until now, before the caller goes on."""
        now = self._clock()
        self.spent_s, self._last = self.spent_s + now - self._last, now

    def go_on(self, pause_s: float = 1e-3) -> bool:
        """Go on after `stop`. Return False if more than `pause_s` have passed: that spoils a sample."""
        now = self._clock()
        paused, self._last = now - self._last, now
        return paused < pause_s

    def learn(self, name: Name, seconds: float) -> None:
        """Record the seconds of a pass or a draft."""
        if isinstance(name, tuple):
            self._drafts.setdefault(name[0], {})[name[1]] = seconds
        elif isinstance(name, int):
            self._passes[name] = seconds

    def bound(self, name: Name) -> float:
        """Return the longest time of a pass or a draft: twice the rows take at most twice as long."""
        if isinstance(name, str):  # while a plain token runs, the next one is queued
            return 2 * self.bound(1) if name == "plain" else 0.0
        if isinstance(name, int):
            size, known, unknown = name, self._passes, self.token_s
        else:
            size, known, unknown = name[1], self._drafts.get(name[0], {}), self.bound(1)
        return min((s * max(size / rows, 1) for rows, s in known.items()), default=size * unknown)


def measure(
    target: LMTarget,
    drafters: Sequence[Drafter],
    history: Sequence[int],
    vocab_size: int,
    copying: Collection[int],
    watch: Stopwatch,
) -> Generator[Slice, None, Table]:
    """Return the costs after `history`, which is committed without its last token. Yield before each pass.

    A big model may exceed the limit with two samples of the required sizes. The sequence is left as it was.
    Drafters in `copying` take no time. A drafter without a draft here gets assumed costs. A drafter that
    reads the target has a draft only after a token or two were decoded. A tree's pass counts as drafting.
    """
    pending = mx.array(list(history[-1:]), dtype=mx.int32)
    sampler = Sampling().sampler(len(history), vocab_size)

    def plain() -> Iterator[None]:
        token, before = pending, None
        try:
            for _ in range(RUN):
                token, _ = sampler.draw(target.verify(token, early=before is None), history, token[:0])
                mx.async_eval(token)
                if before is not None:
                    before.tolist()
                    yield
                before = token
            token.tolist()
        finally:
            target.commit(0)

    def wait() -> Iterator[None]:
        (pending + 1).tolist()
        return iter(())

    def verify(rows: int) -> Iterator[None]:
        others = (list(history) * rows)[: rows - 1]  # of the text: experts are chosen by token
        tokens = mx.concatenate([pending, mx.array(others, dtype=mx.int32)])
        sampler.verify(target.verify(tokens), history, Draft(tokens[1:])).tolist()
        target.commit(0)
        return iter(())

    def drafted(index: int, tokens: int) -> int:
        draft = drafters[index].draft(history, tokens, sampler)
        if draft.parents is None or target.tree_obstacle is not None:  # then no round drafts the tree
            mx.eval(draft.tokens)
        else:  # a tree: its pass costs more than the pass of a chain
            trees.add(index)
            logits = target.verify_tree(mx.concatenate([pending, draft.tokens]), draft.parents)
            sampler.verify(logits, history, draft).tolist()
            target.commit(0)
        return draft.tokens.size

    def draft(index: int, tokens: int) -> Iterator[None]:
        drafted(index, tokens)
        return iter(())

    trees: set[int] = set()
    required: dict[Name, Job] = {"plain": plain, "host": wait}
    required |= {rows: partial(verify, rows) for rows in ROWS[:3]}
    optional: dict[Name, Job] = {rows: partial(verify, rows) for rows in ROWS[3:]}
    for i in range(len(drafters)):
        for k in DRAFTED:
            if i in copying or (k != DRAFTED[0] and watch.bound((i, k)) > watch.most_s):
                continue
            yield from _give_way(watch, (i, k))
            start, is_whole = watch.spent_s, drafted(i, k) == k
            watch.stop()
            watch.learn((i, k), watch.spent_s - start)
            if is_whole:
                (required if k in DRAFTED[:2] else optional)[i, k] = partial(draft, i, k)
    seconds, error = yield from _lower_quartiles(required, optional, watch)
    one = seconds["plain"] / RUN
    passes = {rows: seconds[rows] for rows in ROWS if rows in seconds}
    # A drafter that could not be measured counts as 0.1 plain tokens a token: published ones take less.
    assumed = {k: one * 0.1 * k for k in (1, MAX_DRAFT_TOKENS)}
    drafts = [
        {} if i in copying else _drafts(seconds, i, i in trees) or assumed for i in range(len(drafters))
    ]
    return Table(one, passes, drafts, seconds["host"], len(history), error=error)


def _drafts(seconds: Mapping[Name, float], drafter: int, is_tree: bool) -> dict[int, float]:
    """Return the seconds of drafts by their tokens, without the wait for the device or the pass of a tree."""
    costs = {}
    for k in DRAFTED:
        if (drafter, k) in seconds and (not is_tree or k + 1 in seconds):
            other = seconds[k + 1] if is_tree else seconds["host"]
            costs[k] = max(seconds[drafter, k] - other, 0.0)
    return costs


def _lower_quartiles(
    required: Mapping[Name, Job], optional: Mapping[Name, Job], watch: Stopwatch
) -> Generator[Slice, None, tuple[dict[Name, float], float]]:
    """Return lower quartiles of interleaved samples, and the error of their ratios to plain tokens.

    Optional jobs may begin in the first half of the time. Jobs that may take too long are left out, except
    for the sizes that every table needs.
    """
    samples: dict[Name, list[float]] = {}
    turns: list[dict[Name, float]] = [{}]  # samples that were taken one after the other
    least = {"plain", "host", *ROWS[:2], *(name for name in required if _size(name) == DRAFTED[0])}
    for name, job in {**required, **optional}.items():
        bound, sizes = watch.bound(name), sum(isinstance(name, int) for name in samples)
        is_required = name in required or (isinstance(name, int) and sizes < 3)
        is_short = is_required or (watch.share < 1 / 2 and bound < watch.limit_s / 2)
        if name in least or (is_short and bound <= watch.most_s):
            yield from _sample(name, job, watch)
            seconds, is_whole = yield from _sample(name, job, watch)
            if not is_whole:
                seconds, is_whole = yield from _sample(name, job, watch)
            samples[name] = [seconds]
            turns[0] |= {name: seconds} if is_whole else {}
    for _ in range(7):  # a quartile of more samples does not change
        turns.append({})
        for name, values in samples.items():
            # Their ratios need more samples than their seconds: the required ones may take the time again.
            if watch.share < (2 if name in required else 1):
                seconds, is_whole = yield from _sample(name, required.get(name) or optional[name], watch)
                values += [seconds] if is_whole else []
                turns[-1] |= {name: seconds} if is_whole else {}
    quartiles = {name: sorted(values)[(len(values) - 1) // 4] for name, values in samples.items()}
    return quartiles, _error(quartiles, turns)


def _error(quartiles: Mapping[Name, float], turns: Sequence[Mapping[Name, float]]) -> float:
    """Return the error of measured costs in plain tokens, in log seconds.

    Load moves the plain sample of a turn as it moves the others, so the spread of their ratios tells it.
    """
    compared = [turn for turn in turns if "plain" in turn and len(turn) > 2]
    if len(compared) < 4:
        return UNKNOWN_ERROR
    # Log ratios to the plain sample of the turn, less the one that the table has.
    excess = [
        math.log(seconds / turn["plain"] * quartiles["plain"] / quartiles[name])
        for turn in compared
        for name, seconds in turn.items()
        if name not in ("plain", "host") and min(seconds, quartiles[name], turn["plain"]) > 0
    ]
    if not excess:
        return UNKNOWN_ERROR
    middle = median(excess)
    deviation = 1.48 * median(abs(value - middle) for value in excess)
    # A median of n has 1.25 times the error of a mean. Rounds differ from samples by some percent.
    return min(math.hypot(0.07, middle, 1.25 * deviation / math.sqrt(len(compared))), UNKNOWN_ERROR)


def _size(name: Name) -> object:
    """Return the tokens of a draft; None for passes."""
    return name[1] if isinstance(name, tuple) else None


def _sample(name: Name, job: Job, watch: Stopwatch) -> Generator[Slice, None, tuple[float, bool]]:
    """Return the seconds of a job, and False if the caller did other work between its passes."""
    yield from _give_way(watch, name)
    start, is_whole = watch.spent_s, True
    for _ in job():
        is_whole &= yield from _give_way(watch, name)
    watch.stop()
    seconds = watch.spent_s - start
    watch.learn(1 if name == "plain" else name, seconds / (RUN if name == "plain" else 1))
    return seconds, is_whole


def _give_way(watch: Stopwatch, name: Name) -> Generator[Slice, None, bool]:
    """Let the caller do other work. Return False if it did."""
    yield watch.before(name)
    return watch.go_on()
