"""Filters of scores [T, V]: each masks tokens with -inf and keeps at least one in every row."""

from __future__ import annotations

import math

import mlx.core as mx


def keep_top_k(scores: mx.array, largest: mx.array) -> mx.array:
    """Mask scores [T, V] below the least of the k largest [T, k]. Ties with it stay."""
    return mx.where(scores < largest.min(axis=-1, keepdims=True), -mx.inf, scores)


def keep_top_p(scores: mx.array, candidates: mx.array, p: float) -> mx.array:
    """Mask scores [T, V] of the tokens not needed to reach the mass p; at least one stays, and all its ties.

    candidates [T, k] hold the k largest scores, and nothing but ties with the k-th is finite beyond them.
    """
    ordered = -mx.sort(-candidates, axis=-1)
    probs = mx.exp(ordered - mx.logsumexp(scores, axis=-1, keepdims=True))
    before = mx.cumsum(probs, axis=-1, inclusive=False)  # mass of all more likely tokens
    least = mx.where(before < p, ordered, mx.inf).min(axis=-1, keepdims=True)
    return mx.where(scores < least, -mx.inf, scores)


def keep_min_p(scores: mx.array, p: float) -> mx.array:
    """Mask scores [T, V] of tokens less than p times as likely as the most likely one."""
    return mx.where(scores < scores.max(axis=-1, keepdims=True) + math.log(p), -mx.inf, scores)
