"""Copies of rows that a fork takes from another target, in steps between the passes of others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from weakref import WeakSet

import mlx.core as mx

from mlx_spec.model.caches import Caches
from mlx_spec.types import Copy

Lane = Callable[[], tuple[Caches, int]]


class ForkRows:
    """The part of a target that copies rows of its origin, and lets forks copy its own."""

    caches: Caches
    size: int
    _lane: Lane | None  # returns the batch's caches and the lane, while it has them

    def __init__(self) -> None:
        self._copies: list[Copy] = []  # rows of another target that are not copied yet
        self._window_copies: list[Copy] = []  # of layers with a window; they come first
        self._has_own_windows = False  # windows come from a rewind point, which the origin never writes
        self._followers = WeakSet[ForkRows]()  # forks that take rows from these caches one after the other

    def follow(self, origin: ForkRows, others: Iterable[Copy] = ()) -> list[Copy]:
        """Let `copies` take the rows of a fork one array at a time.

        The origin is in use: its next pass copies each buffer whole that something refers to. So a copy
        refers to rows only when it is made. Windows that the origin is about to move are referred to just
        before; those of a rewind point never move. States are shared. `copies` also makes the copies of
        `others`. Returns a function for each array.
        """
        self._copies, self._window_copies = [], []
        mx.eval([state.arrays() for state in self.caches.recurrent])
        for copies, caches, copy in (
            (self._copies, self.caches.full, self._followed),
            (self._window_copies, self.caches.windowed, self._followed_window),
        ):
            for layer, cache in enumerate(caches):
                for number, made in enumerate(cache.buffers):
                    if copies is self._window_copies and self._has_own_windows:
                        copies.append(partial(_itself, made))
                        continue
                    cache.buffers[number] = mx.zeros(made.shape, made.dtype)  # not computed: it counts bytes
                    copies.append(partial(copy, origin, layer, number))
        if self._copies or self._window_copies:
            origin._followers.add(self)
        if self._window_copies and not self._has_own_windows:
            origin.caches.readers.add(self)
        self._copies += others  # those come before full attention: until all are made, this target has copies
        return [lambda: next(self.copies(), mx.array(0))] * (len(self._copies) + len(self._window_copies))

    def _followed(self, origin: ForkRows, layer: int, number: int) -> mx.array:
        """Return a buffer with the rows that the origin has now, not computed."""
        caches, lane = (origin.caches, 0) if origin._lane is None else origin._lane()
        cache, size = self.caches.full[layer], self.caches.sizes[0]
        rows = caches.full_rows(lane, size)[layer][number]
        lanes, heads, count, dim = cache.buffers[number].shape
        free = mx.zeros((lanes, heads, count - size, dim), rows.dtype)
        cache.buffers[number] = mx.concatenate([rows, free], axis=2)
        return cache.buffers[number]

    def _followed_window(self, origin: ForkRows, layer: int, number: int) -> mx.array:
        """Return a copy of the rows of a window, which the origin has not moved yet, not computed."""
        source, cache = origin.caches.windowed[layer], self.caches.windowed[layer]
        low = cache.columns.first[0] - source.columns.first[0]
        buffer, high = source.buffers[number], low + cache.columns.count
        # `mx.contiguous` returns a view of a buffer that is hardly larger.
        parts = [buffer[:, :, low : low + 1], buffer[:, :, low + 1 : high]]
        cache.buffers[number] = mx.concatenate(parts, axis=2)
        return cache.buffers[number]

    def hold_rows(self, size: int = 0) -> None:
        """Let forks refer to rows after the first `size` that they have not copied, before these are gone."""
        for fork in [fork for fork in self._followers if fork.size > size]:
            fork._refer()
            self._followers.discard(fork)

    def _refer(self) -> None:
        """Refer to the rows of an origin that are not copied yet, before something else reads them."""
        self.refer_to_windows()
        self._copies = [partial(_itself, copy()) for copy in self._copies]

    def refer_to_windows(self) -> None:
        """Refer to the rows of windows that are not copied yet, before their origin moves or drops them."""
        self._window_copies = [partial(_itself, copy()) for copy in self._window_copies]

    @property
    def has_copies(self) -> bool:
        """Return True if rows of the origin of a fork are still to be copied."""
        return bool(self._copies or self._window_copies)

    def compute_later(self, arrays: Iterable[mx.array]) -> None:
        """Let `copies` yield these arrays, too: a restored state is read when it is computed."""
        self._copies += [partial(_itself, array) for array in arrays]

    def copies(self) -> Iterator[mx.array]:
        """Yield arrays to evaluate, so that nothing refers to their origin any more."""
        while copies := self._window_copies or self._copies:
            yield copies.pop()()


def _itself(array: mx.array) -> mx.array:
    return array
