"""Rotary positions of rows that do not follow each other: a row of a tree stands at its depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import rope_utils

from mlx_spec.taps import InPlace

KEY = "rope"  # the attribute of mlx-lm's attention modules


class RopeByRow(InPlace):
    """A rotary embedding that takes an offset for every row, too."""

    def __call__(self, x: mx.array, offset: Any = 0, **options: Any) -> mx.array:
        """Rotate [1, H, T, D], from one offset on or by offsets [T]."""
        rotate = self.layer
        offset = mx.array(offset) if isinstance(offset, list) else offset
        if not isinstance(offset, mx.array) or offset.ndim == 0:
            rotated: mx.array = rotate(x, offset=offset, **options)
            return rotated
        turned: mx.array = rotate(x.transpose(2, 1, 0, 3), offset=offset, **options)  # rows on the batch axis
        return turned.transpose(2, 1, 0, 3)


def unknown(layers: Sequence[nn.Module]) -> str | None:
    """Why rows of these decoder layers cannot be given positions of their own; None where they can."""
    for index, layer in enumerate(layers):
        found = [owner[KEY] for owner in layer.modules() if KEY in owner]
        if not found:
            return f"layer {index} has no rotary embedding"
        for rope in found:
            inner = rope.layer if isinstance(rope, RopeByRow) else rope
            if not _shifts_rows_alone(inner):
                return f"layer {index} has positions by {type(inner).__name__}"
    return None


def by_row(layers: Sequence[nn.Module]) -> None:
    """Let all rotary embeddings of these decoder layers take an offset for every row."""
    for owner in _owners(layers):
        if not isinstance(owner[KEY], RopeByRow):
            owner[KEY] = RopeByRow(owner[KEY])


def is_by_row(layers: Sequence[nn.Module]) -> bool:
    """Whether they do."""
    return all(isinstance(owner[KEY], RopeByRow) for owner in _owners(layers))


def as_before(layers: Sequence[nn.Module]) -> None:
    """Undo `by_row`."""
    for owner in _owners(layers):
        if isinstance(owner[KEY], RopeByRow):
            owner[KEY] = owner[KEY].layer


def _owners(layers: Sequence[nn.Module]) -> list[nn.Module]:
    return [owner for layer in layers for owner in layer.modules() if KEY in owner]


def _shifts_rows_alone(rope: Any) -> bool:
    """Whether the angle of a row is known to depend on its own position and nothing else."""
    if isinstance(rope, rope_utils.DynamicNTKScalingRoPE):
        return False
    return isinstance(rope, nn.RoPE) or type(rope).__module__ == rope_utils.__name__
