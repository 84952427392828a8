"""Measure the cost table of a pair on a scratch sequence, one pass at a time.

A sample ends when its result has reached the host, as a round does. The first sample of a size pays for
compilation and is dropped. Samples of all sizes are interleaved and the lower quartile is kept, because other
programs only add time. The sizes that matter most come first: a big model fills the time limit with those,
and the others are interpolated. The caller may do other work after each pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Hashable, Iterator, Mapping, Sequence
from functools import partial

import mlx.core as mx

from mlx_spec.model.target import LMTarget
from mlx_spec.policy.costs import Table
from mlx_spec.sampling import Sampling
from mlx_spec.types import MAX_DRAFT_TOKENS, Draft, Drafter

# Rows of a pass, the first three required: kernels change in steps. 33 are of several sequences.
ROWS = (1, 2, 5, 3, 9, 4, 17, 33, 6, 7, 11, 8, 13)
DRAFTED = (1, 4, 2, 8)  # draft tokens, the first two required
RUN = 4  # plain tokens of one sample, each queued while the one before it runs
SAMPLES = 8  # of every size at most; a quartile of more does not change
DRAFT_COST = 0.1  # plain tokens: one draft token that could not be measured; above published drafters

Share = float  # of the time limit that is spent, at most 1
Job = Callable[[], Iterator[None]]  # a sample, which yields between its passes


class Stopwatch:
    """Counts the seconds of a job that gives way: those in which its caller did other work are left out."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self.spent_s = limit_s, 0.0
        self._last = time.perf_counter()

    @property
    def share(self) -> Share:
        """Return the share of the time limit that is spent."""
        self.stop()
        return min(self.spent_s / self.limit_s, 1.0)

    def stop(self) -> None:
        """Count the time until now, before the caller goes on."""
        now = time.perf_counter()
        self.spent_s, self._last = self.spent_s + now - self._last, now

    def go_on(self, pause_s: float = 1e-3) -> bool:
        """Go on after `stop`. Return False if the caller took longer than a pause: that spoils a sample."""
        now = time.perf_counter()
        paused, self._last = now - self._last, now
        return paused < pause_s


def measure(
    target: LMTarget,
    drafters: Sequence[Drafter],
    history: Sequence[int],
    copying: Collection[int],
    watch: Stopwatch,
) -> Generator[Share, None, Table]:
    """Return the costs after `history`, all of which but the last token is committed. Yield after each pass.

    A big model takes longer than the limit for two samples of the required sizes. The sequence is left as it
    was. Drafters in `copying` take no time. A drafter that has no draft here gets
    assumed costs; one that reads the target has a draft only after a token or two were decoded. The extra
    cost of verifying a tree counts as drafting.
    """
    pending = mx.array(list(history[-1:]), dtype=mx.int32)
    vocab_size = target.verify(pending).shape[-1]
    target.commit(0)
    sampler = Sampling().sampler(len(history), vocab_size)

    def plain() -> Iterator[None]:
        token, before = pending, None
        try:
            for _ in range(RUN):
                token, _ = sampler.draw(target.verify(token), history, token[:0])
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
        found = drafters[index].draft(history, tokens, sampler)
        if found.parents is None:
            mx.eval(found.tokens)
        else:  # a tree: its pass costs more than the pass of a chain
            trees.add(index)
            logits = target.verify_tree(mx.concatenate([pending, found.tokens]), found.parents)
            sampler.verify(logits, history, found).tolist()
            target.commit(0)
        return found.tokens.size

    def draft(index: int, tokens: int) -> Iterator[None]:
        drafted(index, tokens)
        return iter(())

    trees: set[int] = set()
    required: dict[Hashable, Job] = {"plain": plain, "host": wait}
    required |= {rows: partial(verify, rows) for rows in ROWS[:3]}
    optional: dict[Hashable, Job] = {rows: partial(verify, rows) for rows in ROWS[3:]}
    for i in range(len(drafters)):
        for k in DRAFTED:
            if i not in copying and drafted(i, k) == k:
                (required if k in DRAFTED[:2] else optional)[i, k] = partial(draft, i, k)
            yield from _give_way(watch)
    seconds = yield from _lower_quartiles(required, optional, watch)

    one, host = seconds["plain"] / RUN, seconds["host"]
    passes = {rows: seconds[rows] for rows in ROWS if rows in seconds}
    drafts = []
    for i in range(len(drafters)):
        taken = {k: seconds[i, k] for k in DRAFTED if (i, k) in seconds and k + 1 in passes}
        found = {k: max(s - (passes[k + 1] if i in trees else host), 0.0) for k, s in taken.items()}
        assumed = {k: one * DRAFT_COST * k for k in (1, MAX_DRAFT_TOKENS)}
        drafts.append({} if i in copying else found or assumed)
    return Table(one, passes, drafts, host, len(history))


def measured(
    target: LMTarget,
    drafters: Sequence[Drafter],
    history: Sequence[int],
    copying: Collection[int] = (),
    limit_s: float = 1.0,
) -> Table:
    """Return the costs after `history`, as `measure` does, at once."""
    measuring = measure(target, drafters, history, copying, Stopwatch(limit_s))
    while True:
        try:
            next(measuring)
        except StopIteration as done:
            table: Table = done.value
            return table


def _lower_quartiles(
    required: Mapping[Hashable, Job], optional: Mapping[Hashable, Job], watch: Stopwatch
) -> Generator[Share, None, dict[Hashable, float]]:
    """Return lower quartiles of interleaved samples. Optional jobs may begin in half of the time."""
    samples: dict[Hashable, list[float]] = {}
    for name, job in {**required, **optional}.items():
        if name in required or (watch.share < 1 / 2 and _expected(name, samples) < watch.limit_s / 2):
            yield from _sample(job, watch)
            seconds, is_whole = yield from _sample(job, watch)
            if not is_whole:
                seconds, _ = yield from _sample(job, watch)
            samples[name] = [seconds]
    for _ in range(SAMPLES - 1):
        for name, values in samples.items():
            if watch.share < 1:
                seconds, is_whole = yield from _sample(required.get(name) or optional[name], watch)
                values += [seconds] if is_whole else []
    return {name: sorted(values)[(len(values) - 1) // 4] for name, values in samples.items()}


def _expected(name: Hashable, samples: Mapping[Hashable, list[float]]) -> float:
    """Return the seconds of a pass at most, by the rows of the largest that was measured; 0 for others."""
    known = [rows for rows in samples if isinstance(rows, int)]
    return samples[max(known)][0] / max(known) * name if isinstance(name, int) and known else 0.0


def _sample(job: Job, watch: Stopwatch) -> Generator[Share, None, tuple[float, bool]]:
    """Return the seconds of a job, and False if the caller did other work between its passes."""
    watch.stop()
    start, is_whole = watch.spent_s, True
    for _ in job():
        is_whole &= yield from _give_way(watch)
    watch.stop()
    seconds = watch.spent_s - start
    yield from _give_way(watch)
    return seconds, is_whole


def _give_way(watch: Stopwatch) -> Generator[Share, None, bool]:
    """Yield. Return False if the caller did other work."""
    yield watch.share
    return watch.go_on()
