"""Sums and softmax over a vocabulary.

Float32 sums of 262,144 numbers lose the small ones: MLX's `logsumexp` is 1.4e-4 too small on a CPU. Sums of
chunks, and then the sum of these, are right to 1e-6. All code that normalises over a vocabulary uses them.
"""

from __future__ import annotations

import math
from functools import cache

import mlx.core as mx


def total(values: mx.array) -> mx.array:
    """Return the sums [..., 1] of values [..., N], in two levels."""
    size = chunk_size(values.shape[-1], math.isqrt(values.shape[-1]))
    return in_chunks(values, size, 0).sum(axis=-2).sum(axis=-1, keepdims=True)


def weights(scores: mx.array) -> mx.array:
    """Return weights [..., N] float32, proportional to the probabilities; the largest of a row is 1."""
    scores = scores.astype(mx.float32)
    # `mx.exp` takes 2.4 times as long on a CPU without Accelerate.
    return mx.power(math.e, scores - scores.max(axis=-1, keepdims=True))


def probabilities(scores: mx.array) -> mx.array:
    """Return the softmax of scores [..., N], float32."""
    amounts = weights(scores)
    return amounts / total(amounts)


def log_total(scores: mx.array) -> mx.array:
    """Return the logsumexp [..., 1] of scores [..., N], float32."""
    return scores.max(axis=-1, keepdims=True).astype(mx.float32) + mx.log(total(weights(scores)))


def in_chunks(values: mx.array, size: int, fill: float) -> mx.array:
    """Return values [..., N] as chunks [..., n, size], the last one filled up."""
    missing = -values.shape[-1] % size
    if missing:
        widths = [(0, 0)] * (values.ndim - 1) + [(0, missing)]
        values = mx.pad(values, widths, constant_values=mx.array(fill, values.dtype))
    return values.reshape(*values.shape[:-1], -1, size)


@cache
def chunk_size(length: int, wanted: int) -> int:
    """Return a size near `wanted` that divides `length`, so that nothing is copied; else `wanted`."""
    wanted = max(wanted, 1)
    sizes = [size for size in range(-(-wanted // 2), 2 * wanted + 1) if length % size == 0]
    return min(sizes, key=lambda size: abs(math.log(size / wanted)), default=wanted)
