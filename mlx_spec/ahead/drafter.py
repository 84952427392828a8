"""Drafting ahead (Saguaro, speculative speculative decoding, arXiv:2603.03251), around any other drafter.

While the target verifies a draft, a copy of the drafter drafts for its likely outcomes. An outcome is how
many tokens are accepted, and which one follows. If the outcome is among them, the next draft is ready. The
copy has its own caches and works in its own thread. MLX has one default device for all threads. If that is a
GPU, a copy in this process is refused: it would wait for the target's pass, or take the target to the CPU.

The text does not depend on it. Outcomes are guessed by the drafter's logits alone, never by what was drawn
for them. So a stored draft has the distribution that its `probs` say. With a seed, drafter and target share
the noise G of each position. The target takes argmax(log p + G), so the guesses are the top of (log q + G).
"""

from __future__ import annotations

import atexit
import copy
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from mlx_spec.drafters.draft_model import BranchCall, Branches, DraftModel
from mlx_spec.drafters.drafter import DrafterSource, DrafterWrapper
from mlx_spec.errors import InvalidValue
from mlx_spec.grammar import read_tokens
from mlx_spec.model.layer_caches import MAX_UNCOMMITTED
from mlx_spec.model.target import LMTarget
from mlx_spec.policy.ahead_costs import AheadCosts
from mlx_spec.types import (
    Draft,
    Drafter,
    DraftingSampler,
    Features,
    FeatureSpec,
    Sampler,
    TargetParts,
    no_draft,
)


def fan_out(drafted: int, acceptance: float, mean: float) -> list[int]:
    """Return how many next tokens to guess after 0, 1, ..., `drafted` accepted tokens, `mean` on average.

    A more probable number of accepted tokens gets more guesses. The numbers are geometric by theorem 12 of
    the paper, in which F guesses miss the next token with a probability that falls as 1 / F.
    """
    weights = [acceptance ** (k / 2) for k in range(drafted + 1)]
    weights[-1] *= (1 - acceptance) ** -0.5
    total = mean * (drafted + 1)
    return [max(round(total * weight / sum(weights)), 1) for weight in weights]


class AheadThread:
    """A thread for drafts, with MLX's stream of a thread. It ends with the process."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_ending = False
        self._thread = threading.Thread(target=self._work, name="mlx_spec ahead", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def run(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def _work(self) -> None:
        while not self._is_ending:
            self._jobs.get()()
        mx.clear_streams()  # MLX aborts a process that ends with a thread's streams

    def _end(self) -> None:
        self._is_ending = True
        self._jobs.put(lambda: None)
        self._thread.join()


class DrafterCopy(Protocol):
    """A copy of a drafter that drafts ahead of one sequence, on this machine or on another one."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of its caches on this machine."""

    def draft_ahead(self, call: BranchCall, /) -> Branches:
        """Return drafts for likely outcomes, or fewer if the call is cancelled meanwhile."""


class LocalCopy:
    """A copy of a drafter on this machine."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    @property
    def nbytes(self) -> int:
        return self._drafter.nbytes

    def draft_ahead(self, call: BranchCall) -> Branches:
        """Return drafts for likely outcomes.

        Draft models serve several outcomes. Other drafters assume that the whole draft is accepted.
        """
        drafter = self._drafter
        if isinstance(drafter, DraftModel) and drafter.can_branch:
            return drafter.draft_branches(call)
        history = [*call.history, *call.drafted]
        guess = read_tokens(drafter.draft(history, 1, call.sampler).tokens)
        draft = drafter.draft([*history, *guess], call.limit, call.sampler) if guess else no_draft()
        return {(*call.drafted, *guess): draft} if draft.tokens.size else {}


class Ahead(DrafterWrapper):
    """Drafts for one sequence with `inner`, and ahead with a copy of it in a thread."""

    def __init__(
        self, inner: Drafter, thread: AheadThread, make: Callable[[], DrafterCopy], mean: float
    ) -> None:
        super().__init__(inner)
        self._thread, self._make = thread, make
        self._copy: DrafterCopy | None = None
        self._mean = mean  # guesses for each number of accepted tokens
        self._limit = 0  # of the last draft
        self._prepared: BranchCall | None = None
        # The prior is an acceptance of 0.7, which weighs as much as 10 draft tokens.
        self._accepted = 0.7 * 10
        self._judged = 10.0  # draft tokens that were accepted or rejected

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes + (0 if self._copy is None else self._copy.nbytes)

    def observe(self, history: Sequence[int], features: Features) -> None:
        """Drop drafts that were prepared for another text, such as the last answer."""
        self.inner.observe(history, features)
        if self._prepared is not None and self._prepared.outcome(history) is None:
            self._take()

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """Return the draft that was prepared for `history`, else a draft of the inner drafter."""
        self._limit, call = limit, self._prepared
        outcome = None if call is None else call.outcome(history)
        branches = self._take()
        if call is None or outcome is None:
            return self.inner.draft(history, limit, sampler)
        self._accepted += len(outcome) - 1
        self._judged += min(len(outcome), len(call.drafted))
        if (draft := branches.get(outcome)) is None:
            return replace(self.inner.draft(history, limit, sampler), ahead=False)
        probs = None if draft.probs is None else draft.probs[:limit]
        return Draft(draft.tokens[:limit], probs, ahead=True)

    def prepare(self, history: Sequence[int], draft: Draft, sampler: DraftingSampler) -> None:
        """Let the thread draft for the likely outcomes of `draft`."""
        drafted = draft.tokens.size
        most = (MAX_UNCOMMITTED - 1 - drafted) // self._limit  # branches whose rows the caches can take back
        mean = min(self._mean, most / (drafted + 1))
        guesses = fan_out(drafted, self._accepted / self._judged, mean)
        while sum(guesses) > most:  # by rounding
            guesses[guesses.index(max(guesses))] -= 1
        mx.async_eval(draft.tokens)
        self._prepared = BranchCall(list(history), draft, self._limit, guesses, sampler.fresh())
        self._thread.run(partial(self._draft_ahead, self._prepared))

    def _draft_ahead(self, call: BranchCall) -> None:
        """Draft in the thread. An error is raised where the drafts are read."""
        if call.branches.cancelled():
            return
        with suppress(InvalidStateError):  # it was cancelled meanwhile
            try:
                self._copy = self._copy or self._make()
                drafts = self._copy.draft_ahead(call)
                mx.eval([[d.tokens, [] if d.probs is None else d.probs] for d in drafts.values()])
                call.branches.set_result(drafts)
            except BaseException as error:
                call.branches.set_exception(error)

    def _take(self) -> Branches:
        """Return the prepared drafts; none if they are not ready, and then cancel them."""
        call, self._prepared = self._prepared, None
        return {} if call is None or call.branches.cancel() else call.branches.result()


def ahead_source(
    source: DrafterSource,
    make_copy: Callable[[], DrafterCopy] | None = None,
    mean: float = 3,
    thread: AheadThread | None = None,
) -> DrafterSource:
    """Return the source of drafters that also draft ahead, with a local copy if `make_copy` is None.

    They share a thread, a new one if `thread` is None. Raises InvalidValue if it cannot draft ahead.
    """
    check_ahead(source)
    thread = thread or AheadThread()

    @cache
    def copied() -> DrafterSource:
        return source if source.remake is None else source.remake(_dense_copy(source.network))

    def make(parts: TargetParts) -> Ahead:
        return Ahead(source.make(parts), thread, make_copy or (lambda: LocalCopy(copied().make(parts))), mean)

    return replace(source, make=make, ahead_costs=AheadCosts(), proposals=())


def check_ahead(source: DrafterSource) -> None:
    """Raise InvalidValue for a drafter that reads the target or cannot return to another outcome."""
    if source.needs != FeatureSpec():
        raise InvalidValue(
            f"the drafter {source.name} reads hidden states of the target, which do not exist before the "
            "target has verified a draft: do not draft ahead, or use a draft model, PARD or lookup"
        )
    is_language_model = source.remake is not None
    if is_language_model and LMTarget(source.network).is_recurrent:
        raise InvalidValue(
            f"the drafter {source.name} is recurrent and cannot draft for several outcomes of one draft: "
            "do not draft ahead, or use a drafter with attention only"
        )


def _dense_copy(network: nn.Module) -> nn.Module:
    """Return a copy with dense weights, because a CPU is slow with quantized ones. Dense arrays are shared.

    Modules are not shared, because two threads use them.
    """
    parameters = dict(tree_flatten(network.parameters()))
    return dequantize_model(copy.deepcopy(network, {id(array): array for array in parameters.values()}))
