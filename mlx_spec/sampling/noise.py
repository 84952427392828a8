"""Gumbel noise, seeded or not, and draws in proportion to weights."""

from __future__ import annotations

import math
from functools import partial

import mlx.core as mx

from mlx_spec.sampling.softmax import chunk_size, in_chunks


def gumbel(shape: tuple[int, ...], key: mx.array) -> mx.array:
    """Return Gumbel noise, float32, always finite.

    The winning token has a small exponential variate. There -log1p(-u) has a spacing of 2**-32; -log(u) would
    have 2**-24, too coarse for a distribution over 262,144 tokens.
    """
    # The least number is half the spacing of `mx.random.uniform` near 0.
    uniform = mx.maximum(mx.random.uniform(shape=shape, key=key), 2.0**-33)
    return -mx.log(-mx.log1p(-uniform))


def seeded_noise(seed: int, position: int, shape: tuple[int, int], ids: mx.array | None = None) -> mx.array:
    """Return the noise of a seed, of shape [T, C]. Row j is for the token at `position + j`.

    It is the noise of the tokens `ids` [T, C]; without `ids`, of all C tokens of the vocabulary. The two are
    different streams. Noise for `ids` has a key for each token, which would cost twice as much for all.
    """
    T, C = shape
    keys = mx.array([noise_key(seed, position + j) for j in range(T)], dtype=mx.uint32)
    if ids is None:
        return mx.vmap(partial(gumbel, (C,)))(keys)
    second = keys[:, 1:] + ids.astype(mx.uint32)
    token_keys = mx.stack([mx.broadcast_to(keys[:, :1], shape), second], axis=-1)
    return mx.vmap(partial(gumbel, (1,)))(token_keys.reshape(T * C, 2)).reshape(T, C)


def draw_by_weight(weights: mx.array, key: mx.array) -> mx.array:
    """Draw a column [T] int32 of each row of weights [T, N], which need not sum to 1.

    First a chunk is drawn by its sum, then a column of it: this takes noise for 2 sqrt(N) values, not for N.
    """
    N = weights.shape[-1]
    chunks = in_chunks(weights, chunk_size(N, math.isqrt(N)), 0)
    T, n, size = chunks.shape
    noise = gumbel((T, n + size), key)
    chunk = (mx.log(chunks.sum(axis=-1)) + noise[:, :n]).argmax(axis=-1, keepdims=True)
    inside = mx.take_along_axis(chunks, chunk[..., None], axis=1)[:, 0]
    column = (mx.log(inside) + noise[:, n:]).argmax(axis=-1, keepdims=True)
    return (chunk * size + column)[:, 0].astype(mx.int32)


def noise_key(seed: int, index: int) -> list[int]:
    """Return two 32-bit words, another pair for each (seed, index): splitmix64 from the mixed seed on."""
    start = _mix(seed % 2**64)
    word = _mix((start + index * 0x9E3779B97F4A7C15) % 2**64)
    return [word >> 32, word % 2**32]


def _mix(word: int) -> int:
    """Apply the finaliser of splitmix64, a bijection of 64-bit words."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)
