"""Drafting ahead (Saguaro, speculative speculative decoding, arXiv:2603.03251), around any other drafter.

While the target verifies a draft, a copy of the drafter drafts for its likely outcomes: how many tokens are
accepted, and which one follows. If the outcome is among them, the next draft is there at once. The copy has
caches of its own and works in a thread of its own, on the CPU: beside a GPU it costs nothing but bandwidth.

The text does not depend on it. Outcomes are guessed by the drafter's logits alone, never by what was drawn
for them, so a stored draft has the distribution that its `probs` say. With a seed, drafter and target share
the noise G of each position, and the target takes argmax(log p + G): the guesses are the top of (log q + G).
"""

from __future__ import annotations

import atexit
import copy
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from mlx_spec.drafters.drawing import AheadRequest, DrafterSource, Outcome, SequenceDrafter
from mlx_spec.errors import InvalidValue
from mlx_spec.model.caches import MAX_UNCOMMITTED
from mlx_spec.model.target import LMTarget
from mlx_spec.types import (
    CacheState,
    Draft,
    DraftingSampler,
    Features,
    FeatureSpec,
    Sampler,
    TargetParts,
)

FAN_OUT = 3  # next tokens guessed for each number of accepted tokens, on average
RANK_POWER = 1.0  # r of the paper: F guesses miss the next token with a probability that falls as F ** -r
PRIOR_ACCEPTANCE = 0.7  # of a draft token before any was verified
PRIOR_TOKENS = 10  # its weight

Result = TypeVar("Result")


def fan_out(drafted: int, acceptance: float, mean: float) -> list[int]:
    """Return how many next tokens to guess after 0, 1, ..., `drafted` accepted tokens.

    The more probable a number of accepted tokens is, the more guesses it gets: geometric by theorem 12.
    """
    power = 1 / (1 + RANK_POWER)
    weights = [acceptance ** (k * power) for k in range(drafted + 1)]
    weights[-1] *= (1 - acceptance) ** -power
    total = mean * (drafted + 1)
    return [max(round(total * weight / sum(weights)), 1) for weight in weights]


class Executor(Protocol):
    """Runs jobs one after the other, in the order of `submit`."""

    def submit(self, job: Callable[[], Result], /) -> Future[Result]:
        """Run a job. Its arrays must be evaluated when it ends."""
        ...


class CPUThread:
    """A thread with a CPU stream of its own. It ends with the process."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_ending = False
        self._thread = threading.Thread(target=self._work, name="mlx_spec ahead", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        """Run a job on the CPU stream."""
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(job())
            except BaseException as error:  # raised where the result is read
                future.set_exception(error)

        self._jobs.put(run)
        return future

    def _work(self) -> None:
        with mx.stream(mx.new_stream(mx.cpu)):
            while not self._is_ending:
                self._jobs.get()()
        mx.clear_streams()  # MLX aborts a process that ends with a thread's streams

    def _end(self) -> None:
        """Skip the jobs that wait, and let the thread end."""
        self._is_ending = True
        self._jobs.put(lambda: None)
        self._thread.join()


class Prepared:
    """The drafts for the likely outcomes of one verification, done or not."""

    def __init__(
        self,
        history: Sequence[int],
        draft: Draft,
        limit: int,
        guesses: Sequence[int],
        sampler: DraftingSampler,
    ) -> None:
        self.cancelled = False
        self.request = AheadRequest(
            list(history), draft, limit, guesses, sampler.fresh(), lambda: self.cancelled
        )
        self.found: Future[dict[Outcome, Draft]] | None = None  # None until it is submitted

    def draft_with(self, drafter: SequenceDrafter) -> dict[Outcome, Draft]:
        """Return the drafts, evaluated; none if they were cancelled before it began."""
        found = {} if self.cancelled else drafter.draft_ahead(self.request)
        mx.eval([[draft.tokens, [] if draft.probs is None else draft.probs] for draft in found.values()])
        return found

    def outcome(self, history: Sequence[int]) -> Outcome | None:
        """Return the outcome that led to `history`; None if that is another text. The draft is verified."""
        before, drafted = len(self.request.history), self.request.drafted
        accepted = len(history) - before - 1
        if not 0 <= accepted <= len(drafted):
            return None
        expected = [*self.request.history, *drafted[:accepted]]
        return (accepted, history[-1]) if list(history[:-1]) == expected else None

    def take(self, outcome: Outcome) -> Draft | None:
        """Return the draft for an outcome, if there is one by now; the others are not wanted any more."""
        self.cancelled = True
        assert self.found is not None
        return self.found.result().get(outcome) if self.found.done() else None


class Ahead(SequenceDrafter):
    """Drafts one sequence with `inner`, and ahead with `beside`, a drafter with the same weights."""

    needs = FeatureSpec()

    def __init__(
        self, inner: SequenceDrafter, beside: Callable[[], SequenceDrafter], executor: Executor, mean: float
    ) -> None:
        self._inner = inner
        self._make_beside, self._beside = beside, list[SequenceDrafter]()  # made by its own thread
        self._executor = executor
        self._mean = mean  # guesses for each number of accepted tokens
        self._limit = 0  # of the last draft
        self._prepared: Prepared | None = None
        self._accepted = PRIOR_ACCEPTANCE * PRIOR_TOKENS
        self._judged = float(PRIOR_TOKENS)  # draft tokens that were accepted or rejected

    @property
    def nbytes(self) -> int:
        return self._inner.nbytes + sum(drafter.nbytes for drafter in self._beside)

    def missing(self, size: int) -> int:
        return self._inner.missing(size)

    def state(self) -> CacheState:
        """Return the state of the inner drafter; the one beside it reads the text again."""
        return self._inner.state()

    def restore(self, state: CacheState) -> None:
        self._inner.restore(state)

    def observe(self, history: Sequence[int], features: Features) -> None:
        """Drop what was prepared for another text, such as the last answer."""
        self._inner.observe(history, features)
        if self._prepared is not None and self._prepared.outcome(history) is None:
            self._prepared.cancelled, self._prepared = True, None

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """Return the draft that was prepared for `history`, once; else one of the inner drafter."""
        self._limit = limit
        prepared, self._prepared = self._prepared, None
        outcome = None if prepared is None else prepared.outcome(history)
        if prepared is None or outcome is None:
            return self._inner.draft(history, limit, sampler)
        self._accepted += outcome[0]
        self._judged += outcome[0] + (outcome[0] < len(prepared.request.drafted))
        found = prepared.take(outcome)
        if found is None:
            return replace(self._inner.draft(history, limit, sampler), ahead=False)
        probs = None if found.probs is None else found.probs[:limit]
        return Draft(found.tokens[:limit], probs, ahead=True)

    def prepare(self, history: Sequence[int], draft: Draft, sampler: DraftingSampler) -> None:
        """Draft for the likely outcomes of `draft` in the other thread."""
        drafted = draft.tokens.size
        most = (MAX_UNCOMMITTED - 1 - drafted) // self._limit  # branches whose rows the caches take back
        mean = min(self._mean, most / (drafted + 1))
        guesses = fan_out(drafted, self._accepted / self._judged, mean)
        while sum(guesses) > most:  # by rounding
            guesses[guesses.index(max(guesses))] -= 1
        mx.async_eval(draft.tokens)
        prepared = Prepared(history, draft, self._limit, guesses, sampler)
        prepared.found = self._executor.submit(lambda: prepared.draft_with(self._other()))
        self._prepared = prepared

    def _other(self) -> SequenceDrafter:
        """Return the drafter beside the inner one. Called in its own thread."""
        if not self._beside:
            self._beside.append(self._make_beside())
        return self._beside[0]


def ahead_source(
    source: DrafterSource, executor: Executor | None = None, mean: float = FAN_OUT
) -> DrafterSource:
    """Return the source of drafters that also draft ahead, in a CPU thread if `executor` is None.

    Raises InvalidValue for drafters that read the target's features or cannot return to another outcome.
    """
    if source.needs != FeatureSpec():
        raise InvalidValue(
            f"the drafter {source.name} reads hidden states of the target, which do not exist before the "
            "target has verified a draft: leave out ahead, or use a draft model, PARD or lookup"
        )
    if source.network is not None and LMTarget(source.network).is_recurrent:
        raise InvalidValue(
            f"the drafter {source.name} is recurrent and cannot draft for several outcomes of one draft: "
            "leave out ahead, or use a drafter with attention only"
        )
    executor, copies = executor or CPUThread(), list[DrafterSource]()

    def beside(parts: TargetParts) -> SequenceDrafter:
        if not copies:
            copies.append(source if source.remake is None else source.remake(_copy(source.network)))
        return _checked(copies[0], parts)

    def make(parts: TargetParts) -> Ahead:
        return Ahead(_checked(source, parts), partial(beside, parts), executor, mean)

    return replace(source, make=make, drafts_ahead=True)


def _checked(source: DrafterSource, parts: TargetParts) -> SequenceDrafter:
    drafter = source.make(parts)
    assert isinstance(drafter, SequenceDrafter)
    return drafter


def _copy(network: nn.Module) -> nn.Module:
    """Return a copy with dense weights, because a CPU is slow with others. It shares those that are dense.

    Its modules are its own, because two threads use them.
    """
    parameters = dict(tree_flatten(network.parameters()))
    return dequantize_model(copy.deepcopy(network, {id(array): array for array in parameters.values()}))
