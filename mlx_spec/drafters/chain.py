"""A draft in the making: each token is drawn from logits that depend on the ones before it."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_spec.types import Draft, Sampler


class Chain:
    """Collects tokens, the laws they were drawn from and the drafter's confidence.

    The device begins with a token while the host puts together what follows; nothing is waited for.
    """

    def __init__(self, history: Sequence[int], sampler: Sampler) -> None:
        self._history = history
        self._sampler = sampler
        self._tokens = mx.array([], dtype=mx.int32)
        self._laws: list[mx.array] = []
        self._confidence: list[mx.array] = []

    def extend(self, logits: mx.array) -> mx.array:
        """Draw the next token from logits [1, V]. Returns it, [1] int32."""
        token, law = self._sampler.draw(logits, self._history, self._tokens)
        mx.async_eval(token)
        self._tokens = mx.concatenate([self._tokens, token])
        self._laws += [] if law is None else [law]
        self._confidence.append(largest_probability(logits))
        return token

    def draft(self) -> Draft:
        """All of it. What nobody reads of the confidence is never computed."""
        laws = mx.concatenate(self._laws) if self._laws else None
        return Draft(self._tokens, laws, mx.concatenate(self._confidence))


def largest_probability(logits: mx.array) -> mx.array:
    """Of a softmax over logits [T, V] at temperature 1; [T] float32."""
    scores = logits.astype(mx.float32)
    return mx.exp(scores.max(axis=-1) - mx.logsumexp(scores, axis=-1))
