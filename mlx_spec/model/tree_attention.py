"""Caches as a model sees them while it reads a tree: each row stands behind its own path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import rope_utils

from mlx_spec.model.caches import FullCache, Packed, QuantizedCache, SlidingCache
from mlx_spec.model.hooks import InPlace
from mlx_spec.model.tree import Tree


class TreeView:
    """Writes rows into a cache one after the other and masks all that is not on the path of each."""

    def __init__(self, cache: FullCache | SlidingCache | QuantizedCache, tree: Tree) -> None:
        self._cache = cache
        self._tree = tree
        self._base = cache.offset
        self._window = cache.window if isinstance(cache, SlidingCache) else None
        # A list, which nothing but a rotary embedding by row can calculate with: other uses of it are errors.
        self.offset = [cache.offset + depth for depth in tree.depths]

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array] | tuple[Packed, Packed]:
        """Append [1, H, T, D] and return what the cache does."""
        assert keys.shape[2] == len(self.offset), f"{keys.shape[2]} rows for a tree of {len(self.offset)}"
        return self._cache.update_and_fetch(keys, values)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the last `update_and_fetch` returned; mlx-lm's KV-shared layers ask for it."""
        assert not isinstance(self._cache, QuantizedCache)
        return self._cache.keys_and_values()

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """What each row may see of the rows that `update_and_fetch` will return: bool [T, before + T]."""
        assert len(self.offset) == N, f"mask of {N} rows for a tree of {len(self.offset)}"
        window = window_size or self._window
        assert self._window in (None, window), f"mask for a window of {window}, cache of {self._window}"
        before = self._base if self._window is None else min(self._base, self._window - 1)
        seen = mx.concatenate([mx.ones((N, before), dtype=mx.bool_), mx.array(self._tree.above())], axis=1)
        if window is None:
            return seen
        rows = mx.array(self.offset)
        positions = mx.concatenate([mx.arange(self._base - before, self._base), rows])
        return seen & (rows[:, None] - positions < window)


class QuantizedTreeView(TreeView):
    """The same of a quantized cache: mlx-lm's attention reads `bits` and `group_size`."""

    def __init__(self, cache: QuantizedCache, tree: Tree) -> None:
        super().__init__(cache, tree)
        self.bits = cache.bits
        self._packed = cache

    @property
    def group_size(self) -> int:
        """Of the rows that were written last."""
        return self._packed.group_size


def view(cache: FullCache | SlidingCache | QuantizedCache, tree: Tree) -> TreeView:
    """The view of one cache."""
    return QuantizedTreeView(cache, tree) if isinstance(cache, QuantizedCache) else TreeView(cache, tree)


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
