"""The caches of several sequences in shared buffers [lanes, H, columns, D], for one pass over all of them.

Every sequence has a lane and an end of its own. A pass writes T rows after the end of each; shorter blocks
are padded. Padding lies after all rows that its lane's queries see, and the next pass overwrites it. So there
is no mask for padding, and rollback is a number: nothing is copied.

Lanes 0 to B - 1 are in use. A lane that becomes free is filled with the last one.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_spec.model.caches import (
    MAX_UNCOMMITTED,
    WINDOW_SLACK,
    LayerCache,
    Packed,
    QuantizedCache,
    RecurrentCache,
    capacity_for,
)
from mlx_spec.types import KVRows

FIRST_LANES = 2  # lanes of new buffers; they double when there are too few
FREE_SHARE = 4  # buffers shrink when less than 1 / FREE_SHARE of their lanes is in use

Mask = mx.array | str | None


class Columns:
    """The place of every lane in the buffers of all layers with the same window.

    Column c of lane i holds position `first[i] + c`. In full attention all `first` are 0. A window moves
    along the text, and short sequences may begin after column 0, so that all windows lie side by side.
    """

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.first: list[int] = []
        self.oldest: list[int] = []  # the first position that a lane holds
        self.count = 0  # columns of the buffers

    def end_column(self, size: int, sizes: Sequence[int]) -> int:
        """Return the column at which a sequence of `size` tokens should end beside others."""
        if self.window is None:
            return size
        kept = min(size, self.window - 1 + MAX_UNCOMMITTED)
        return max([kept, *(other - first for other, first in zip(sizes, self.first, strict=True))])

    def plan(self, sizes: Sequence[int], T: int) -> tuple[list[int], int]:
        """Return `first` and the number of columns that a pass of T rows needs."""
        first = self.first
        need = max(size - f for size, f in zip(sizes, first, strict=True)) + T
        if need <= self.count:
            return first, self.count
        if self.window is None:
            return first, capacity_for(need)
        kept = min(max(sizes), self.window - 1 + MAX_UNCOMMITTED)
        return [size - kept for size in sizes], kept + T + WINDOW_SLACK

    def begin(self, sizes: Sequence[int], T: int) -> None:
        """Set what the layers need for a pass of T rows in each lane."""
        self.rows, self.T = len(sizes), T
        self.starts = [size - first for size, first in zip(sizes, self.first, strict=True)]
        visible = [self._visible(size) - f for size, f in zip(sizes, self.first, strict=True)]
        self.low, self.high = min(visible), max(self.starts) + T
        self.is_level = len(set(self.starts)) == 1  # one slice takes the rows of all lanes
        self._is_even = self.is_level and len(set(visible)) == 1  # all lanes need the same mask
        self._masks: dict[int | None, mx.array] = {}
        self._places: dict[int, mx.array] = {}

    def _visible(self, size: int) -> int:
        """Return the first position that the query at position `size` sees."""
        return 0 if self.window is None else max(size - self.window + 1, 0)

    def visible(self, lane: int, size: int) -> tuple[slice, slice, slice]:
        """Return the index of the rows in one lane that the query at position `size` sees."""
        first = self.first[lane]
        return slice(lane, lane + 1), slice(None), slice(self._visible(size) - first, size - first)

    def mask(self, T: int, window: int | None, return_array: bool) -> Mask:
        """Return the mask of T queries a lane over the columns low to high: bool, or "causal", or None."""
        window = window or self.window
        crosses = window is not None and self.high - self.low > window
        if self._is_even and not crosses and not return_array:
            return None if T == 1 else "causal"
        if window not in self._masks:
            column = mx.arange(self.low, self.high, dtype=mx.int32)
            query = mx.array(self.starts, dtype=mx.int32)[:, None] + mx.arange(T, dtype=mx.int32)  # [B, T]
            begin = -mx.array(self.first, dtype=mx.int32)[:, None]  # column of position 0
            oldest = begin if window is None else mx.maximum(query - (window - 1), begin)
            seen = (column <= query[..., None]) & (column >= oldest[..., None])
            self._masks[window] = seen[:, None]  # [B, 1, T, high - low]
        return self._masks[window]

    def places(self, heads: int) -> mx.array:
        """Return the index of the rows [B, H, T] of a pass in buffers [lanes * H * columns, D]."""
        if heads not in self._places:
            column = mx.array(self.starts, dtype=mx.int32)[:, None] + mx.arange(self.T, dtype=mx.int32)
            begin = mx.arange(self.rows * heads, dtype=mx.int32).reshape(self.rows, heads, 1) * self.count
            self._places[heads] = (begin + column[:, None]).reshape(-1, 1)
        return self._places[heads]


class SharedCache:
    """K and V of one attention layer. It has what unmodified mlx-lm models use of a cache.

    `offset` is an int where all sequences have one length, else an array [B], as in mlx-lm's own batches.
    """

    def __init__(self, columns: Columns, attention_type: str) -> None:
        self.columns = columns
        self.attention_type = attention_type
        self.offset: int | mx.array = 0
        self.buffers: list[mx.array] = []  # keys and values [lanes, H, columns, D]

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array] | tuple[Packed, Packed]:
        """Write [B, H, T, D] and return the columns that the lanes see."""
        self.write([keys, values])
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the columns of the last `update_and_fetch`. mlx-lm's KV-shared layers call this."""
        keys, values = self.fetch()
        return keys, values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """Return the mask of N queries a lane over the columns that `update_and_fetch` will return."""
        return self.columns.mask(N, window_size, return_array)

    def rows(self, lane: int, size: int) -> KVRows:
        """Return the rows of one lane that the query at position `size` sees."""
        keys, values = (buffer[self.columns.visible(lane, size)] for buffer in self.buffers)
        return KVRows(keys, values)

    def write(self, parts: Sequence[mx.array]) -> None:
        """Write rows [B, H, T, D], one part for each buffer, in place."""
        at = self.columns
        for i, rows in enumerate(parts):
            if at.is_level:
                self.buffers[i][: at.rows, :, at.starts[0] : at.starts[0] + at.T] = rows
                continue
            shape = self.buffers[i].shape
            flat = self.buffers[i].reshape(-1, shape[-1])  # no other reference is left: written in place
            places, rows = at.places(shape[1]), rows.reshape(-1, shape[-1])
            self.buffers[i] = mx.put_along_axis(flat, places, rows, axis=0).reshape(shape)

    def fetch(self) -> list[mx.array]:
        """Return the columns that the lanes see, of all buffers."""
        at = self.columns
        return [buffer[: at.rows, :, at.low : at.high] for buffer in self.buffers]

    def rearrange(self, lanes: int, count: int, first: Sequence[int], sizes: Sequence[int]) -> None:
        """Make new buffers in which column 0 of each lane holds the position `first`."""
        old = self.columns
        for i, buffer in enumerate(self.buffers):
            made = mx.zeros((lanes, buffer.shape[1], count, buffer.shape[3]), buffer.dtype)
            for lane, (begin, size) in enumerate(zip(first, sizes, strict=True)):
                low = max(begin, old.oldest[lane])
                source = buffer[lane, :, low - old.first[lane] : size - old.first[lane]]
                made[lane, :, low - begin : size - begin] = source
            self.buffers[i] = made

    def join(self, home: LayerCache, lane: int, lanes: int, size: int) -> None:
        """Copy the rows of a cache of one sequence to a free lane."""
        assert not isinstance(home, RecurrentCache)
        at, buffers = self.columns, home.take()
        if not self.buffers:
            shapes = [(lanes, b.shape[1], at.count, b.shape[3]) for b in buffers]
            self.buffers = [mx.zeros(s, b.dtype) for s, b in zip(shapes, buffers, strict=True)]
        low, first = at.oldest[lane], at.first[lane]
        for mine, its in zip(self.buffers, buffers, strict=True):
            mine[lane, :, low - first : size - first] = its[0, :, low - home.first : size - home.first]

    def leave(self, home: LayerCache, lane: int, size: int) -> None:
        """Copy the rows of a lane to the cache of one sequence."""
        assert not isinstance(home, RecurrentCache)
        low, first = self.columns.oldest[lane], self.columns.first[lane]
        rows = (slice(lane, lane + 1), slice(None), slice(low - first, size - first))
        home.put([mx.contiguous(buffer[rows]) for buffer in self.buffers], low, size)

    def fill(self, lane: int, last: int, end: int) -> None:
        """Copy lane `last` to `lane`, up to column `end`."""
        low = self.columns.oldest[last] - self.columns.first[last]
        for buffer in self.buffers:
            buffer[lane, :, low:end] = buffer[last, :, low:end]


class SharedQuantizedCache(SharedCache):
    """K and V of one layer, each as packed weights, scales and biases; rows are quantized one by one."""

    def __init__(self, columns: Columns, home: QuantizedCache) -> None:
        super().__init__(columns, home.attention_type)
        self.bits, self.group_size = home.bits, home.group_size  # mlx-lm's attention reads them

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Packed, Packed]:
        """Write [B, H, T, D] and return the columns that the lanes see, packed."""
        parts = [mx.quantize(rows, group_size=self.group_size, bits=self.bits) for rows in (keys, values)]
        self.write([array for packed in parts for array in packed])
        k, k_scales, k_biases, v, v_scales, v_biases = self.fetch()
        return (k, k_scales, k_biases), (v, v_scales, v_biases)


class SharedState(RecurrentCache):
    """The state arrays [B, ...] of one recurrent layer. They take one token of every sequence at a time."""

    def __init__(self, home: RecurrentCache) -> None:
        super().__init__(len(home.cache))
        self._committed: list[mx.array] = []

    def settle(self, keep: bool) -> None:
        """Commit the last pass, or return to the state before it."""
        if keep:
            self._committed = self.arrays()
        else:
            self.restore(self._committed)

    def join(self, home: LayerCache) -> None:
        """Append a sequence."""
        assert isinstance(home, RecurrentCache)
        pairs = zip(self.arrays(), home.arrays(), strict=True)
        self.restore([mx.concatenate(list(pair)) for pair in pairs] if self.arrays() else home.arrays())
        self.settle(keep=True)

    def leave(self, home: LayerCache | None, lane: int, lanes: Sequence[int]) -> None:
        """Give `home` the state of a lane, unless it is None, and keep these lanes in this order."""
        if isinstance(home, RecurrentCache):
            home.restore([state[lane : lane + 1] for state in self._committed])
        order = mx.array(list(lanes), dtype=mx.int32)
        self.restore([state[order] for state in self.arrays()])
        self._committed = [state[order] for state in self._committed]


class SharedCaches:
    """The caches of all layers, and the number of tokens of every sequence in them."""

    def __init__(self) -> None:
        self.layers: list[SharedCache | SharedState] = []
        self.sizes: list[int] = []  # committed tokens, by lane
        self._columns: dict[int | None, Columns] = {}  # by window
        self._lanes = FIRST_LANES
        self._uncommitted = 0  # rows that the last pass wrote in each lane

    @property
    def attention(self) -> list[SharedCache]:
        """Return the caches of attention layers."""
        return [layer for layer in self.layers if isinstance(layer, SharedCache)]

    @property
    def states(self) -> list[SharedState]:
        """Return the caches of recurrent layers."""
        return [layer for layer in self.layers if isinstance(layer, SharedState)]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all buffers."""
        states = [array for state in self.states for array in state.arrays()]
        return sum(a.nbytes for a in [*states, *(b for c in self.attention for b in c.buffers)])

    def begin(self, T: int) -> None:
        """Prepare all layers for a pass of T rows in each lane."""
        if self._uncommitted:  # the last pass was interrupted
            self.commit([0] * len(self.sizes))
        self._make_room(T, len(self.sizes))
        self._uncommitted = T
        sizes = self.sizes
        offset = sizes[0] if len(set(sizes)) == 1 else mx.array(sizes, dtype=mx.int32)
        for columns in self._columns.values():
            columns.begin(sizes, T)
        for cache in self.attention:
            cache.offset = offset

    def commit(self, keep: Sequence[int]) -> None:
        """Keep the first `keep` rows of each lane and drop the others."""
        assert all(0 <= k <= self._uncommitted for k in keep), f"commit of {keep} of {self._uncommitted} rows"
        for state in self.states:
            assert len(set(keep)) == 1, "a recurrent state takes one token of every sequence"
            state.settle(keep[0] > 0)
        self.sizes = [size + k for size, k in zip(self.sizes, keep, strict=True)]
        self._uncommitted = 0

    def join(self, homes: Sequence[LayerCache], size: int) -> None:
        """Move a sequence of `size` committed tokens into a free lane."""
        assert not self._uncommitted, "a sequence joins after a commit"
        if not self.layers:
            self.layers = [self._shared(home) for home in homes]
        held = {home.window: home.first for home in homes if not isinstance(home, RecurrentCache)}
        for window, columns in self._columns.items():
            columns.first.append(size - columns.end_column(size, self.sizes))
            columns.oldest.append(max(held[window], columns.first[-1]))
        self.sizes.append(size)
        self._make_room(1, len(self.sizes) - 1)
        for home, layer in zip(homes, self.layers, strict=True):
            if isinstance(layer, SharedState):
                layer.join(home)
            else:
                layer.join(home, len(self.sizes) - 1, self._lanes, size)

    def leave(self, lane: int, homes: Sequence[LayerCache] | None) -> None:
        """Remove a sequence; the last lane takes its place. With `homes`, its rows are copied there."""
        last = len(self.sizes) - 1
        order = [*range(lane), *[last][: last - lane], *range(lane + 1, last)]
        for i, layer in enumerate(self.layers):
            home = None if homes is None else homes[i]
            if isinstance(layer, SharedState):
                layer.leave(home, lane, order)
                continue
            if home is not None:
                layer.leave(home, lane, self.sizes[lane])
            if lane < last:
                end = self.sizes[last] - layer.columns.first[last] + self._uncommitted
                layer.fill(lane, last, end)
        for numbers in (self.sizes, *(n for c in self._columns.values() for n in (c.first, c.oldest))):
            numbers[lane] = numbers[last]
            numbers.pop()
        if not self.sizes:
            self.layers, self._columns, self._lanes = [], {}, FIRST_LANES
        else:
            self._shrink()

    def _shared(self, home: LayerCache) -> SharedCache | SharedState:
        if isinstance(home, RecurrentCache):
            return SharedState(home)
        columns = self._columns.setdefault(home.window, Columns(home.window))
        if isinstance(home, QuantizedCache):
            return SharedQuantizedCache(columns, home)
        return SharedCache(columns, home.attention_type)

    def _make_room(self, T: int, used: int) -> None:
        """Provide lanes for all sequences and columns for T more rows of each; `used` lanes hold rows."""
        lanes = self._lanes
        while lanes < len(self.sizes):
            lanes *= 2
        for columns in self._columns.values():
            first, count = columns.plan(self.sizes, T)
            if (lanes, count, first) != (self._lanes, columns.count, columns.first):
                self._rearrange(columns, lanes, count, first, used)
        self._lanes = lanes

    def _shrink(self) -> None:
        """Return memory when most lanes are free, or most columns since the longest sequence left."""
        lanes = self._lanes
        while len(self.sizes) * FREE_SHARE <= lanes and lanes > FIRST_LANES:
            lanes //= 2
        for columns in self._columns.values():
            need = max(size - first for size, first in zip(self.sizes, columns.first, strict=True))
            count = capacity_for(need + self._uncommitted)
            if lanes < self._lanes or (columns.window is None and count * FREE_SHARE <= columns.count):
                count = min(count, columns.count) if columns.window is None else columns.count
                self._rearrange(columns, lanes, count, columns.first, len(self.sizes))
        self._lanes = lanes

    def _rearrange(self, columns: Columns, lanes: int, count: int, first: list[int], used: int) -> None:
        ends = [size + self._uncommitted for size in self.sizes[:used]]
        for cache in self.attention:
            if cache.columns is columns:
                cache.rearrange(lanes, count, first[:used], ends)
        columns.oldest = [max(old, new) for old, new in zip(columns.oldest, first, strict=True)]
        columns.first, columns.count = first, count
