"""Rotary embeddings whose rows have positions in time, y and x (M-RoPE), for one pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.model.tree import ROPE, rope_owners
from mlx_spec.prompt import RotaryPositions


class MultiAxisRope(nn.Module):
    """Stands in for a rotary embedding while rows have positions [3, T].

    The embedding itself rotates all rows by each axis; every frequency takes its own axis of these.
    """

    def __init__(self, rope: nn.Module, axes: Sequence[int], positions: mx.array) -> None:
        super().__init__()
        self.rope, self._axes, self._positions = rope, axes, positions

    def __call__(self, x: mx.array, offset: Any = 0, **options: Any) -> mx.array:
        """Rotate [1, H, T, D] by the positions, whatever the offset."""
        rows = x.transpose(2, 1, 0, 3)  # on the batch axis, because each has another offset
        time, y, x_axis = (self.rope(rows, offset=at, **options) for at in self._positions)
        # Frequency j turns dimensions j and j + half; those after both halves are not rotated.
        axis = mx.array([*self._axes, *self._axes, *[0] * (x.shape[-1] - 2 * len(self._axes))])
        turned: mx.array = mx.where(axis == 1, y, mx.where(axis == 2, x_axis, time))
        return turned.transpose(2, 1, 0, 3)


@contextmanager
def multi_axis_rope(network: nn.Module, rotary: RotaryPositions, start: int, end: int) -> Iterator[None]:
    """Rotate the rows of one pass over the indices from `start` up to `end` by their rotary positions.

    Passes without spans keep the model's own embeddings: there, an offset says all.
    """
    if not rotary.crosses(start, end):
        yield
        return
    positions = mx.array(rotary.positions(start, end), dtype=mx.int32)
    ropes = [(owner, owner[ROPE]) for owner in rope_owners(network)]
    try:
        for owner, rope in ropes:
            owner[ROPE] = MultiAxisRope(rope, rotary.axes, positions)
        yield
    finally:
        for owner, rope in ropes:
            owner[ROPE] = rope
