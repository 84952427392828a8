"""Append-only KV cache: rollback moves the offset."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import create_attention_mask

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
