"""Measures what passes and drafts cost, on a live sequence: writes on trial leave no trace in it.

A sample ends when its result has reached the host, as a round does, and the first of a size, which pays for
compilation, is not counted. Passes of few rows come first, so that a short budget is spent on those that
matter most.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx

from mlx_spec.sampling import Sampling
from mlx_spec.types import Draft, Drafter, Target

ROWS = (1, 2, 5, 3, 4, 6, 9, 7, 8, 11, 13, 17)  # of a pass; kernels change behind 5 and 10 of them
DRAFTED = (1, 4, 2, 8)  # tokens
RUN = 6  # plain tokens, one in flight behind the other
SAMPLES = 7  # of everything; no more are taken


@dataclass(frozen=True)
class Points:
    """Seconds, by what was measured."""

    plain: float  # of a token, decoded one ahead
    verify: Mapping[int, float]  # of a pass, by rows
    host: float  # of one more read in a round
    draft: Mapping[int, Mapping[int, float]]  # by drafter and draft tokens; of no draft, asking for one


def measure(target: Target, drafters: Sequence[Drafter], history: Sequence[int], budget: float) -> Points:
    """What rounds cost behind `history`, of which all rows but the last are committed and none is on trial.

    Takes `budget` seconds, or what two samples of the shortest passes and drafts take.
    """
    bench = _Bench(target, list(history), time.perf_counter() + budget)
    bench.add("plain", bench.plain)
    bench.add("host", bench.host)
    for rows in ROWS:
        if bench.spent and rows not in ROWS[:2]:
            break
        bench.add(("verify", rows), partial(bench.verify, rows))
    for index, drafter in enumerate(drafters):
        for K in DRAFTED:
            if bench.spent and K not in DRAFTED[:2]:
                break
            bench.add(("draft", index, K), partial(bench.draft, drafter, K))
    bench.repeat()
    return bench.points()


def drafts(drafter: Drafter, history: Sequence[int]) -> bool:
    """Whether it has a draft now."""
    sampler = Sampling().sampler(len(history), 1)
    return drafter.draft(history, 1, sampler).tokens.size > 0


@dataclass
class _Bench:
    target: Target
    history: list[int]
    end: float  # on the clock
    jobs: dict[Hashable, Callable[[], None]] = field(default_factory=dict)
    samples: dict[Hashable, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        vocab = self.target.verify(self._rows(1)).shape[-1]
        self.target.commit(0)
        self.sampler = Sampling().sampler(len(self.history), vocab)

    @property
    def spent(self) -> bool:
        """Whether the budget is."""
        return time.perf_counter() > self.end

    def add(self, name: Hashable, job: Callable[[], None]) -> None:
        """Two samples, the first of which does not count."""
        job()
        self.jobs[name], self.samples[name] = job, []
        self._sample(name)

    def repeat(self) -> None:
        """More samples, all jobs in turn, while there is time."""
        for _ in range(SAMPLES - 1):
            for name in self.jobs:
                if self.spent:
                    return
                self._sample(name)

    def points(self) -> Points:
        """Medians; of a draft less what waiting for it cost, which a round does once, for its verdict."""
        middle = {name: statistics.median(values) for name, values in self.samples.items()}
        host = middle["host"]
        verify, draft = dict[int, float](), defaultdict[int, dict[int, float]](dict)
        for name, seconds in middle.items():
            match name:
                case ("verify", int(rows)):
                    verify[rows] = seconds
                case ("draft", int(drafter), int(K)):
                    draft[drafter][K] = max(seconds - host, 0.0)
        return Points(middle["plain"] / RUN, verify, host, dict(draft))

    def plain(self) -> None:
        """Tokens as the engine decodes them without a draft: the next is queued before one is read."""
        token, before = self._rows(1), None
        for _ in range(RUN):
            logits = self.target.verify(token)
            token, _ = self.sampler.draw(logits, self.history, token[:0])
            mx.async_eval(token)
            if before is not None:
                before.tolist()
            before = token
        token.tolist()
        self.target.commit(0)

    def host(self) -> None:
        """Compute something small and read it."""
        (mx.array(self.history[-1:]) + 1).tolist()

    def verify(self, rows: int) -> None:
        """Judge a draft in one pass."""
        tokens = self._rows(rows)
        verdict = self.sampler.verify(self.target.verify(tokens), self.history, Draft(tokens[1:]))
        verdict.tolist()
        self.target.commit(0)

    def draft(self, drafter: Drafter, K: int) -> None:
        """Draft, and wait for the tokens."""
        mx.eval(drafter.draft(self.history, K, self.sampler).tokens)

    def _sample(self, name: Hashable) -> None:
        start = time.perf_counter()
        self.jobs[name]()
        self.samples[name].append(time.perf_counter() - start)

    def _rows(self, count: int) -> mx.array:
        """The pending token and others of the text behind it, since experts are chosen by token."""
        others = self.history[: count - 1] * (count - 1)
        return mx.array([self.history[-1], *others[: count - 1]], dtype=mx.int32)
