"""Rotary embeddings whose rows have positions in time, y and x (M-RoPE), for one pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.model.tree import ROPE, rope_owners
from mlx_spec.prompt import Places


class PlacedRope(nn.Module):
    """Stands in for a rotary embedding while rows have places [3, T].

    The embedding itself rotates all rows by each axis; every frequency takes its own axis of these.
    """

    def __init__(self, rope: nn.Module, axes: Sequence[int], places: mx.array) -> None:
        super().__init__()
        self.rope, self._axes, self._places = rope, axes, places

    def __call__(self, x: mx.array, offset: Any = 0, **options: Any) -> mx.array:
        """Rotate [1, H, T, D] by the places, whatever the offset."""
        rows = x.transpose(2, 1, 0, 3)  # on the batch axis, as each has an offset of its own
        time, y, x_axis = (self.rope(rows, offset=at, **options) for at in self._places)
        # Frequency j turns dimensions j and j + half; those after both halves are not rotated.
        axis = mx.array([*self._axes, *self._axes, *[0] * (x.shape[-1] - 2 * len(self._axes))])
        turned: mx.array = mx.where(axis == 1, y, mx.where(axis == 2, x_axis, time))
        return turned.transpose(2, 1, 0, 3)


@contextmanager
def placed(network: nn.Module, places: Places, start: int, end: int) -> Iterator[None]:
    """Rotate the rows of one pass over the indices from `start` up to `end` by their places.

    Passes without spans keep the model's own embeddings: there, an offset says all.
    """
    if not places.crosses(start, end):
        yield
        return
    at = mx.array(places.positions(start, end), dtype=mx.int32)
    own = [(owner, owner[ROPE]) for owner in rope_owners(network)]
    try:
        for owner, rope in own:
            owner[ROPE] = PlacedRope(rope, places.axes, at)
        yield
    finally:
        for owner, rope in own:
            owner[ROPE] = rope
