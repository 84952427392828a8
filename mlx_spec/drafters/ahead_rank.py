"""Drafting ahead on another machine: rank 1 of `mlx.launch` has a copy of the drafter and nothing else.

Only tokens are sent. With a seed both machines know the noise, so the drafts are those of rank 0. Without one
rank 1 takes the likeliest tokens, and rank 0 accepts those that it draws itself: the text stays exact.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import mlx.core as mx

from mlx_spec.drafters.ahead import Beside, check_ahead
from mlx_spec.drafters.drawing import AheadRequest, DrafterSource, Found, SequenceDrafter
from mlx_spec.grammar import read_tokens
from mlx_spec.model.ranks import Ranks
from mlx_spec.model.target import LMTarget
from mlx_spec.sampling import Sampling
from mlx_spec.text import common_prefix
from mlx_spec.types import Draft


class DraftRank:
    """The rank that drafts ahead, as rank 0 sees it."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.numbers = itertools.count()  # of requests
        self.waiting: dict[int, Future[Found]] = {}
        threading.Thread(target=self._receive, name="mlx_spec draft rank", daemon=True).start()

    def open(self, make: Callable[[], SequenceDrafter]) -> Beside:
        """Return what drafts ahead of a new sequence. The other rank has its own copy of the drafter."""
        return _RankBeside(self)

    def _receive(self) -> None:
        while True:
            number, drafts = self.ranks.receive()
            found = self.waiting.get(number)
            if found is not None and found.set_running_or_notify_cancel():
                found.set_result({tuple(outcome): _draft_of(tokens) for outcome, tokens in drafts})


class _RankBeside:
    """Drafts ahead of one sequence on the other rank."""

    nbytes = 0  # on this machine

    def __init__(self, rank: DraftRank) -> None:
        self._rank = rank
        self._number = rank.ranks.number(self)
        self._sent: list[int] = []  # the history that the rank has

    def submit(self, request: AheadRequest) -> None:
        """Send what the rank lacks. Waits for the draft that is verified, not for its pass."""
        keep = common_prefix(self._sent, request.history)
        self._sent = request.history
        number, waiting = next(self._rank.numbers), self._rank.waiting
        waiting[number] = request.found
        request.found.add_done_callback(lambda found: waiting.pop(number))
        rows = [keep, request.history[keep:], request.drafted, request.limit, request.guesses]
        sampling, prompt_length = request.sampler.remote_settings()
        self._rank.ranks.send("ahead", self._number, number, *rows, _packed(sampling), prompt_length)


def draft_for_rank_0(ranks: Ranks, source: DrafterSource, vocab_size: int) -> int:
    """Draft ahead on this rank until rank 0 ends. Return its exit status."""
    check_ahead(source)
    parts = LMTarget(source.network).parts  # it does not read the target's
    jobs: queue.SimpleQueue[tuple[Future[Found], list[Any]]] = queue.SimpleQueue()
    threading.Thread(target=_queue_jobs, args=[ranks, jobs], name="mlx_spec requests", daemon=True).start()
    drafters: dict[int, SequenceDrafter] = {}
    histories: dict[int, list[int]] = {}
    while True:
        match jobs.get():
            case found, ["ahead", sequence, number, keep, tokens, drafted, limit, guesses, packed, length]:
                history = histories[sequence] = [*histories.get(sequence, [])[:keep], *tokens]
                if found.cancelled():
                    continue
                if sequence not in drafters:
                    drafters[sequence] = source.make(parts)
                sampler = _unpacked(packed).sampler(length, vocab_size).drafting
                request = AheadRequest(history, _draft_of(drafted), limit, guesses, sampler, found)
                drafts = drafters[sequence].draft_ahead(request)
                if not found.cancelled():
                    ranks.send(number, [[outcome, read_tokens(d.tokens)] for outcome, d in drafts.items()])
            case _, ["drop", sequence]:
                drafters.pop(sequence, None)
                histories.pop(sequence, None)
            case _, ["end", int(status)]:
                return status


def _queue_jobs(ranks: Ranks, jobs: queue.SimpleQueue[tuple[Future[Found], list[Any]]]) -> None:
    """Queue what rank 0 wants. The next message of a sequence ends the work for the one before it."""
    last: dict[int, Future[Found]] = {}
    while True:
        _, sequence, *request = message = ranks.receive()
        if sequence in last:
            last.pop(sequence).cancel()
        found = Future[Found]()
        if request:
            last[sequence] = found
        jobs.put((found, message))


def _draft_of(tokens: list[int]) -> Draft:
    return Draft(mx.array(tokens, mx.int32))


def _packed(sampling: Sampling) -> dict[str, Any]:
    """Return settings without a grammar as JSON."""
    bias = sampling.logit_bias and [*sampling.logit_bias.items()]
    return {**vars(sampling), "logit_bias": bias, "late_tokens": [*sampling.late_tokens]}


def _unpacked(packed: Mapping[str, Any]) -> Sampling:
    bias = packed["logit_bias"] and dict(packed["logit_bias"])
    return Sampling(**{**packed, "logit_bias": bias, "late_tokens": frozenset(packed["late_tokens"])})
