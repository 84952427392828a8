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

    _caches: Caches
    _size: int
    _lane: Lane | None  # returns the batch's caches and the lane, while it has them

    def __init__(self) -> None:
        self._copies: list[Copy] = []  # rows of another target that are not copied yet
        self._followers = WeakSet[ForkRows]()  # forks that take rows from these caches one after the other

    def follow(self, origin: ForkRows, others: Iterable[Copy] = ()) -> list[Copy]:
        """Let `copies` take the rows of a fork one array at a time from what its origin holds then.

        The origin is in use: its next pass would copy whole buffers that are still referenced. Windows and
        states are copied now. `copies` also makes the copies of `others`. Returns functions that copy.
        """
        self._copies, full = [], self._caches.full
        mx.eval([cache.arrays() for cache in self._caches.layers if cache not in full])
        for layer, cache in enumerate(full):
            for number, made in enumerate(cache.buffers):
                cache.buffers[number] = mx.zeros(made.shape, made.dtype)  # not computed: it counts bytes
                self._copies.append(partial(self._followed, origin, layer, number))
        if self._copies:
            origin._followers.add(self)
        self._copies += others  # those come first: until all are made, this target has copies
        return [lambda: next(self.copies(), mx.array(0))] * len(self._copies)

    def _followed(self, origin: ForkRows, layer: int, number: int) -> mx.array:
        """Return a buffer with the rows that the origin has now, not computed."""
        caches, lane = (origin._caches, 0) if origin._lane is None else origin._lane()
        cache, size = self._caches.full[layer], self._caches.sizes[0]
        rows = caches.full_rows(lane, size)[layer][number]
        lanes, heads, count, dim = cache.buffers[number].shape
        free = mx.zeros((lanes, heads, count - size, dim), rows.dtype)
        cache.buffers[number] = mx.concatenate([rows, free], axis=2)
        return cache.buffers[number]

    def hold_rows(self, size: int = 0) -> None:
        """Let forks refer to rows after the first `size` that they have not copied, before these are gone."""
        for fork in [fork for fork in self._followers if fork._size > size]:
            fork._refer()
            self._followers.discard(fork)

    def _refer(self) -> None:
        """Refer to the rows of an origin that are not copied yet, before something else reads them."""
        self._copies = [partial(_itself, copy()) for copy in self._copies]

    @property
    def has_copies(self) -> bool:
        """Return True if rows of the origin of a fork are still to be copied."""
        return bool(self._copies)

    def compute_later(self, arrays: Iterable[mx.array]) -> None:
        """Let `copies` yield these arrays, too: a restored state is read when it is computed."""
        self._copies += [partial(_itself, array) for array in arrays]

    def copies(self) -> Iterator[mx.array]:
        """Yield arrays to evaluate, so that nothing refers to their origin any more."""
        while self._copies:
            yield self._copies.pop()()


def _itself(array: mx.array) -> mx.array:
    return array
