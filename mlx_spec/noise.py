"""Noise to draw tokens with, and the keys it comes from."""

from __future__ import annotations

import mlx.core as mx

HALF_STEP = 2.0**-33  # half the spacing of `mx.random.uniform` near 0


def gumbel(shape: tuple[int, ...], key: mx.array) -> mx.array:
    """Gumbel noise, float32, always finite.

    The token that wins has a small exponential, so that end gets the finer one of the uniform's ends: spacing
    2**-32 where -log(u) would have 2**-24, too coarse for a law over 262,144 tokens.
    """
    uniform = mx.maximum(mx.random.uniform(shape=shape, key=key), HALF_STEP)
    return -mx.log(-mx.log1p(-uniform))


def key_of(seed: int, index: int) -> list[int]:
    """Two 32-bit words, one pair for each (seed, index): splitmix64, started at the mixed seed."""
    start = _mix(seed % 2**64)
    word = _mix((start + index * 0x9E3779B97F4A7C15) % 2**64)
    return [word >> 32, word % 2**32]


def _mix(word: int) -> int:
    """The finaliser of splitmix64, a bijection of 64-bit words."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)
