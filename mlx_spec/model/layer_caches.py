"""The cache of one layer of a target, for one sequence or several: K and V, or a recurrent state.

Attention layers have buffers [lanes, H, columns, D]. Every sequence has its own lane, which ends at its own
column. A pass writes T rows after the end of each; shorter blocks are padded. Padding lies after all rows
that its lane's queries see, and the next pass overwrites it. So padding needs no mask, and rollback changes a
number and copies nothing. Attention always reads rows in the order of the text, after any mix of single
steps, blocks and rollbacks. A kernel deals the keys that it reads to partial sums by their index. So the
index of a key is its position modulo VIEW_STEP, in every pass: alone, in a block and in a batch. Then the
sums of a row equal the sums of plain decoding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from mlx_spec.errors import InvalidValue, NotRewindable
from mlx_spec.types import FULL, SLIDING, KVRows

MAX_UNCOMMITTED = 64  # rows that every cache can take back at any time: a chunk of a scored prompt
WINDOW_SLACK = 256  # rows that a window appends before it moves to the front of the buffers; > VIEW_STEP
# Positions. Attention reads a window from a multiple of it on. Metal deals the keys of a kernel to 32
# partial sums in turn, or in two passes to 32 to 1,024 sums. Up to 128 their order is kept.
VIEW_STEP = 128

Mask = mx.array | str | None
Blocks = Sequence[tuple[int, int]]  # positions: the first one of each block, and the one after its last
Packed = tuple[mx.array, mx.array, mx.array]  # quantized rows: packed weights, scales, biases


class Columns:
    """The columns of every lane in the buffers of all layers with the same window.

    Column c of lane i holds position `first[i] + c`. In full attention all `first` are 0. A window moves
    along the text. Short sequences may begin after column 0, so that all windows lie side by side. Every
    `first` is a multiple of VIEW_STEP, so they end up to VIEW_STEP - 1 columns apart.

    Some models name a wider window than their caches have. Then a token of a prompt sees `reach` tokens. A
    generated token, which is alone in its pass in mlx-lm, sees `window`. The first mask that the model asks
    for tells `reach`, when all rows are still there.
    """

    def __init__(self, window: int | None, lanes: int) -> None:
        self.window = window
        self.reach = window or 0
        self.lanes = lanes  # of the buffers; the first ones are in use
        self.count = 0  # columns of the buffers
        self.first: list[int] = []  # by lane: the position in column 0
        self.oldest: list[int] = []  # by lane: the first position that it holds

    def first_beside(self, size: int, sizes: Sequence[int]) -> int:
        """Return the position in column 0 of a new lane of `size` tokens; it ends near the others."""
        if self.window is None:
            return 0
        needed = size - min(size, self.reach - 1 + MAX_UNCOMMITTED)  # the last one that column 0 may hold
        beside = size - max((end - first for end, first in zip(sizes, self.first, strict=True)), default=0)
        return step_below(min(needed, beside + VIEW_STEP - 1))

    def plan(self, ends: Sequence[int], T: int) -> tuple[list[int], int]:
        """Return `first` and the number of columns for T rows after the `ends` of the lanes."""
        first = self.first
        need = max(end - f for end, f in zip(ends, first, strict=True)) + T
        if need <= self.count:
            return first, self.count
        if self.window is None:
            return first, capacity_for(need)
        kept = min(max(ends), self.reach - 1 + MAX_UNCOMMITTED)
        return [step_below(end - kept) for end in ends], kept + T + WINDOW_SLACK

    def begin(self, ends: Sequence[int], T: int, *, reads_prompt: bool = False, blocks: Blocks = ()) -> None:
        """Prepare the columns of a pass of T rows after the `ends` of the lanes.

        Within each of `blocks` attention is bidirectional. Only a pass of one sequence has blocks.
        """
        self.rows, self.T, self.reads_prompt, self._blocks = len(ends), T, reads_prompt, blocks
        self.starts = [end - first for end, first in zip(ends, self.first, strict=True)]
        seen = self.reach if reads_prompt else None
        visible = [self.oldest_visible(end, seen) - f for end, f in zip(ends, self.first, strict=True)]
        self.low, self.high = step_below(min(visible)), max(self.starts) + T  # columns that attention reads
        self.is_level = len(set(self.starts)) == 1  # all lanes write the same columns, so one slice does
        self._is_even = self.is_level and len(set(visible)) == 1  # all lanes need the same mask
        self._masks: dict[int | None, mx.array] = {}
        self._row_indices: dict[int, mx.array] = {}

    def oldest_visible(self, position: int, window: int | None = None) -> int:
        """Return the first position that the query at `position` sees; by default as a generated token."""
        return 0 if self.window is None else max(position - (window or self.window) + 1, 0)

    def visible(self, lane: int, size: int) -> tuple[slice, slice, slice]:
        """Return the index of the rows in one lane that the query at position `size` sees."""
        first = self.first[lane]
        return slice(lane, lane + 1), slice(None), slice(self.oldest_visible(size) - first, size - first)

    def mask(self, T: int, window: int | None, return_array: bool) -> Mask:
        """Return the mask of T queries a lane over the columns low to high: bool, or "causal", or None."""
        if self.window is not None:
            self.reach = max(self.reach, window or 0)
            window = min(window or self.window, self.reach if self.reads_prompt else self.window)
        crosses = window is not None and self.high - self.low > window
        if self._is_even and not crosses and not return_array and not self._blocks:
            return None if T == 1 else "causal"
        if window not in self._masks:
            column = mx.arange(self.low, self.high, dtype=mx.int32)
            query = mx.array(self.starts, dtype=mx.int32)[:, None] + mx.arange(T, dtype=mx.int32)  # [B, T]
            begin = -mx.array(self.first, dtype=mx.int32)[:, None]  # column of position 0
            oldest = begin if window is None else mx.maximum(query - (window - 1), begin)
            last = query
            for start, end in self._blocks:
                low, high = start - self.first[0], end - self.first[0]
                last = mx.where((query >= low) & (query < high), high - 1, last)
            seen = (column <= last[..., None]) & (column >= oldest[..., None])
            self._masks[window] = seen[:, None]  # [B, 1, T, high - low]
        return self._masks[window]

    def row_indices(self, heads: int) -> mx.array:
        """Return the index of the rows [B, H, T] of a pass in buffers [lanes * H * columns, D]."""
        if heads not in self._row_indices:
            column = mx.array(self.starts, dtype=mx.int32)[:, None] + mx.arange(self.T, dtype=mx.int32)
            begin = mx.arange(self.rows * heads, dtype=mx.int32).reshape(self.rows, heads, 1) * self.count
            self._row_indices[heads] = (begin + column[:, None]).reshape(-1, 1)
        return self._row_indices[heads]


class AttentionCache:
    """K and V of one attention layer, with the interface that unmodified mlx-lm models use.

    `offset` is an int if all sequences have one length, else an array [B], as in mlx-lm's own batches.
    """

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self.offset: int | mx.array = 0
        self.buffers: list[mx.array] = []  # keys and values [lanes, H, columns, D]; none before any row

    def fresh(self, columns: Callable[[int | None], Columns]) -> Self:
        """Return a cache of this kind without rows, in the columns of its window."""
        fresh = copy.copy(self)
        fresh.columns, fresh.offset, fresh.buffers = columns(self.columns.window), 0, []
        return fresh

    def arrays(self) -> list[mx.array]:
        return self.buffers

    def references(self, size: int) -> list[mx.array]:
        """Return its rows of the first `size` positions, which later passes do not change."""
        return [buffer[:, :, : size - self.columns.first[0]] for buffer in self.buffers]

    def restore(self, saved: Sequence[mx.array | None]) -> None:
        """Take over saved rows as slices: the next pass writes into its own arrays."""
        self.buffers = [array[:] for array in saved if array is not None]

    @property
    def attention_type(self) -> str:
        return FULL if self.columns.window is None else SLIDING

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array] | tuple[Packed, Packed]:
        """Write [B, H, T, D] and return the columns that the lanes see."""
        self._write([keys, values])
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the columns of the last `update_and_fetch`. mlx-lm's KV-shared layers call this."""
        keys, values = self._fetch()
        return keys, values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """Return the mask of N queries a lane over the columns that `update_and_fetch` will return."""
        return self.columns.mask(N, window_size, return_array)

    @property
    def keys(self) -> mx.array:
        """Refuse models that read or replace the arrays of their caches, for example to rank the keys."""
        raise NotRewindable(
            "this target reads the arrays of its caches by itself, and no rollback is known to be exact for "
            "that: it cannot be decoded speculatively without risk to its text; use it with mlx-lm"
        )

    values = keys

    def rows(self, lane: int, size: int) -> KVRows:
        """Return the rows of one lane that the query at position `size` sees."""
        keys, values = (buffer[self.columns.visible(lane, size)] for buffer in self.buffers)
        return KVRows(keys, values)

    def keep_rows(self, start: int, rows: mx.array) -> None:
        """Move the rows at positions `start + rows` of the first lane to positions from `start` on."""
        start -= self.columns.first[0]
        for buffer in self.buffers:
            buffer[:1, :, start : start + rows.size] = buffer[:1, :, start + rows]

    def _write(self, written: Sequence[mx.array]) -> None:
        """Write rows [B, H, T, D], one part for each buffer, in place."""
        at = self.columns
        if not self.buffers:
            self.buffers = [_zeros(array, at) for array in written]
        for i, rows in enumerate(written):
            if at.is_level:
                self.buffers[i][: at.rows, :, at.starts[0] : at.starts[0] + at.T] = rows
                continue
            shape = self.buffers[i].shape
            flat = self.buffers[i].reshape(-1, shape[-1])  # no other reference is left: written in place
            indices, rows = at.row_indices(shape[1]), rows.reshape(-1, shape[-1])
            self.buffers[i] = mx.put_along_axis(flat, indices, rows, axis=0).reshape(shape)

    def _fetch(self) -> list[mx.array]:
        """Return the columns that the lanes see, of all buffers."""
        at = self.columns
        return [buffer[: at.rows, :, at.low : at.high] for buffer in self.buffers]

    def rearrange(self, lanes: int, count: int, first: Sequence[int], ends: Sequence[int]) -> None:
        """Make new buffers in which column 0 of each lane holds the position `first`."""
        old = self.columns
        for i, buffer in enumerate(self.buffers):
            made = mx.zeros((lanes, buffer.shape[1], count, buffer.shape[3]), buffer.dtype)
            for lane, (begin, end) in enumerate(zip(first, ends, strict=True)):
                low = max(begin, old.oldest[lane])
                source = buffer[lane, :, low - old.first[lane] : end - old.first[lane]]
                made[lane, :, low - begin : end - begin] = source
            self.buffers[i] = made

    def join(self, lone: AttentionCache, lane: int, size: int) -> None:
        """Move the rows of a cache of one sequence to a free lane."""
        at, its_first = self.columns, lone.columns.first[0]
        if not self.buffers:
            self.buffers = [_zeros(buffer, at) for buffer in lone.buffers]
        low, first = at.oldest[lane], at.first[lane]
        for mine, its in zip(self.buffers, lone.buffers, strict=False):  # one without tokens has no buffers
            held = its[0, :, low - its_first : size - its_first]
            mine[lane, :, low - first : size - first] = held
        lone.buffers = []

    def copy(self, lone: AttentionCache, lane: int, size: int) -> None:
        """Copy the rows of a lane to the cache of one sequence."""
        oldest, first = self.columns.oldest[lane], self.columns.first[lane]
        rows = (slice(lane, lane + 1), slice(None), slice(oldest - first, size - first))
        before = [(0, 0), (0, 0), (oldest - lone.columns.first[0], 0), (0, 0)]
        lone.buffers = [mx.contiguous(mx.pad(buffer[rows], before)) for buffer in self.buffers]

    def fill(self, lane: int, last: int, end: int) -> None:
        """Copy lane `last` to `lane`, up to column `end`."""
        low = self.columns.oldest[last] - self.columns.first[last]
        for buffer in self.buffers:
            buffer[lane, :, low:end] = buffer[last, :, low:end]


class ChunkCache(AttentionCache):
    """K and V of a layer in which a token sees its own chunk only. Its model builds the mask.

    A window as long as a chunk holds all tokens that a query can see. Llama 4 of mlx-lm reads
    `start_position` and calls `maybe_trim_front`.
    """

    @property
    def start_position(self) -> int:
        """Return the position of the first row that `update_and_fetch` will return."""
        return self.columns.low + self.columns.first[0]

    def maybe_trim_front(self) -> None:
        """Do nothing: a window drops its old rows anyway."""


class QuantizedCache(AttentionCache):
    """K and V of one layer, each as packed weights, scales and biases; rows are quantized one by one."""

    def __init__(self, columns: Columns, bits: int) -> None:
        super().__init__(columns)
        self.bits = bits  # mlx-lm's attention reads `bits` and `group_size`
        self.group_size = 64

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Packed, Packed]:
        self.group_size = _group_size(keys.shape[-1], values.shape[-1])
        quantized = [mx.quantize(rows, group_size=self.group_size, bits=self.bits) for rows in (keys, values)]
        self._write([array for packed in quantized for array in packed])
        k, k_scales, k_biases, v, v_scales, v_biases = self._fetch()
        return (k, k_scales, k_biases), (v, v_scales, v_biases)


class RecurrentCache(ArraysCache):
    """The state arrays [B, ...] of one recurrent layer: delta nets, convolutions, Mamba.

    A running state cannot be shortened. Models replace its arrays and never write into them, so a saved
    state is a list of references. After a rollback the target writes the kept rows again.
    """

    def __init__(self, arrays: int) -> None:
        super().__init__(arrays)
        self.restore([None] * arrays)

    def fresh(self, columns: Callable[[int | None], Columns]) -> Self:
        fresh = copy.copy(self)
        fresh.restore([None] * len(self.cache))
        return fresh

    def references(self, size: int) -> list[mx.array]:
        """Return the committed state; none before any row."""
        return [array for array in self.committed if array is not None]

    def arrays(self) -> list[mx.array]:
        """Return the arrays after the last pass; none before any row."""
        state: Any = self.cache
        return [array for array in state if array is not None]

    def restore(self, saved: Sequence[mx.array | None]) -> None:
        """Return to a saved state. It counts as committed."""
        state: Any = list(saved)  # the base class has no types
        self.cache = state
        self.committed = list(saved)  # the state before the uncommitted rows

    def begin(self, rows: Sequence[int], T: int) -> None:
        """Prepare a pass of T rows in each lane. Rows after the first `rows` of a lane are padding."""
        lengths: Any = None if min(rows) == T else mx.array(list(rows), dtype=mx.int32)
        self.lengths = lengths

    def settle(self, keep: Sequence[bool]) -> None:
        """Commit the last pass of each lane if `keep`, else return to the state before it."""
        if all(keep) or not any(keep):
            self.restore(self.cache if all(keep) else self.committed)
            return
        kept, committed = mx.array(list(keep)), [array for array in self.committed if array is not None]
        self.restore([_by_lane(kept, *pair) for pair in zip(self.arrays(), committed, strict=True)])

    def join(self, lone: RecurrentCache) -> None:
        """Move the state of one sequence behind the others."""
        pairs = zip(self.arrays(), lone.arrays(), strict=True)
        self.restore([mx.concatenate(list(pair)) for pair in pairs] if self.arrays() else lone.arrays())
        lone.restore([None] * len(lone.cache))

    def copy(self, lone: RecurrentCache, lane: int) -> None:
        """Give the cache of one sequence the committed state of a lane."""
        lane_of = slice(lane, lane + 1)
        lone.restore([state if state is None else mx.contiguous(state[lane_of]) for state in self.committed])

    def keep(self, lanes: Sequence[int]) -> None:
        """Keep these lanes in this order, in the state after the last pass and in the committed one."""
        order, committed = mx.array(list(lanes), dtype=mx.int32), self.committed
        self.restore([state[order] for state in self.arrays()])
        self.committed = [None if state is None else state[order] for state in committed]


LayerCache = AttentionCache | RecurrentCache


def _by_lane(chosen: mx.array, yes: mx.array, no: mx.array) -> mx.array:
    """Return for each lane the state in `yes` if `chosen` [B] is True, else the state in `no`."""
    return mx.where(chosen.reshape(-1, *[1] * (yes.ndim - 1)), yes, no)


def lanes_without(lane: int, count: int) -> list[int]:
    """Return the `count` lanes in their order after one has left: the last one takes its place."""
    lanes = list(range(count - 1))
    if lane < count - 1:
        lanes[lane] = count - 1
    return lanes


def capacity_for(rows: int) -> int:
    """Return the capacity of a new buffer for `rows` rows: a quarter more, in steps of 256."""
    return -(-(rows + rows // 4) // 256) * 256


def step_below(position: int) -> int:
    """Return the largest multiple of VIEW_STEP that is at most `position`."""
    return position // VIEW_STEP * VIEW_STEP


def _zeros(like: mx.array, at: Columns) -> mx.array:
    _, heads, _, width = like.shape
    return mx.zeros((at.lanes, heads, at.count, width), like.dtype)


def _group_size(*head_dims: int) -> int:
    """Return the largest group size that divides every head dimension. Raises InvalidValue if none does."""
    for size in (64, 32):
        if all(dim % size == 0 for dim in head_dims):
            return size
    raise InvalidValue(
        f"a quantized KV cache needs head dimensions divisible by 32, this target has {head_dims}: "
        "use it without kv_bits"
    )
