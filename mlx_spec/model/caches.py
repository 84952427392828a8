"""The caches of all layers of an unmodified mlx-lm model, for one sequence or several.

Each kind of cache has one exact rollback rule, or is refused. A sequence begins alone, in caches with one
lane. It may join others in shared buffers, one lane each, and leave them again. Lanes 0 to B - 1 are in use;
the last lane moves to a lane that becomes free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar
from weakref import WeakSet

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_spec.errors import NotRewindable
from mlx_spec.model.layer_caches import (
    MAX_UNCOMMITTED,
    VIEW_STEP,
    AttentionCache,
    Blocks,
    ChunkCache,
    Columns,
    LayerCache,
    QuantizedCache,
    RecurrentCache,
    capacity_for,
    lanes_without,
    step_below,
)
from mlx_spec.model.rewind_points import Arrays, CacheBlock, RewindPoint, RewindReason, Rows, first_size
from mlx_spec.types import CacheState

FIRST_LANES = 2  # lanes of shared buffers; they double when there are too few

Cache = TypeVar("Cache")


class Caches:
    """The caches of all layers, and the number of tokens of every sequence in them."""

    def __init__(self, lanes: int = FIRST_LANES) -> None:
        self.layers: list[LayerCache] = []
        self.sizes: list[int] = []  # committed tokens, by lane
        self.shifts: list[int] = []  # of rotary positions from the index of a token, by lane: after pictures
        self.uncommitted = 0  # rows after them, in each lane
        self._lanes = lanes
        self._groups: list[int] = []  # layers of each cache of the model: 0 if it is one, not a list
        self._columns: dict[int | None, Columns] = {}  # by window
        self.readers = WeakSet[Any]()  # of type `ForkRows`: they have not copied all rows of windows

    @classmethod
    def of_model(cls, model: nn.Module, kv_bits: int | None = None) -> Caches:
        """Return the caches of one sequence without tokens, in the order of the model's own caches.

        With `kv_bits` all full-attention layers but the last are quantized. KV-shared layers and drafters
        read the last one, and the text must not depend on whether a drafter reads it.
        Raises NotRewindable for a cache class without a rollback rule.
        """
        made = cls(lanes=1)
        theirs = make_prompt_cache(model)
        made._groups = [len(cache.caches) if type(cache) is CacheList else 0 for cache in theirs]
        flat = [one for cache in theirs for one in (cache.caches if type(cache) is CacheList else [cache])]
        made.layers = [made._with_rollback(cache) for cache in flat]
        if kv_bits is not None:
            full = [i for i, cache in enumerate(flat) if type(cache) is KVCache]
            for i in full[:-1]:
                made.layers[i] = QuantizedCache(made._columns_for(None), kv_bits)
        made._append(0, dict.fromkeys(made._columns, 0))
        return made

    def for_model(self, layers: Iterable[Cache] | None = None) -> Sequence[Any]:
        """Return the layers, or others in their place, in the form of the model: some are lists."""
        flat: Iterator[Any] = iter(self.layers if layers is None else layers)
        return [tuple(islice(flat, size)) if size else next(flat) for size in self._groups]

    @property
    def attention(self) -> list[AttentionCache]:
        return [layer for layer in self.layers if isinstance(layer, AttentionCache)]

    @property
    def full(self) -> list[AttentionCache]:
        """Return the caches that keep every position."""
        return [cache for cache in self.attention if cache.columns.window is None]

    @property
    def windowed(self) -> list[AttentionCache]:
        """Return the caches that drop old positions."""
        return [cache for cache in self.attention if cache.columns.window is not None]

    @property
    def recurrent(self) -> list[RecurrentCache]:
        return [layer for layer in self.layers if isinstance(layer, RecurrentCache)]

    @property
    def quantization_obstacle(self) -> str | None:
        """Return why `kv_bits` quantizes no layer, None if it quantizes some."""
        if any(isinstance(cache, QuantizedCache) for cache in self.attention):
            return None
        if not self.full:
            return "no layer of this target has full attention"
        kinds = {type(cache) for cache in self.full}
        if others := ", ".join(sorted(kind.__name__ for kind in kinds - {AttentionCache})):
            also = " like the last of its other layers" if AttentionCache in kinds else ""
            return f"this target has full attention with {others}, which stays as it is{also}"
        return "of full attention this target has one layer with K/V, and the last one stays as computed"

    @property
    def unquantized(self) -> list[AttentionCache]:
        """Return the caches of attention layers whose rows a drafter can read."""
        return [cache for cache in self.attention if not isinstance(cache, QuantizedCache)]

    @property
    def prompts_see_further(self) -> bool:
        """Return True if a token sees more when it is part of a prompt than when it is generated."""
        return any(window and columns.reach > window for window, columns in self._columns.items())

    def arrays(self) -> list[mx.array]:
        return [array for layer in self.layers for array in layer.arrays()]

    # --- passes

    def begin(
        self,
        T: int,
        rows: Sequence[int] | None = None,
        *,
        reads_prompt: bool = False,
        blocks: Blocks = (),
        in_all: bool = False,
    ) -> None:
        """Prepare all layers for a pass of T rows in each lane, after the uncommitted rows.

        Rows after the first `rows` of a lane are padding; None if there is no padding. With `reads_prompt`
        they are tokens of a prompt, which see further in some models. Within each of `blocks` attention is
        bidirectional, in layers with a window, or with `in_all` in all layers.
        """
        self._make_room(T, len(self.sizes))
        ends = self._ends(len(self.sizes))
        self.uncommitted += T
        turned = [end + shift for end, shift in zip(ends, self.shifts, strict=True)]
        offset = turned[0] if len(set(turned)) == 1 else mx.array(turned, dtype=mx.int32)
        for window, columns in self._columns.items():
            seen = blocks if in_all or window is not None else ()
            columns.begin(ends, T, reads_prompt=reads_prompt, blocks=seen)
        for cache in self.attention:
            cache.offset = offset
        for state in self.recurrent:
            state.begin(rows or [T], T)

    def commit(self, keep: Sequence[int]) -> None:
        """Keep the first `keep` uncommitted rows of each lane and drop the others.

        Recurrent layers keep all rows of a lane, or none: the caller keeps either 0 or all rows but padding.
        """
        assert all(0 <= k <= self.uncommitted for k in keep), f"commit of {keep} of {self.uncommitted} rows"
        for state in self.recurrent:
            state.settle([k > 0 for k in keep])
        self.sizes = [size + k for size, k in zip(self.sizes, keep, strict=True)]
        self.uncommitted = 0

    def drop(self, rows: int) -> None:
        """Drop the last uncommitted rows, which were padding. Not for recurrent layers."""
        self.uncommitted -= rows

    def keep_path(self, rows: mx.array) -> None:
        """Move these uncommitted rows of the only sequence to the front of the others."""
        for cache in self.attention:
            cache.keep_rows(self.sizes[0], rows)

    # --- the past of one sequence

    @property
    def has_windows(self) -> bool:
        return any(window is not None for window in self._columns)

    def first_size(self) -> int:
        """Return the smallest number of tokens to which the only sequence can be cut back.

        The buffers still have all rows that a query there can see. A state cannot be cut.
        """
        if self.recurrent:
            return self.sizes[0]
        windows = ((c.oldest[0], c.reach) for c in self._columns.values())
        return first_size(windows)

    def move_to(self, size: int, most: int = 128) -> None:
        """Let the only sequence hold `size` tokens. Rows that nothing wrote repeat those that it has.

        It is for checks: every layer sees at most the last `most` tokens, also in full attention.
        """
        for columns in self._columns.values():
            held = self.sizes[0] - columns.first[0]
            columns.window = columns.reach = min(columns.window or most, most)
            columns.first = [step_below(size - min(size, columns.window + MAX_UNCOMMITTED))]
            columns.oldest, columns.count = list(columns.first), size - columns.first[0]
            rows = mx.arange(columns.count) % held
            for cache in self.attention:
                if cache.columns is columns:
                    cache.buffers = [buffer[:, :, rows] for buffer in cache.buffers]
        self.sizes = [size]

    def rewind_point(
        self, size: int, reason: RewindReason = "end", known: Mapping[Rows, CacheBlock] | None = None
    ) -> RewindPoint:
        """Return a rewind point: copies of states, and of the window rows that a query at `size` can see.

        The windows must still have these rows, and a recurrent state must be at `size`. Rows that `known`
        blocks have are shared. One can go back a few tokens more from the end of a prompt, because templates
        append what begins an answer.
        """
        spare = 32 if reason == "end" and not self.recurrent else 0
        blocks, windows = list[CacheBlock](), dict[int, tuple[int, int, int, int]]()
        if self.recurrent:
            blocks.append(CacheBlock((None, size, size), [self._state(layer, size) for layer in self.layers]))
        for window, columns in self._columns.items():
            if window is None:
                continue
            needed = self._rows(columns, size, spare)
            oldest = needed[0][1] if needed else size
            first = step_below(oldest)
            windows[window] = first, oldest, size - first, columns.reach
            blocks += [(known or {}).get(rows) or self._block(rows) for rows in needed]
        return RewindPoint(size, windows, tuple(blocks), reason)

    def _state(self, layer: LayerCache, size: int) -> Arrays:
        """Return a copy of the state of a recurrent layer, at the size of the caches or after it."""
        if not isinstance(layer, RecurrentCache):
            return []
        arrays = layer.committed if size == self.sizes[0] else layer.cache
        return [None if array is None else mx.contiguous(array) for array in arrays]

    def _block(self, rows: Rows) -> CacheBlock:
        """Return copies of the rows of all layers with a window, from a multiple of VIEW_STEP on."""
        window, low, high = rows
        start = self._columns[window].first[0]
        columns = slice(step_below(low) - start, high - start)
        layers = list[Arrays]()
        for layer in self.layers:
            is_other = isinstance(layer, RecurrentCache) or layer.columns.window != window
            buffers = [] if is_other else layer.arrays()
            layers.append([mx.contiguous(buffer[:, :, columns]) for buffer in buffers])
        return CacheBlock(rows, layers)

    def slack(self, known: Mapping[Rows, CacheBlock]) -> int:
        """Return the bytes that `trim` and `drop_windows` free if these blocks are known."""
        freed = 0
        for cache in self.attention:
            columns, size = cache.columns, self.sizes[0]
            needed = self._needed(columns)
            if columns.window is not None and cache.buffers and not self.recurrent:
                missing = (row for row in self._rows(columns, size, 0) if row not in known)
                needed = sum(high - step_below(low) for _, low, high in missing)
            freed += sum(b.nbytes // b.shape[2] * (b.shape[2] - needed) for b in cache.buffers)
        return max(freed, 0)

    def trim(self) -> None:
        """Copy the rows that the only sequence needs to buffers without slack."""
        for columns in self._columns.values():
            end, count = self.sizes[0], self._needed(columns)
            if count < columns.count:
                self._rearrange(columns, 1, count, [0 if columns.window is None else end - count], 1)

    def drop_windows(self, known: Mapping[Rows, CacheBlock]) -> RewindPoint:
        """Return a rewind point at the end, and drop the rows of windows until it is restored."""
        point = self.rewind_point(self.sizes[0], "end", known)
        self._call_readers()
        for cache in self.windowed:
            cache.buffers, cache.columns.count = [], 0
        return point

    def _needed(self, columns: Columns) -> int:
        """Return the number of columns that the only sequence needs, in steps."""
        size = self.sizes[0]
        if columns.window is None:
            return -(-size // 256) * 256
        return size - step_below(columns.oldest_visible(max(size - MAX_UNCOMMITTED, 0), columns.reach))

    def _rows(self, columns: Columns, size: int, spare: int) -> list[Rows]:
        """Return the blocks that a query at `size`, or `spare` positions before it, sees of a window."""
        oldest = step_below(columns.oldest_visible(max(size - spare, 0), columns.reach))
        oldest = max(oldest, columns.oldest[0])
        starts = range(step_below(oldest), size, VIEW_STEP)
        return [(columns.window, max(start, oldest), min(start + VIEW_STEP, size)) for start in starts]

    def full_rows(self, lane: int, size: int) -> list[list[mx.array]]:
        """Return the first `size` rows of a lane, by layer; of layers that keep every position."""
        return [[buffer[lane : lane + 1, :, :size] for buffer in cache.buffers] for cache in self.full]

    def fork(self, rows: Sequence[Sequence[mx.array]], point: RewindPoint, size: int, more: int) -> None:
        """Fill caches without tokens: `size` rows as `full_rows` gives them, windows and states of `point`.

        The rows are copied when they are evaluated, into buffers with room for `more` rows.
        """
        count = capacity_for(size + more)
        if (columns := self._columns.get(None)) is not None:
            columns.count = count
        for cache, arrays in zip(self.full, rows, strict=True):
            free = [mx.zeros((*a.shape[:2], count - size, a.shape[3]), a.dtype) for a in arrays]
            pairs = zip(arrays, free, strict=True)
            cache.buffers = [mx.concatenate(list(pair), axis=2) for pair in pairs]
        self.restore(point)
        self.sizes = [size]

    def restore(self, point: RewindPoint) -> None:
        """Return to a rewind point. Since then, rows of full attention may only have been appended."""
        self._call_readers()
        for window, (first, oldest, count, reach) in point.windows.items():
            columns = self._columns[window]
            columns.first, columns.oldest, columns.count, columns.reach = [first], [oldest], count, reach
        for layer, arrays in zip(self.layers, point.layers(), strict=False):  # of full attention it has none
            if isinstance(layer, RecurrentCache) or layer.columns.window is not None:
                layer.restore(arrays)
        self.sizes, self.uncommitted = [point.size], 0

    def state(self) -> CacheState:
        """Return the committed rows and states of the only sequence."""
        arrays, (size,) = dict[str, mx.array](), self.sizes
        for i, layer in enumerate(self.layers):
            arrays |= {f"{i}.{j}": array for j, array in enumerate(layer.references(size))}
        numbers = {str(w): [c.first[0], c.oldest[0], c.reach] for w, c in self._columns.items()}
        return CacheState(arrays, {**numbers, "size": [size]})

    def load(self, state: CacheState) -> None:
        """Take over the state of caches of the same model. These caches must be new."""
        self.sizes = list(state.numbers["size"])
        for window, columns in self._columns.items():
            first, oldest, reach = state.numbers[str(window)]
            columns.first, columns.oldest, columns.count = [first], [oldest], self.sizes[0] - first
            columns.reach = reach
        for i, layer in enumerate(self.layers):
            if arrays := state.part(str(i)).arrays:  # else no pass was committed
                layer.restore([arrays[str(j)] for j in range(len(arrays))])

    # --- several sequences

    def join(self, lone: Caches) -> None:
        """Move the only sequence of other caches into a free lane. A recurrent one must have tokens."""
        assert not self.uncommitted and not lone.uncommitted, "a sequence joins after a commit"
        lone._call_readers()
        if not self.layers:
            self.layers = [layer.fresh(self._columns_for) for layer in lone.layers]
            self._groups = lone._groups
            for window, columns in self._columns.items():
                columns.reach = lone._columns[window].reach
        size, lane = lone.sizes[0], len(self.sizes)
        self._append(size, {w: columns.oldest[0] for w, columns in lone._columns.items()}, lone.shifts[0])
        self._make_room(1, lane)
        for its, cache in zip(lone.attention, self.attention, strict=True):
            cache.join(its, lane, size)
        for its_state, state in zip(lone.recurrent, self.recurrent, strict=True):
            state.join(its_state)

    def leave(self, lane: int, lone: Caches | None) -> None:
        """Remove a sequence; the last lane takes its number. `lone`, if given, gets its committed rows."""
        last = len(self.sizes) - 1
        if lone is not None:
            self._copy(lane, lone)
        for state in self.recurrent:
            state.keep(lanes_without(lane, len(self.sizes)))
        for cache in self.attention if lane < last else ():
            cache.fill(lane, last, self.sizes[last] - cache.columns.first[last] + self.uncommitted)
        bounds = (n for c in self._columns.values() for n in (c.first, c.oldest))
        for numbers in (self.sizes, self.shifts, *bounds):
            numbers[lane] = numbers[last]
            numbers.pop()
        if not self.sizes:
            self.layers, self._columns, self._lanes = [], {}, FIRST_LANES
        else:
            self._shrink()

    def _copy(self, lane: int, lone: Caches) -> None:
        """Give the caches of one sequence the committed rows of a lane."""
        for window, columns in self._columns.items():
            oldest, its_columns = columns.oldest[lane], lone._columns[window]
            its_columns.first, its_columns.oldest = [step_below(oldest)], [oldest]
            its_columns.count = self.sizes[lane] - its_columns.first[0]
        for its, cache in zip(lone.attention, self.attention, strict=True):
            cache.copy(its, lane, self.sizes[lane])
        for its_state, state in zip(lone.recurrent, self.recurrent, strict=True):
            state.copy(its_state, lane)
        lone.sizes = [self.sizes[lane]]
        mx.async_eval(lone.arrays())  # until they are computed, they keep all shared buffers in memory

    def _append(self, size: int, oldest: Mapping[int | None, int], shift: int = 0) -> None:
        """Give a sequence the next lane. `oldest` is the first position that it holds, by window."""
        for window, columns in self._columns.items():
            columns.first.append(columns.first_beside(size, self.sizes))
            columns.oldest.append(max(oldest[window], columns.first[-1]))
        self.sizes.append(size)
        self.shifts.append(shift)

    def _columns_for(self, window: int | None) -> Columns:
        return self._columns.setdefault(window, Columns(window, self._lanes))

    def _with_rollback(self, cache: Any) -> LayerCache:
        """Return our cache for one of mlx-lm's. Raises NotRewindable for an unknown class."""
        cache_class = type(cache)
        if cache_class is KVCache:
            return AttentionCache(self._columns_for(None))
        if cache_class is RotatingKVCache and cache.keep == 0:
            return AttentionCache(self._columns_for(cache.max_size))
        if cache_class is ChunkedKVCache:
            return ChunkCache(self._columns_for(cache.chunk_size))
        if cache_class is ArraysCache:
            return RecurrentCache(len(cache.cache))
        raise NotRewindable(
            f"no exact rollback rule for the cache class {cache_class.__name__} of this target: "
            "it cannot be decoded speculatively without risk to its text; use it with mlx-lm"
        )

    def _ends(self, lanes: int) -> list[int]:
        """Return the positions after all rows of the first lanes."""
        return [size + self.uncommitted for size in self.sizes[:lanes]]

    def _make_room(self, T: int, used: int) -> None:
        """Provide lanes for all sequences and columns for T more rows of each; `used` lanes hold rows."""
        lanes = self._lanes
        while lanes < len(self.sizes):
            lanes *= 2
        for columns in self._columns.values():
            first, count = columns.plan(self._ends(len(self.sizes)), T)
            if (lanes, count, first) != (self._lanes, columns.count, columns.first):
                self._rearrange(columns, lanes, count, first, used)
        self._lanes = lanes

    def _shrink(self) -> None:
        """Return memory when most lanes are free, or most columns since the longest sequence left."""
        lanes, share = self._lanes, 4  # buffers shrink when less than a quarter of them is in use
        while len(self.sizes) * share <= lanes and lanes > FIRST_LANES:
            lanes //= 2
        for columns in self._columns.values():
            need = max(size - first for size, first in zip(self.sizes, columns.first, strict=True))
            count = capacity_for(need + self.uncommitted)
            if lanes < self._lanes or (columns.window is None and count * share <= columns.count):
                count = min(count, columns.count) if columns.window is None else columns.count
                self._rearrange(columns, lanes, count, columns.first, len(self.sizes))
        self._lanes = lanes

    def _call_readers(self) -> None:
        """Let forks refer to rows of windows before these move or are dropped."""
        for fork in list(self.readers):
            fork.refer_to_windows()
        self.readers.clear()

    def _rearrange(self, columns: Columns, lanes: int, count: int, first: list[int], used: int) -> None:
        if columns.window is not None:
            self._call_readers()
        for cache in self.attention:
            if cache.columns is columns:
                cache.rearrange(lanes, count, first[:used], self._ends(used))
        columns.oldest = [max(old, new) for old, new in zip(columns.oldest, first, strict=True)]
        columns.first, columns.count, columns.lanes = first, count, lanes
