"""Drafting ahead on another machine: rank 1 of `mlx.launch` has a copy of the drafter and nothing else.

Only tokens are sent. With a seed both machines know the noise, so the drafts are those of rank 0. Without one
rank 1 takes the likeliest tokens, and rank 0 accepts those that it draws itself: the text stays exact.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

import mlx.core as mx

from mlx_spec.drafters.ahead import Beside, check_ahead
from mlx_spec.drafters.drawing import AheadRequest, DrafterSource, SequenceDrafter
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
        # The last request of each sequence, for as long as somebody waits for its drafts.
        self.waiting: WeakValueDictionary[int, AheadRequest] = WeakValueDictionary()
        threading.Thread(target=self._receive, name="mlx_spec draft rank", daemon=True).start()

    def open(self, make: Callable[[], SequenceDrafter]) -> Beside:
        """Return what drafts ahead of a new sequence. The other rank has its own copy of the drafter."""
        return _RankBeside(self)

    def _receive(self) -> None:
        while True:
            self._pass_on(*self.ranks.receive())

    def _pass_on(self, sequence: int, size: int, drafts: list[Any]) -> None:
        request = self.waiting.get(sequence)
        if request is None or len(request.history) != size:
            return
        if request.found.set_running_or_notify_cancel():
            request.found.set_result({tuple(outcome): _draft_of(tokens) for outcome, tokens in drafts})


class _RankBeside:
    """Drafts ahead of one sequence on the other rank."""

    nbytes = 0  # on this machine

    def __init__(self, rank: DraftRank) -> None:
        self._rank = rank
        self._number = rank.ranks.number(self)
        self._sent: list[int] = []  # the history that the rank has

    def submit(self, request: AheadRequest) -> None:
        """Send what the rank lacks. Waits for the draft that is verified, not for its pass."""
        self._rank.waiting[self._number] = request
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
    wanted: dict[int, list[Any]] = {}  # the last request of each sequence
    while True:
        if wanted and not ranks.has_received():
            sequence = next(iter(wanted))
            drafted, limit, guesses, packed, prompt_length = wanted.pop(sequence)
            drafter, history = sequences[sequence]
            sampler = _unpacked(packed).sampler(prompt_length, vocab_size).drafting
            request = AheadRequest(history, _draft_of(drafted), limit, guesses, sampler)
            drafts = [[o, read_tokens(d.tokens)] for o, d in drafter.draft_ahead(request).items()]
            ranks.send(sequence, len(history), drafts)
            continue
        match ranks.receive():
            case ["ahead", sequence, keep, tokens, *last]:
                wanted[sequence] = last
                drafter, history = sequences.get(sequence) or (source.make(parts), [])
                sequences[sequence] = drafter, [*history[:keep], *tokens]
            case ["drop", sequence]:
                sequences.pop(sequence, None)
                wanted.pop(sequence, None)
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
