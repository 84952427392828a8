"""Drafts of one pass: K laws that do not see each other's tokens, and the mask rows that ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from mlx_spec.drafters.chain import Chain
from mlx_spec.types import Draft, Sampler


class Stack(Protocol):
    """Layers with caches of their own that take rows on trial."""

    def verify(self, tokens: mx.array) -> mx.array:
        """Write T rows on trial. Returns what the layers make of each, [T, ...]."""
        ...

    def commit(self, keep: int) -> object:
        """Keep the K/V of the first `keep` rows of the trial and drop the rest."""
        ...


def behind(stack: Stack, real: mx.array, mask: mx.array, limit: int) -> mx.array:
    """What `stack` makes of the last of the `real` rows [T, ...] and of K - 1 mask rows behind it, [K, ...].

    `mask` [1, ...] stands for each token that is not drafted yet. The K/V of masks are dropped: the tokens
    themselves are written when they are known.
    """
    rows = stack.verify(mx.concatenate([real, *[mask] * (limit - 1)]))[-limit:]
    stack.commit(real.shape[0])
    return rows


def drawn(logits: mx.array, history: Sequence[int], sampler: Sampler) -> Draft:
    """One token for each row of logits [K, V], and the law of each: its own, whatever the others are.

    They are drawn in turn, because a sampler's penalties depend on the tokens before.
    """
    chain = Chain(history, sampler)
    for j in range(logits.shape[0]):
        chain.extend(logits[j : j + 1])
    return chain.draft()
