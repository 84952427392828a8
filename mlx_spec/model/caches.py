"""KV caches for unmodified mlx-lm models. Each kind has one exact rollback rule, or is refused."""

from __future__ import annotations

from collections.abc import Sequence
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
from mlx_spec.types import CacheState, KVRows

MAX_UNCOMMITTED = 64  # rows that every cache can take back at any time: a chunk of a scored prompt
WINDOW_SLACK = 256  # rows that a sliding cache appends before it moves its window to the front of the buffer
CAPACITY_STEP = 256  # rows; buffers grow in whole steps

Packed = tuple[mx.array, mx.array, mx.array]  # quantized rows: packed weights, scales, biases


def make_caches(model: nn.Module, *, kv_bits: int | None = None) -> list[LayerCache]:
    """Return one cache for each cache-owning layer, in the order of the model's own caches.

    With `kv_bits` all full-attention layers but the last are quantized. KV-shared layers and drafters read
    the last one, and the text must not depend on whether a drafter reads it.
    Raises NotRewindable for a cache class without a rollback rule.
    """
    caches = [_with_rollback(cache) for cache in make_prompt_cache(model)]
    full = [i for i, cache in enumerate(caches) if isinstance(cache, FullCache)]
    if kv_bits is not None:
        for i in full[:-1]:
            caches[i] = QuantizedCache(kv_bits)
    return caches


def _with_rollback(cache: Any) -> LayerCache:
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


class _AppendOnlyCache:
    """A cache that keeps every position: rollback moves `offset`, and the rows after it are dead."""

    attention_type = "full_attention"
    window: int | None = None
    first = 0  # position of row 0 of the buffers

    def __init__(self) -> None:
        self.offset = 0
        self._keys: list[mx.array] = []  # [1, H, capacity, Dk]; quantized: weights, scales and biases
        self._values: list[mx.array] = []

    def _append(self, keys: Sequence[mx.array], values: Sequence[mx.array]) -> None:
        start, end = self.offset, self.offset + keys[0].shape[2]
        for buffers, parts in ((self._keys, keys), (self._values, values)):
            old: Sequence[mx.array | None] = buffers or [None] * len(parts)
            buffers[:] = [write_rows(b, part, start, end) for b, part in zip(old, parts, strict=True)]
        self.offset = end

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Return the mask of a block of N queries, as mlx-lm's own caches do."""
        mask: mx.array | str | None = create_attention_mask(N, self.offset, return_array, window_size)
        return mask

    def can_rewind(self, size: int) -> bool:
        """Return True if `rewind(size)` is exact."""
        return size <= self.offset

    def rewind(self, size: int) -> None:
        """Drop all rows from position `size` on."""
        self.offset = min(self.offset, size)

    def keep_rows(self, start: int, rows: mx.array) -> None:
        """Move the rows `start + rows` to `start`; the caller drops the rows after them."""
        for buffer in self.arrays():
            _move_rows(buffer, start, rows)

    def snapshot(self) -> Any:
        """Return the state for `restore`."""
        return self.offset

    def restore(self, saved: Any) -> None:
        """Return to a snapshot. Only appends may have followed it."""
        self.rewind(saved)

    def state(self, saved: Any) -> CacheState:
        """Return the rows of a snapshot."""
        return CacheState({str(i): rows[..., :saved, :] for i, rows in enumerate(self.arrays())})

    def load(self, state: CacheState) -> Any:
        """Append the rows of `state` to this empty cache. Return their snapshot."""
        rows = [state.arrays[str(i)] for i in range(len(state.arrays))]
        self._append(rows[: len(rows) // 2], rows[len(rows) // 2 :])
        return self.offset

    def first_size(self, saved: Any) -> int:
        """Return the smallest size that `rewind` can return to from a snapshot."""
        return 0

    def take(self) -> list[mx.array]:
        """Return the buffers and keep none until `put`."""
        buffers, self._keys, self._values = self.arrays(), [], []
        return buffers

    def put(self, buffers: list[mx.array], first: int, size: int) -> None:
        """Take buffers that hold the positions up to `size`."""
        half = len(buffers) // 2
        self._keys, self._values, self.offset = buffers[:half], buffers[half:], size

    def arrays(self) -> list[mx.array]:
        """Return the arrays to evaluate after a prefill."""
        return [*self._keys, *self._values]


class FullCache(_AppendOnlyCache):
    """K and V of every position, in a preallocated buffer."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append [1, H, T, D] and return all rows [1, H, S, D]."""
        self._append([keys], [values])
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return all rows [1, H, S, D]. mlx-lm's KV-shared layers call this."""
        return self._keys[0][..., : self.offset, :], self._values[0][..., : self.offset, :]

    def rows(self, size: int) -> KVRows:
        """Return the first `size` rows, all of them committed."""
        return KVRows(self._keys[0][..., :size, :], self._values[0][..., :size, :])


class QuantizedCache(_AppendOnlyCache):
    """K and V of every position in 8- or 4-bit affine groups along the head dimension, row by row."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits  # mlx-lm's attention reads `bits` and `group_size`
        self.group_size = 64

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Packed, Packed]:
        self.group_size = _group_size(keys.shape[-1], values.shape[-1])
        self._append(self._quantized(keys), self._quantized(values))
        return self._rows(self._keys), self._rows(self._values)

    def _quantized(self, rows: mx.array) -> Sequence[mx.array]:
        parts: Sequence[mx.array] = mx.quantize(rows, group_size=self.group_size, bits=self.bits)
        return parts

    def _rows(self, buffers: list[mx.array]) -> Packed:
        packed, scales, biases = (buffer[..., : self.offset, :] for buffer in buffers)
        return packed, scales, biases


class SlidingCache:
    """The last `window` positions, in temporal order.

    Rows are appended after the window. When the buffer is full, the live rows move to its front, once in
    WINDOW_SLACK tokens. Attention therefore reads exactly the window in the order of the text, whatever mix
    of single steps, blocks and rollbacks came before: the sums are those of plain decoding. mlx-lm's ring of
    slots reads keys in another order after every wrap and needs a mask for each single step.
    """

    attention_type = "sliding_attention"

    def __init__(self, window: int) -> None:
        self.window = window
        self.offset = 0
        self.first = 0  # position of row 0 of the buffers
        self._visible = 0  # position of the first row that the last block could see
        self._buffers: list[mx.array] = []  # keys and values [1, H, capacity, D]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append [1, H, T, D]. Return the rows that the block can see, [1, H, min(S, window - 1) + T, D]."""
        base, end = self.offset, self.offset + keys.shape[2]
        if not self._buffers or end - self.first > self._buffers[0].shape[2]:
            first = max(base - self.window + 1 - MAX_UNCOMMITTED, self.first)
            old: Sequence[mx.array | None] = self._buffers or (None, None)
            self._buffers = [self._moved(old[0], keys, first), self._moved(old[1], values, first)]
            self.first = first
        else:
            at = slice(base - self.first, end - self.first)
            self._buffers[0][..., at, :] = keys
            self._buffers[1][..., at, :] = values
        self.offset = end
        self._visible = max(base - self.window + 1, 0)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the rows of the last `update_and_fetch`. mlx-lm's KV-shared layers call this."""
        return self._slice(self._visible, self.offset)

    def _moved(self, buffer: mx.array | None, rows: mx.array, first: int) -> mx.array:
        """Return a new buffer from position `first` to the end of `rows`, with room for WINDOW_SLACK more."""
        kept = self.offset - first
        capacity = kept + rows.shape[2] + WINDOW_SLACK
        moved = mx.zeros((*rows.shape[:2], capacity, rows.shape[3]), rows.dtype)
        if buffer is not None:
            moved[..., :kept, :] = buffer[..., first - self.first : self.offset - self.first, :]
        moved[..., kept : kept + rows.shape[2], :] = rows
        return moved

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Return the mask of a block of N queries over the rows that `update_and_fetch` will return."""
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
        """Return those of the first `size` rows that the next query can see: the last window - 1."""
        return KVRows(*self._slice(max(size - self.window + 1, 0), size))

    def _slice(self, low: int, high: int) -> tuple[mx.array, mx.array]:
        rows = slice(low - self.first, high - self.first)
        keys, values = self._buffers
        return keys[..., rows, :], values[..., rows, :]

    def can_rewind(self, size: int) -> bool:
        """Return True if the buffer still has all rows that a query at position `size` can see."""
        return size <= self.offset and max(size - self.window + 1, 0) >= self.first

    def rewind(self, size: int) -> None:
        assert self.can_rewind(min(size, self.offset)), f"rows before {size} are gone"
        self.offset = min(self.offset, size)

    def keep_rows(self, start: int, rows: mx.array) -> None:
        for buffer in self._buffers:
            _move_rows(buffer, start - self.first, rows)

    def snapshot(self) -> Any:
        """Return references for `restore`: live rows are moved, never rewritten."""
        return self.offset, self.first, list(self._buffers)

    def restore(self, saved: Any) -> None:
        self.offset, self.first, buffers = saved
        self._buffers = list(buffers)

    def state(self, saved: Any) -> CacheState:
        """Return the rows of a snapshot; none for an earlier one in the buffers of this cache."""
        offset, first, buffers = saved
        place = {"place": [offset, first]}
        if offset < self.offset and buffers[0] is self._buffers[0]:
            return CacheState(numbers=place)
        names = zip(("keys", "values"), buffers, strict=True)
        return CacheState({name: rows[..., : offset - first, :] for name, rows in names}, place)

    def load(self, state: CacheState) -> Any:
        """Return the snapshot of a state; the newest one is restored first."""
        offset, first = state.numbers["place"]
        arrays = state.arrays
        return offset, first, [arrays["keys"], arrays["values"]] if arrays else list(self._buffers)

    def first_size(self, saved: Any) -> int:
        """Return the smallest size that `rewind` can return to from a snapshot."""
        first: int = saved[1]
        return first + self.window - 1 if first else 0

    def take(self) -> list[mx.array]:
        """Return the buffers and keep none until `put`."""
        buffers, self._buffers = self._buffers, []
        return buffers

    def put(self, buffers: list[mx.array], first: int, size: int) -> None:
        """Take buffers that hold the positions `first` up to `size`."""
        self._buffers, self.first, self.offset = buffers, first, size

    def arrays(self) -> list[mx.array]:
        return self._buffers


class RecurrentCache(ArraysCache):
    """The state arrays of one recurrent layer: delta nets, convolutions, Mamba.

    A running state cannot be shortened. Models replace its arrays and never write into them, so a snapshot
    is a list of references. The target restores it and feeds the kept tokens again.
    """

    attention_type = "recurrent"

    def snapshot(self) -> Any:
        return list(self.cache)

    def restore(self, saved: Any) -> None:
        self.cache = list(saved)

    def state(self, saved: Any) -> CacheState:
        """Return the arrays of a snapshot."""
        return CacheState({str(i): array for i, array in enumerate(saved) if array is not None})

    def load(self, state: CacheState) -> Any:
        """Return the snapshot of a state."""
        return [state.arrays.get(str(i)) for i in range(len(self.cache))]

    def arrays(self) -> list[mx.array]:
        arrays: list[mx.array | None] = list(self.cache)
        return [array for array in arrays if array is not None]


AttentionCache = FullCache | SlidingCache | QuantizedCache
LayerCache = AttentionCache | RecurrentCache


def write_rows(buffer: mx.array | None, rows: mx.array, start: int, end: int) -> mx.array:
    """Write `rows` to start..end of a buffer [1, H, capacity, D]. Return it, grown if it was too short."""
    if buffer is None or end > buffer.shape[2]:
        grown = mx.zeros((*rows.shape[:2], capacity_for(end), rows.shape[3]), rows.dtype)
        if buffer is not None:
            grown[..., :start, :] = buffer[..., :start, :]
        buffer = grown
    buffer[..., start:end, :] = rows
    return buffer


def capacity_for(rows: int) -> int:
    """Return the capacity of a new buffer for so many rows: a quarter more, in whole steps."""
    return -(-(rows + rows // 4) // CAPACITY_STEP) * CAPACITY_STEP


def _move_rows(buffer: mx.array, start: int, rows: mx.array) -> None:
    buffer[..., start : start + rows.size, :] = buffer[..., start + rows, :]


def _group_size(*head_dims: int) -> int:
    """Return the largest group size that divides every head dimension. Raises InvalidValue if none does."""
    for size in (64, 32):
        if all(dim % size == 0 for dim in head_dims):
            return size
    raise InvalidValue(
        f"a quantized KV cache needs head dimensions divisible by 32, this target has {head_dims}: "
        "use it without kv_bits"
    )
