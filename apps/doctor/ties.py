"""Two tokens in one place: how far apart their logits are, in units of what the type can tell apart.

A pass over several rows sums in another order than a pass over one. Where two tokens are equally likely up to
the last bits, either may come out as the most likely one, and neither is wrong: a near-tie. How large those
last bits are is measured: the same tokens are decoded in blocks, with nothing to roll back, and row by row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from mlx_spec.model.target import LMTarget
from mlx_spec.pair import Pair
from mlx_spec.sampling import Sampling
from mlx_spec.sampling.sampling import gumbel, noise_key

MARGIN = 4  # times the largest difference measured
LEAST = 1.0  # roundings: what is allowed where none was measured
# Type -> (bits of its fraction, roundings that are allowed at most, whatever was measured). What leads to a
# logit is rounded to its type on the way: a few in the short types; of float32 the sums themselves differ.
TYPES = {mx.bfloat16: (7, 8), mx.float16: (10, 8), mx.float32: (23, 4096)}


@dataclass(frozen=True)
class Scale:
    """What one rounding is at the size of some logits."""

    rounding: float  # the step from one number of the type to the next
    dtype: str
    limit: int  # roundings that are allowed at most


@dataclass(frozen=True)
class Gap:
    """Between logits that might have been the same."""

    logits: float
    scale: Scale

    @property
    def roundings(self) -> float:
        """In units of the type."""
        return self.logits / self.scale.rounding

    def within(self, allowed: float) -> bool:
        """Whether rounding explains it, where so many are allowed. Of what is no number it does not."""
        return self.roundings <= min(allowed, self.scale.limit)


def allowed(noise: Gap | None) -> float:
    """Roundings by which logits may differ where those of right caches differ by `noise`."""
    return LEAST if noise is None else min(max(LEAST, MARGIN * noise.roundings), noise.scale.limit)


def following(target: LMTarget, history: Sequence[int]) -> mx.array:
    """Logits [V] behind `history`, of which the target may hold a beginning, in its own type."""
    if target.size < len(history) - 1:
        target.prefill(list(history[target.size : -1]))
    logits = target.verify(mx.array(list(history[-1:]), dtype=mx.int32))[0]
    target.commit(0)
    return logits


def apart(a: mx.array, b: mx.array) -> Gap:
    """The largest difference of two rows of logits [V]."""
    difference = mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max()
    largest = mx.abs(a).max().astype(mx.float32)
    logits, size = _numbers(mx.stack([difference, largest]))
    return Gap(logits, _scale(a, size))


def gap(pair: Pair, history: Sequence[int], tokens: tuple[int, int], sampling: Sampling) -> Gap:
    """How far apart two tokens are behind `history`. When seeded, the noise of that place counts, too."""
    logits = following(pair.open().target, history)
    values = logits.astype(mx.float32)
    seen = values
    if sampling.temperature > 0:
        assert sampling.seed is not None, "without a seed no two texts are the same"
        key = mx.array(noise_key(sampling.seed, len(history)), dtype=mx.uint32)
        seen = values + sampling.temperature * gumbel((values.shape[0],), key)
    pick = mx.array(tokens)
    first, second = _numbers(seen[pick])
    return Gap(abs(first - second), _scale(logits, max(map(abs, _numbers(values[pick])))))


def _numbers(array: mx.array) -> list[float]:
    return cast(list[float], array.tolist())


def _scale(logits: mx.array, size: float) -> Scale:
    """One rounding at `size`; below 1 it is that of 1."""
    fraction, limit = TYPES[logits.dtype]
    power = math.floor(math.log2(max(size, 1.0))) if math.isfinite(size) else 0
    return Scale(2.0 ** (power - fraction), str(logits.dtype).rsplit(".", 1)[-1], limit)
