"""Drafting ahead on another machine: rank 1 of `mlx.launch` has a copy of the drafter and nothing else.

Only tokens are sent. With a seed both machines know the noise, so the drafts are those of rank 0. Without one
rank 1 takes the likeliest tokens, and rank 0 accepts those that it draws itself: the text stays exact.
"""

from __future__ import annotations

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
    """The rank that drafts ahead, as rank 0 sees it. It works on one request of each sequence at a time."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.waiting: dict[int, Future[Found]] = {}  # by sequence, until it answers
        threading.Thread(target=self._receive, name="mlx_spec draft rank", daemon=True).start()

    def open(self, make: Callable[[], SequenceDrafter]) -> Beside:
        """Return what drafts ahead of a new sequence. The other rank has its own copy of the drafter."""
        return _RankBeside(self)

    def _receive(self) -> None:
        while True:
            sequence, drafts = self.ranks.receive()
            found = self.waiting.pop(sequence)
            if found.set_running_or_notify_cancel():
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
        if self._number in self._rank.waiting:  # it is late: nobody waits for that, and not for this either
            request.found.cancel()
            return
        self._rank.waiting[self._number] = request.found
        keep = common_prefix(self._sent, request.history)
        self._sent = request.history
        rows = [keep, request.history[keep:], request.drafted, request.limit, request.guesses]
        sampling, prompt_length = request.sampler.remote_settings()
        self._rank.ranks.send("ahead", self._number, *rows, _packed(sampling), prompt_length)


def draft_for_rank_0(ranks: Ranks, source: DrafterSource, vocab_size: int) -> int:
    """Draft ahead on this rank until rank 0 ends. Return its exit status."""
    check_ahead(source)
    parts = LMTarget(source.network).parts  # it does not read the target's
    sequences: dict[int, tuple[SequenceDrafter, list[int]]] = {}
    while True:
        match ranks.receive():
            case ["ahead", sequence, keep, tokens, drafted, limit, guesses, packed, prompt_length]:
                drafter, history = sequences.get(sequence) or (source.make(parts), [])
                history = [*history[:keep], *tokens]
                sequences[sequence] = drafter, history
                sampler = _unpacked(packed).sampler(prompt_length, vocab_size).drafting
                found = drafter.draft_ahead(
                    AheadRequest(history, _draft_of(drafted), limit, guesses, sampler)
                )
                ranks.send(sequence, [[outcome, read_tokens(d.tokens)] for outcome, d in found.items()])
            case ["drop", sequence]:
                sequences.pop(sequence, None)
            case ["end", int(status)]:
                return status


def _draft_of(tokens: list[int]) -> Draft:
    return Draft(mx.array(tokens, mx.int32))


def _packed(sampling: Sampling) -> dict[str, Any]:
    """Return settings without a grammar as JSON."""
    bias = sampling.logit_bias and [*sampling.logit_bias.items()]
    return {**vars(sampling), "logit_bias": bias, "late_tokens": [*sampling.late_tokens]}


def _unpacked(packed: Mapping[str, Any]) -> Sampling:
    bias = packed["logit_bias"] and dict(packed["logit_bias"])
    return Sampling(**{**packed, "logit_bias": bias, "late_tokens": frozenset(packed["late_tokens"])})
