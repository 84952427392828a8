"""How a model reads a tree of draft tokens: a mask by path, and rotary positions by depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import rope_utils

from mlx_spec.model.caches import AttentionCache, Packed, QuantizedCache, SlidingCache
from mlx_spec.model.hooks import ModuleWrapper
from mlx_spec.model.tree import Tree

ROPE = "rope"  # attribute of mlx-lm's attention modules that holds their rotary embedding


class TreeCacheView:
    """Appends the rows of a tree to a cache and masks for each row everything off its path."""

    def __init__(self, cache: AttentionCache, tree: Tree) -> None:
        self._cache = cache
        self._tree = tree
        self._base = cache.offset
        self._window = cache.window if isinstance(cache, SlidingCache) else None
        # A list, because only RowwiseRope can compute with it: any other use of positions raises.
        self.offset = [cache.offset + depth for depth in tree.depths]

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array] | tuple[Packed, Packed]:
        """Append [1, H, T, D] and return the rows of the cache."""
        assert keys.shape[2] == len(self.offset), f"{keys.shape[2]} rows for a tree of {len(self.offset)}"
        return self._cache.update_and_fetch(keys, values)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        assert not isinstance(self._cache, QuantizedCache)
        return self._cache.keys_and_values()

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """Return the mask over the rows that `update_and_fetch` will return, bool [T, before + T]."""
        assert len(self.offset) == N, f"mask of {N} rows for a tree of {len(self.offset)}"
        window = window_size or self._window
        assert self._window in (None, window), f"mask for a window of {window}, cache of {self._window}"
        before = self._base if self._window is None else min(self._base, self._window - 1)
        on_path = mx.array(self._tree.ancestors())
        seen = mx.concatenate([mx.ones((N, before), dtype=mx.bool_), on_path], axis=1)
        if window is None:
            return seen
        rows = mx.array(self.offset)
        positions = mx.concatenate([mx.arange(self._base - before, self._base), rows])
        return seen & (rows[:, None] - positions < window)


class QuantizedTreeCacheView(TreeCacheView):
    """A view of a quantized cache: mlx-lm's attention reads `bits` and `group_size`."""

    def __init__(self, cache: QuantizedCache, tree: Tree) -> None:
        super().__init__(cache, tree)
        self.bits = cache.bits
        self._quantized = cache

    @property
    def group_size(self) -> int:
        """Return the group size of the rows written last."""
        return self._quantized.group_size


def tree_view(cache: AttentionCache, tree: Tree) -> TreeCacheView:
    """Return the view of one cache for a tree."""
    if isinstance(cache, QuantizedCache):
        return QuantizedTreeCacheView(cache, tree)
    return TreeCacheView(cache, tree)


class RowwiseRope(ModuleWrapper):
    """A rotary embedding that also takes one offset for each row."""

    def __call__(self, x: mx.array, offset: Any = 0, **options: Any) -> mx.array:
        """Rotate [1, H, T, D] from one offset on, or by offsets [T]."""
        rotate = self.layer
        offset = mx.array(offset) if isinstance(offset, list) else offset
        if not isinstance(offset, mx.array) or offset.ndim == 0:
            rotated: mx.array = rotate(x, offset=offset, **options)
            return rotated
        by_row: mx.array = rotate(x.transpose(2, 1, 0, 3), offset=offset, **options)  # rows on the batch axis
        return by_row.transpose(2, 1, 0, 3)


def rope_obstacle(layers: Sequence[nn.Module]) -> str | None:
    """Return why rows of these decoder layers cannot have positions of their own; None if they can."""
    for index, layer in enumerate(layers):
        ropes = [owner[ROPE] for owner in layer.modules() if ROPE in owner]
        if not ropes:
            return f"layer {index} has no rotary embedding"
        for rope in ropes:
            inner = rope.layer if isinstance(rope, RowwiseRope) else rope
            if not _rotates_rows_independently(inner):
                return f"layer {index} has positions by {type(inner).__name__}"
    return None


def has_rowwise_ropes(layers: Sequence[nn.Module]) -> bool:
    """Return True if all rotary embeddings of these layers take an offset for each row."""
    return all(isinstance(owner[ROPE], RowwiseRope) for owner in _rope_owners(layers))


def wrap_ropes(layers: Sequence[nn.Module]) -> None:
    """Let all rotary embeddings of these decoder layers take an offset for each row."""
    for owner in _rope_owners(layers):
        if not isinstance(owner[ROPE], RowwiseRope):
            owner[ROPE] = RowwiseRope(owner[ROPE])


def unwrap_ropes(layers: Sequence[nn.Module]) -> None:
    """Undo `wrap_ropes`."""
    for owner in _rope_owners(layers):
        if isinstance(owner[ROPE], RowwiseRope):
            owner[ROPE] = owner[ROPE].layer


def _rope_owners(layers: Sequence[nn.Module]) -> list[nn.Module]:
    return [owner for layer in layers for owner in layer.modules() if ROPE in owner]


def _rotates_rows_independently(rope: Any) -> bool:
    if isinstance(rope, rope_utils.DynamicNTKScalingRoPE):  # its frequencies depend on the longest position
        return False
    return isinstance(rope, nn.RoPE) or type(rope).__module__ == rope_utils.__name__
