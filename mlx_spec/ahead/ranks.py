"""Drafting ahead on another machine: rank 1 of `mlx.launch` has only a copy of the drafter.

Only tokens and settings are sent. With a seed both machines know the noise, so rank 1 drafts as rank 0 would.
Without a seed rank 1 takes the likeliest tokens. Rank 0 accepts the tokens that it draws itself, so the text
stays exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import mlx.core as mx

from mlx_spec.ahead.drafter import LocalCopy, check_ahead
from mlx_spec.distributed.ranks import Ranks
from mlx_spec.drafters.draft_model import BranchCall, Branches
from mlx_spec.drafters.drafter import DrafterSource
from mlx_spec.grammar import read_tokens
from mlx_spec.sampling import Sampling
from mlx_spec.sampling.sampling import Greedy
from mlx_spec.tokenizer import common_prefix
from mlx_spec.types import Draft, TargetParts


def _no_target(argument: mx.array) -> NoReturn:
    raise RuntimeError("a drafter on rank 1 read its target, which only rank 0 has")


NO_PARTS = TargetParts(_no_target, _no_target, _no_target)


class RemoteDrafter:
    """The drafter of one sequence on rank 1, as rank 0 sees it."""

    nbytes = 0  # on this machine

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._number = ranks, ranks.number(self)
        self._sent: list[int] = []  # the history that the rank has

    def draft_ahead(self, call: BranchCall) -> Branches:
        """Send the tokens that rank 1 lacks and wait for its drafts; none if this process ends."""
        keep = common_prefix(self._sent, call.history)
        self._sent = call.history
        rows = [keep, call.history[keep:], call.drafted, call.limit, call.guesses]
        assert isinstance(call.sampler, Greedy)
        processor = call.sampler.processor
        self._ranks.send("ahead", self._number, *rows, _packed(processor.sampling), processor.prompt_length)
        return {tuple(outcome): _draft_of(tokens) for outcome, tokens in self._ranks.receive()}


def draft_for_rank_0(ranks: Ranks, source: DrafterSource, vocab_size: int) -> int:
    """Draft ahead on this rank until rank 0 ends. Return its exit status."""
    check_ahead(source)
    sequences: dict[int, tuple[LocalCopy, list[int]]] = {}
    while True:
        match ranks.receive():
            case ["ahead", number, keep, tokens, drafted, limit, guesses, packed, prompt_length]:
                drafter, sent = sequences.get(number) or (LocalCopy(source.make(NO_PARTS)), [])
                history = [*sent[:keep], *tokens]
                sequences[number] = drafter, history
                sampler = _unpacked(packed).sampler(prompt_length, vocab_size).drafting
                call = BranchCall(history, _draft_of(drafted), limit, guesses, sampler)
                drafts = drafter.draft_ahead(call)
                ranks.send(*([outcome, read_tokens(draft.tokens)] for outcome, draft in drafts.items()))
            case ["drop", number]:
                sequences.pop(number, None)
            case ["end", int(status)]:
                return status


def _draft_of(tokens: list[int]) -> Draft:
    return Draft(mx.array(tokens, mx.int32))


def _packed(sampling: Sampling) -> dict[str, Any]:
    """Return settings as JSON, without the grammar. Without a seed they are greedy: noise is not sent."""
    temperature = 0.0 if sampling.seed is None else sampling.temperature
    sampling = replace(sampling, temperature=temperature, grammar=None)
    bias = sampling.logit_bias and [*sampling.logit_bias.items()]
    return {**vars(sampling), "logit_bias": bias, "late_tokens": [*sampling.late_tokens]}


def _unpacked(packed: Mapping[str, Any]) -> Sampling:
    bias = packed["logit_bias"] and dict(packed["logit_bias"])
    return Sampling(**{**packed, "logit_bias": bias, "late_tokens": frozenset(packed["late_tokens"])})
