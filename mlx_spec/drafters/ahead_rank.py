"""Drafting ahead on another machine: rank 1 of `mlx.launch` has a copy of the drafter and nothing else.

Only tokens are sent. With a seed both machines know the noise, so the drafts are those of rank 0. Without one
rank 1 takes the likeliest tokens, and rank 0 accepts those that it draws itself: the text stays exact.
"""

from __future__ import annotations

import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import mlx.core as mx

from mlx_spec.drafters.ahead import Beside, Found, check_ahead, sequence_drafter
from mlx_spec.drafters.drawing import AheadRequest, DrafterSource, SequenceDrafter
from mlx_spec.grammar import read_tokens
from mlx_spec.model.target import LMTarget
from mlx_spec.sampling import Sampling
from mlx_spec.text import common_prefix
from mlx_spec.types import Draft


class RankConnection(Protocol):
    """The connection between both, as in `model/ranks.py`."""

    def send(self, *message: Any) -> None:
        """Send a message as JSON."""

    def receive(self) -> list[Any]:
        """Wait for a message."""
        ...


class DraftRank:
    """The rank that drafts ahead, as rank 0 sees it."""

    def __init__(self, ranks: RankConnection) -> None:
        self._ranks = ranks
        self._sequences, self._requests = itertools.count(), itertools.count()
        self._waiting: dict[int, Future[Found]] = {}
        self._closed: list[int] = []  # sequences that have ended
        threading.Thread(target=self._receive, name="mlx_spec draft rank", daemon=True).start()

    def open(self, make: Callable[[], SequenceDrafter]) -> Beside:
        """Return what drafts ahead of a new sequence. The other rank has its own copy of the drafter."""
        beside = _RankBeside(self, next(self._sequences))
        weakref.finalize(beside, self._closed.append, beside.number).atexit = False
        return beside

    def request(self, *message: Any) -> Future[Found]:
        """Send a request and return its result, which is not there yet."""
        number, found = next(self._requests), Future[Found]()
        self._waiting[number] = found
        while self._closed:
            self._ranks.send("close", self._closed.pop())
        self._ranks.send("ahead", number, *message)
        found.add_done_callback(lambda done: self._forget(number) if done.cancelled() else None)
        return found

    def _forget(self, number: int) -> None:
        self._waiting.pop(number, None)
        self._ranks.send("cancel", number)

    def _receive(self) -> None:
        while True:
            _, number, drafts = self._ranks.receive()
            found = self._waiting.pop(number, None)
            if found is not None and found.set_running_or_notify_cancel():
                tokens = {(accepted, token): mx.array(draft, mx.int32) for accepted, token, draft in drafts}
                found.set_result({outcome: Draft(draft) for outcome, draft in tokens.items()})


class _RankBeside:
    """Drafts ahead of one sequence on the other rank."""

    nbytes = 0  # on this machine

    def __init__(self, rank: DraftRank, number: int) -> None:
        self._rank, self.number = rank, number
        self._sent: Sequence[int] = []  # the history that the rank has

    def submit(self, request: AheadRequest) -> Future[Found]:
        """Send what the rank lacks. Waits for the draft that is verified, not for its pass."""
        keep = common_prefix(self._sent, request.history)
        self._sent = request.history
        fields, prompt_length = request.sampler.remote_settings()
        rows = [keep, list(self._sent[keep:]), request.drafted, request.limit, list(request.guesses)]
        return self._rank.request(self.number, *rows, _packed(fields), prompt_length)


class RankDrafting:
    """Drafts ahead for rank 0, on the rank that it runs on."""

    def __init__(self, ranks: RankConnection, source: DrafterSource, vocab_size: int) -> None:
        check_ahead(source)
        self._ranks, self._source, self._vocab_size = ranks, source, vocab_size
        self._parts = LMTarget(source.network).parts  # it does not read the target's
        self._jobs: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._drafters: dict[int, SequenceDrafter] = {}
        self._histories: dict[int, list[int]] = {}
        self._waiting: dict[int, AheadRequest | None] = {}  # by number; None until it is its turn

    def run(self) -> int:
        """Draft until rank 0 ends. Return its exit status."""
        threading.Thread(target=self._receive, name="mlx_spec requests", daemon=True).start()
        while True:
            match self._jobs.get():
                case ["ahead", number, sequence, *rest]:
                    self._draft(number, sequence, *rest)
                case ["close", sequence]:
                    self._drafters.pop(sequence, None)
                    self._histories.pop(sequence, None)
                case ["end", int(status)]:
                    return status

    def _receive(self) -> None:
        """Queue what rank 0 wants. What it no longer wants counts at once."""
        message: list[Any] = []
        while message[:1] != ["end"]:
            message = self._ranks.receive()
            match message:
                case ["ahead", number, *_]:
                    self._waiting[number] = None
                case ["cancel", number]:
                    request = self._waiting.pop(number, None)
                    if request is not None:
                        request.is_cancelled = True
                    continue
            self._jobs.put(message)

    def _draft(
        self,
        number: int,
        sequence: int,
        keep: int,
        tokens: list[int],
        drafted: list[int],
        limit: int,
        guesses: list[int],
        packed: Mapping[str, Any],
        prompt_length: int,
    ) -> None:
        history = self._histories[sequence] = [*self._histories.get(sequence, [])[:keep], *tokens]
        if number not in self._waiting:
            return
        sampler = _unpacked(packed).sampler(prompt_length, self._vocab_size).drafting
        request = AheadRequest(history, Draft(mx.array(drafted, mx.int32)), limit, guesses, sampler)
        self._waiting[number] = request
        if sequence not in self._drafters:
            self._drafters[sequence] = sequence_drafter(self._source, self._parts)
        found = self._drafters[sequence].draft_ahead(request)
        drafts = [[*outcome, read_tokens(draft.tokens)] for outcome, draft in found.items()]
        if self._waiting.pop(number, None) is not None:
            self._ranks.send("drafts", number, drafts)


def _packed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Sampling` as JSON."""
    bias = fields["logit_bias"] and [*fields["logit_bias"].items()]
    return {**fields, "logit_bias": bias, "late_tokens": [*fields["late_tokens"]]}


def _unpacked(packed: Mapping[str, Any]) -> Sampling:
    bias = packed["logit_bias"] and dict(packed["logit_bias"])
    return Sampling(**{**packed, "logit_bias": bias, "late_tokens": frozenset(packed["late_tokens"])})
