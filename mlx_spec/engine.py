"""draft -> verify -> accept -> commit.

Invariants, after every round: the target's cache holds all of the history but its last, pending token; no
cache holds a token that was not emitted; at least one token was emitted.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal, cast

import mlx.core as mx

from mlx_spec.errors import InvalidValue
from mlx_spec.types import (
    Decision,
    Drafter,
    DraftLengthPolicy,
    Round,
    Sampler,
    Target,
)

PREFILL_STEP = 1024  # prompt tokens in one forward pass
CLEAR_EVERY = 256  # rounds; block lengths vary, so freed buffers of many sizes pile up


def generate(
    target: Target,
    drafter: Drafter,
    policy: DraftLengthPolicy,
    sampler: Sampler,
    prompt: list[int],
    *,
    max_tokens: int,
    stop: Collection[int] = (),
) -> Iterator[Round]:
    """Yield rounds of tokens with the law of plain decoding, token for token where the law leaves no choice.

    The target may already hold a prefix of the prompt. A stop token is emitted and ends the last round.
    Closing the generator is safe at every yield. Raises InvalidValue for an empty prompt.
    """
    if not prompt:
        raise InvalidValue("the prompt is empty: give at least one token")
    sequence = _Sequence(target, drafter, sampler, list(prompt), frozenset(stop), max_tokens)
    try:
        sequence.prefill()
        while sequence.room > 0:
            round = sequence.next(policy.decide())
            policy.observe(round)
            yield round
    finally:
        sequence.close()


@dataclass
class _Sequence:
    target: Target
    drafter: Drafter
    sampler: Sampler
    history: list[int]
    stop: frozenset[int]
    room: int  # tokens that may still be emitted; 0 behind a stop token
    ahead: mx.array | None = None  # [1] drawn after the pending token, whose row is on trial, not yet read
    rounds: int = 0

    def next(self, decision: Decision) -> Round:
        """The next round. A token that is already on its way is emitted before anything is drafted."""
        limit = min(decision.limit, self.room - 1)
        if limit > 0 and self.ahead is None:
            round = self.speculate(limit)
        else:
            round = self.plain(look_ahead=decision.limit == 0 and self.room > 1)
        stopped = round.tokens[-1] in self.stop
        self.room = 0 if stopped else self.room - len(round.tokens)
        if self.room == 0:
            self.close()
        self.rounds += 1
        if self.rounds % CLEAR_EVERY == 0:
            mx.clear_cache()
        reason: Literal["stop", "length"] | None = "stop" if stopped else None if self.room else "length"
        return replace(round, reason=decision.reason, finish_reason=reason)

    def prefill(self) -> None:
        """Write all of the prompt but its last token."""
        start, end = self.target.size, len(self.history) - 1
        for low in range(start, end, PREFILL_STEP):
            high = min(low + PREFILL_STEP, end)
            features = self.target.prefill(self.history[low:high])
            self.drafter.observe(self.history[: high + 1], features)
        mx.clear_cache()

    def speculate(self, limit: int) -> Round:
        """One round: at most `limit` draft tokens, verified in one pass."""
        start = time.perf_counter()
        draft = self.drafter.draft(self.history, limit, self.sampler)
        K = draft.tokens.size
        if K == 0:
            return self.plain(look_ahead=False)
        pending = mx.array(self.history[-1:], dtype=mx.int32)
        logits = self.target.verify(mx.concatenate([pending, draft.tokens]))
        verdict = self.sampler.verify(logits, self.history, draft)
        accepted, last, *drafted = _read(mx.concatenate([verdict, draft.tokens]))
        tokens = self._until_stop([*drafted[:accepted], last])
        seconds = time.perf_counter() - start
        self._commit(tokens)
        return Round(tokens, K, min(accepted, len(tokens)), seconds)

    def plain(self, *, look_ahead: bool) -> Round:
        """One token without a draft; with `look_ahead` the next one is already on its way."""
        start = time.perf_counter()
        none = mx.array([], dtype=mx.int32)
        if self.ahead is None:
            logits = self.target.verify(mx.array(self.history[-1:], dtype=mx.int32))
            self.ahead, _ = self.sampler.draw(logits, self.history, none)
        features = self.target.commit(1)
        token, self.ahead = self.ahead, None
        if look_ahead:
            logits = self.target.verify(token)
            self.ahead, _ = self.sampler.draw(logits, self.history, token)
            mx.async_eval(token, self.ahead)
        self.history += _read(token)
        seconds = time.perf_counter() - start
        self.drafter.observe(self.history, features)
        return Round(self.history[-1:], 0, 0, seconds)

    def close(self) -> None:
        """Drop what is on trial."""
        self.ahead = None
        self.target.commit(0)

    def _commit(self, tokens: list[int]) -> None:
        features = self.target.commit(len(tokens))
        self.history += tokens
        self.drafter.observe(self.history, features)

    def _until_stop(self, tokens: list[int]) -> list[int]:
        return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in self.stop), tokens)


def _read(array: mx.array) -> list[int]:
    """The one device-to-host copy of a round."""
    return cast(list[int], array.tolist())
