"""Sliding-window KV cache with slack: rollback moves the offset, also past the window."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from mlx_spec.cache.full import selected
from mlx_spec.types import KVRows

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
