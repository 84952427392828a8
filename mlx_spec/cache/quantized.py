"""Append-only KV cache in 8- or 4-bit affine groups: rows are quantized alone, so rollback is an offset."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import create_attention_mask

from mlx_spec.cache.full import selected, write
from mlx_spec.errors import InvalidValue

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
