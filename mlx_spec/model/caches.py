"""Append-only KV cache: rollback moves the offset."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import (
    ArraysCache,
    KVCache,
    RotatingKVCache,
    create_attention_mask,
    make_prompt_cache,
)

from mlx_spec.errors import InvalidValue, NotRewindable
from mlx_spec.model.tree_attention import TreeView, view
from mlx_spec.types import KVRows

STEP = 256  # rows; buffers grow by whole steps


def bucket(rows: int) -> int:
    """Rows to allocate so that `rows` fit: a quarter in reserve, rounded up to whole steps."""
    return -(-(rows + rows // 4) // STEP) * STEP


class FullCache:
    """K and V of every position, in a preallocated buffer; rows behind `offset` are dead."""

    attention_type = "full_attention"

    def __init__(self) -> None:
        self.offset = 0
        self.keys: mx.array | None = None  # [1, H, capacity, Dk]
        self.values: mx.array | None = None  # [1, H, capacity, Dv]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append [1, H, T, D] and return all rows [1, H, S, D]."""
        start, end = self.offset, self.offset + keys.shape[2]
        self.keys = write(self.keys, keys, start, end)
        self.values = write(self.values, values, start, end)
        self.offset = end
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """All rows [1, H, S, D]; mlx-lm's KV-shared layers ask for them."""
        assert self.keys is not None and self.values is not None
        return self.keys[..., : self.offset, :], self.values[..., : self.offset, :]

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The mask of a block of N queries, as mlx-lm's own caches make it."""
        mask: mx.array | str | None = create_attention_mask(N, self.offset, return_array, window_size)
        return mask

    def rows(self, size: int) -> KVRows:
        """The first `size` rows, all of those committed."""
        assert self.keys is not None and self.values is not None
        return KVRows(self.keys[..., :size, :], self.values[..., :size, :])

    def rewinds(self, size: int) -> bool:
        """Whether `rewind(size)` is exact."""
        return size <= self.offset

    def rewind(self, size: int) -> None:
        """Forget all rows from position `size` on."""
        self.offset = min(self.offset, size)

    def select(self, start: int, rows: mx.array) -> None:
        """Of the rows from position `start` on these come first, in this order; the others are to go."""
        self.keys, self.values = selected(self.keys, start, rows), selected(self.values, start, rows)

    def snapshot(self) -> Any:
        """What `restore` needs to come back here."""
        return self.offset

    def restore(self, saved: Any) -> None:
        """Come back to a snapshot that only appends followed."""
        self.rewind(saved)

    def arrays(self) -> list[mx.array]:
        """The arrays to evaluate after a prefill."""
        return [a for a in (self.keys, self.values) if a is not None]


def write(buffer: mx.array | None, rows: mx.array, start: int, end: int) -> mx.array:
    """`buffer` [1, H, capacity, D] with `rows` at start..end, grown to the next bucket if too short."""
    if buffer is None or end > buffer.shape[2]:
        grown = mx.zeros((*rows.shape[:2], bucket(end), rows.shape[3]), rows.dtype)
        if buffer is not None:
            grown[..., :start, :] = buffer[..., :start, :]
        buffer = grown
    buffer[..., start:end, :] = rows
    return buffer


def selected(buffer: mx.array | None, start: int, rows: mx.array) -> mx.array:
    """`buffer` [1, H, capacity, D] with the rows `start` + `rows` at `start` and behind it."""
    assert buffer is not None, "rows of an empty cache"
    buffer[..., start : start + rows.size, :] = buffer[..., start + rows, :]
    return buffer


Packed = tuple[mx.array, mx.array, mx.array]  # packed weights, scales, biases


class QuantizedCache:
    """K and V of every position, quantized row by row with groups along the head dimension."""

    attention_type = "full_attention"

    def __init__(self, bits: int) -> None:
        self.bits = bits  # mlx-lm's attention reads `bits` and `group_size`
        self.group_size = 64
        self.offset = 0
        self._keys: list[mx.array | None] = [None, None, None]
        self._values: list[mx.array | None] = [None, None, None]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Packed, Packed]:
        """Append [1, H, T, D] and return all rows, packed."""
        self.group_size = group_size(keys.shape[-1], values.shape[-1])
        start, end = self.offset, self.offset + keys.shape[2]
        self._append(self._keys, keys, start, end)
        self._append(self._values, values, start, end)
        self.offset = end
        return self._rows(self._keys), self._rows(self._values)

    def _append(self, buffers: list[mx.array | None], rows: mx.array, start: int, end: int) -> None:
        parts = mx.quantize(rows, group_size=self.group_size, bits=self.bits)
        buffers[:] = [write(b, part, start, end) for b, part in zip(buffers, parts, strict=True)]

    def _rows(self, buffers: list[mx.array | None]) -> Packed:
        packed, scales, biases = (b[..., : self.offset, :] for b in buffers if b is not None)
        return packed, scales, biases

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The mask of a block of N queries, as mlx-lm's own caches make it."""
        mask: mx.array | str | None = create_attention_mask(N, self.offset, return_array, window_size)
        return mask

    def rewinds(self, size: int) -> bool:
        """Whether `rewind(size)` is exact."""
        return size <= self.offset

    def rewind(self, size: int) -> None:
        """Forget all rows from position `size` on."""
        self.offset = min(self.offset, size)

    def select(self, start: int, rows: mx.array) -> None:
        """Of the rows from position `start` on these come first, in this order; the others are to go."""
        for buffers in (self._keys, self._values):
            buffers[:] = [selected(buffer, start, rows) for buffer in buffers]

    def snapshot(self) -> Any:
        """What `restore` needs to come back here."""
        return self.offset

    def restore(self, saved: Any) -> None:
        """Come back to a snapshot that only appends followed."""
        self.rewind(saved)

    def arrays(self) -> list[mx.array]:
        """The arrays to evaluate after a prefill."""
        return [a for a in (*self._keys, *self._values) if a is not None]


def group_size(*head_dims: int) -> int:
    """The largest group size that divides every head dimension.

    Raises InvalidValue when even groups of 32 do not fit.
    """
    for size in (64, 32):
        if all(dim % size == 0 for dim in head_dims):
            return size
    raise InvalidValue(
        f"a quantized KV cache needs head dimensions divisible by 32, this target has {head_dims}: "
        "use it without kv_bits"
    )


class RecurrentCache(ArraysCache):
    """The arrays of one recurrent layer.

    A running state cannot be shortened. Models replace its arrays and never write into them, so a snapshot
    is a list of references; the target restores it and feeds the kept tokens again.
    """

    attention_type = "recurrent"

    def snapshot(self) -> Any:
        """What `restore` needs to come back here: references, no copy."""
        return list(self.cache)

    def restore(self, saved: Any) -> None:
        """Come back to a snapshot."""
        self.cache = list(saved)

    def arrays(self) -> list[mx.array]:
        """The arrays to evaluate after a prefill."""
        arrays: list[mx.array | None] = list(self.cache)
        return [array for array in arrays if array is not None]


MAX_TRIAL = 64  # rows that may be written on trial, and taken back, at any time
SLACK = 256  # rows appended before the window moves back to the front of the buffer


class SlidingCache:
    """The last `window` positions, in temporal order.

    Rows are appended behind the window; when the buffer is full the live rows move to its front, once in
    SLACK tokens. Attention therefore reads exactly the window, in the order of the text, whatever mixture of
    single steps, blocks and rollbacks led there: the sums are those of plain decoding. (A ring of slots, as
    in mlx-lm, reads keys in another order after every wrap and needs a mask for each single step.)
    """

    attention_type = "sliding_attention"

    def __init__(self, window: int) -> None:
        self.window = window
        self.offset = 0
        self._first = 0  # position of row 0 of the buffers
        self._seen = 0  # position of the first row that the last block could see
        self._keys: mx.array | None = None  # [1, H, capacity, Dk]
        self._values: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append [1, H, T, D]; return the rows that the block may see, [1, H, min(S, window - 1) + T, D]."""
        base, end = self.offset, self.offset + keys.shape[2]
        low = max(base - self.window + 1, 0)
        if self._keys is None or self._values is None or end - self._first > self._keys.shape[2]:
            first = max(base - self.window + 1 - MAX_TRIAL, self._first)
            self._keys, self._values, self._first = (
                self._moved(self._keys, keys, first),
                self._moved(self._values, values, first),
                first,
            )
        else:
            at = slice(base - self._first, end - self._first)
            self._keys[..., at, :] = keys
            self._values[..., at, :] = values
        self.offset = end
        self._seen = low
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the last `update_and_fetch` returned; mlx-lm's KV-shared layers ask for it."""
        return self._slice(self._seen, self.offset)

    def _moved(self, buffer: mx.array | None, rows: mx.array, first: int) -> mx.array:
        """A new buffer that begins at position `first` and ends with `rows`, with room for SLACK more."""
        kept = self.offset - first
        capacity = kept + rows.shape[2] + SLACK
        moved = mx.zeros((*rows.shape[:2], capacity, rows.shape[3]), rows.dtype)
        if buffer is not None:
            moved[..., :kept, :] = buffer[..., first - self._first : self.offset - self._first, :]
        moved[..., kept : kept + rows.shape[2], :] = rows
        return moved

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The mask of a block of N queries over the rows that `update_and_fetch` will return."""
        window = window_size or self.window
        assert window == self.window, f"mask for a window of {window}, cache of {self.window}"
        if N == 1 and not return_array:
            return None
        before = min(self.offset, window - 1)
        if before + N > window or return_array:
            mask: mx.array = create_causal_mask(N, before, window_size=window)
            return mask
        return "causal"

    def rows(self, size: int) -> KVRows:
        """The committed rows, of which there are `size`, that a query behind them may see: window - 1."""
        return KVRows(*self._slice(max(size - self.window + 1, 0), size))

    def _slice(self, low: int, high: int) -> tuple[mx.array, mx.array]:
        assert self._keys is not None and self._values is not None
        rows = slice(low - self._first, high - self._first)
        return self._keys[..., rows, :], self._values[..., rows, :]

    def rewinds(self, size: int) -> bool:
        """Whether all rows that a query at position `size` may see are still there."""
        return size <= self.offset and max(size - self.window + 1, 0) >= self._first

    def rewind(self, size: int) -> None:
        """Forget all rows from position `size` on."""
        assert self.rewinds(min(size, self.offset)), f"rows before {size} are gone"
        self.offset = min(self.offset, size)

    def select(self, start: int, rows: mx.array) -> None:
        """Of the rows from position `start` on these come first, in this order; the others are to go."""
        at = start - self._first
        self._keys, self._values = selected(self._keys, at, rows), selected(self._values, at, rows)

    def snapshot(self) -> Any:
        """What `restore` needs to come back here: references, since live rows are moved, never rewritten."""
        return self.offset, self._first, self._keys, self._values

    def restore(self, saved: Any) -> None:
        """Come back to a snapshot."""
        self.offset, self._first, self._keys, self._values = saved

    def arrays(self) -> list[mx.array]:
        """The arrays to evaluate after a prefill."""
        return [a for a in (self._keys, self._values) if a is not None]


AttentionCache = FullCache | SlidingCache | QuantizedCache
LayerCache = AttentionCache | RecurrentCache

__all__ = [
    "MAX_TRIAL",
    "AttentionCache",
    "FullCache",
    "LayerCache",
    "QuantizedCache",
    "RecurrentCache",
    "SlidingCache",
    "TreeView",
    "make_caches",
    "view",
]


def make_caches(model: nn.Module, *, kv_bits: int | None = None) -> list[LayerCache]:
    """One cache per cache-owning layer, in the order of the model's own.

    With `kv_bits` full-attention layers are quantized, except the last one, whether or not a drafter is
    there: KV-shared layers and drafters read it, and the text must not depend on who reads.
    Raises NotRewindable for a cache class without a rollback rule.
    """
    caches = [_rule(cache) for cache in make_prompt_cache(model)]
    full = [i for i, cache in enumerate(caches) if isinstance(cache, FullCache)]
    if kv_bits is not None:
        for i in full[:-1]:
            caches[i] = QuantizedCache(kv_bits)
    return caches


def _rule(cache: Any) -> LayerCache:
    kind = type(cache)
    if kind is KVCache:
        return FullCache()
    if kind is RotatingKVCache and cache.keep == 0:
        return SlidingCache(cache.max_size)
    if kind is ArraysCache:
        return RecurrentCache(len(cache.cache))
    raise NotRewindable(
        f"no exact rollback rule for the cache class {kind.__name__} of this target: "
        "it cannot be decoded speculatively without risk to its text; use it with mlx-lm"
    )
