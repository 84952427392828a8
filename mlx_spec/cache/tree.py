"""Caches as a model sees them while it reads a tree: each row stands behind its own path."""

from __future__ import annotations

import mlx.core as mx

from mlx_spec.cache.full import FullCache
from mlx_spec.cache.quantized import Packed, QuantizedCache
from mlx_spec.cache.sliding import SlidingCache
from mlx_spec.tree import Tree


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
