"""Measure the cost table of a pair on a scratch sequence, before the first answer.

A sample ends when its result has reached the host, as a round does. The first sample of a size pays for
compilation and is dropped. Samples of all sizes are interleaved and the lower quartile is kept, because other
programs only add time. The sizes that matter most come first: a big model fills the time limit with those,
and the others are interpolated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from timeit import timeit

import mlx.core as mx

from mlx_spec.model.target import LMTarget
from mlx_spec.policy.costs import Table
from mlx_spec.sampling import Sampling
from mlx_spec.types import MAX_DRAFT_TOKENS, Draft, Drafter

TIME_LIMIT = 1.0  # seconds; a big model takes longer for two samples of the required sizes
# Rows of a pass, the first three required: kernels change in steps. 33 are of several sequences.
ROWS = (1, 2, 5, 3, 9, 4, 17, 33, 6, 7, 11, 8, 13)
DRAFTED = (1, 4, 2, 8)  # draft tokens, the first two required
RUN = 4  # plain tokens of one sample, each queued while the one before it runs
SAMPLES = 8  # of every size at most; a quartile of more does not change
DRAFT_COST = 0.1  # plain tokens: one draft token that could not be measured; above published drafters

Job = Callable[[], object]


def measure(
    target: LMTarget,
    drafters: Sequence[Drafter],
    history: Sequence[int],
    copying: Collection[int] = (),
    time_limit_s: float = TIME_LIMIT,
) -> Table:
    """Return the costs after `history`, all of which but the last token is committed.

    The sequence is left as it was. Drafters in `copying` take no time. A drafter that has no draft here gets
    assumed costs; one that reads the target has a draft only after a token or two were decoded. The extra
    cost of verifying a tree counts as drafting.
    """
    pending = mx.array(list(history[-1:]), dtype=mx.int32)
    vocab_size = target.verify(pending).shape[-1]
    target.commit(0)
    sampler = Sampling().sampler(len(history), vocab_size)

    def plain() -> None:
        token, before = pending, None
        for _ in range(RUN):
            token, _ = sampler.draw(target.verify(token), history, token[:0])
            mx.async_eval(token)
            if before is not None:
                before.tolist()
            before = token
        token.tolist()
        target.commit(0)

    def verify(rows: int) -> None:
        others = (list(history) * rows)[: rows - 1]  # of the text: experts are chosen by token
        tokens = mx.concatenate([pending, mx.array(others, dtype=mx.int32)])
        sampler.verify(target.verify(tokens), history, Draft(tokens[1:])).tolist()
        target.commit(0)

    def draft(index: int, tokens: int) -> int:
        found = drafters[index].draft(history, tokens, sampler)
        if found.parents is None:
            mx.eval(found.tokens)
        else:  # a tree: its pass costs more than the pass of a chain
            trees.add(index)
            logits = target.verify_tree(mx.concatenate([pending, found.tokens]), found.parents)
            sampler.verify(logits, history, found).tolist()
            target.commit(0)
        return found.tokens.size

    trees: set[int] = set()
    required: dict[Hashable, Job] = {"plain": plain, "host": lambda: (pending + 1).tolist()}
    required |= {rows: partial(verify, rows) for rows in ROWS[:3]}
    optional: dict[Hashable, Job] = {rows: partial(verify, rows) for rows in ROWS[3:]}
    for i in range(len(drafters)):
        for k in DRAFTED:
            if i not in copying and draft(i, k) == k:
                (required if k in DRAFTED[:2] else optional)[i, k] = partial(draft, i, k)
    seconds = _lower_quartiles(required, optional, time_limit_s)

    one, host = seconds["plain"] / RUN, seconds["host"]
    passes = {rows: seconds[rows] for rows in ROWS if rows in seconds}
    drafts = []
    for i in range(len(drafters)):
        taken = {k: seconds[i, k] for k in DRAFTED if (i, k) in seconds and k + 1 in passes}
        found = {k: max(s - (passes[k + 1] if i in trees else host), 0.0) for k, s in taken.items()}
        assumed = {k: one * DRAFT_COST * k for k in (1, MAX_DRAFT_TOKENS)}
        drafts.append({} if i in copying else found or assumed)
    return Table(one, passes, drafts, host, len(history))


def _lower_quartiles(
    required: Mapping[Hashable, Job], optional: Mapping[Hashable, Job], time_limit_s: float
) -> dict[Hashable, float]:
    """Return lower quartiles of interleaved samples. Optional jobs may begin in half of the time."""
    start, jobs = time.perf_counter(), {**required, **optional}
    samples: dict[Hashable, list[float]] = {}
    for name, job in jobs.items():
        if name in required or time.perf_counter() < start + time_limit_s / 2:
            job()
            samples[name] = [timeit(job, number=1)]
    for _ in range(SAMPLES - 1):
        for name, values in samples.items():
            if time.perf_counter() < start + time_limit_s:
                values.append(timeit(jobs[name], number=1))
    return {name: sorted(values)[(len(values) - 1) // 4] for name, values in samples.items()}
