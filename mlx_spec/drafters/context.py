"""What a drafter's own caches hold of the target's activations, and which history they belong to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from mlx_spec.drafters.conditioned import Rows
from mlx_spec.drafters.draft_model import common_prefix
from mlx_spec.errors import Mismatch
from mlx_spec.types import Features

BACKLOG = 128  # rows that wait; from then on they are written, so that no draft has to wait for more


class Context:
    """Rows of the positions of one history: those in the caches, and behind them those that wait.

    Rows of what a history no longer shares with the one before are forgotten. Where the target held a prefix
    already, its rows are never seen: less acceptance for a while, the same text.
    """

    def __init__(self, caches: Sequence[Rows], *, paired: bool = False) -> None:
        self.caches = caches
        self._paired = paired  # whether a row also depends on the token behind its position
        self._history: list[int] = []  # what was seen last
        self._positions: list[int] = []  # of all rows, ascending
        self._waiting: list[mx.array] = []  # the last of them, contiguous, [T, F] each

    @property
    def waiting(self) -> int:
        """Rows not yet written."""
        return sum(rows.shape[0] for rows in self._waiting)

    def observe(self, history: Sequence[int], rows: mx.array) -> None:
        """Rows [T, F] of the T positions before the last one of `history`."""
        start = len(history) - 1 - rows.shape[0]
        shared = common_prefix(self._history, history)
        self._forget(min(start, shared - 1 if self._paired else shared))
        if self._positions and self._positions[-1] + 1 != start:
            self._forget(self._positions[-self.waiting] if self.waiting else start)
        self._history = list(history)
        self._positions += range(start, len(history) - 1)
        self._waiting.append(rows)

    def missing(self, size: int) -> int:
        """Of how many of the first `size` positions there is no row."""
        return size - bisect_left(self._positions, size)

    def follows(self, history: Sequence[int]) -> bool:
        """Whether the newest row is that of the position before the last one of `history`."""
        return self._history == list(history) and self._positions[-1:] == [len(history) - 2]

    def take(self) -> tuple[mx.array, list[int]]:
        """The rows that wait, [T, F], and the token behind each. The caches are ready for them."""
        self.settle(0)
        rows = mx.concatenate(self._waiting)
        return rows, self._history[-rows.shape[0] :]

    @property
    def nbytes(self) -> int:
        """Bytes of the caches."""
        return sum(array.nbytes for cache in self.caches for array in cache.arrays())

    def settle(self, count: int) -> None:
        """The first `count` rows that wait are in the caches: drop there what came after them."""
        if count:
            rows = mx.concatenate(self._waiting)[count:]
            self._waiting = [rows] if rows.shape[0] else []
        written = len(self._positions) - self.waiting
        following = self._positions[written:] or [self._positions[-1] + 1]
        for cache in self.caches:
            cache.cut(written, following[0])

    def _forget(self, position: int) -> None:
        """Drop the rows from `position` on."""
        keep = bisect_left(self._positions, position)
        left = self.waiting - (len(self._positions) - keep)
        if keep < len(self._positions):
            self._waiting = [mx.concatenate(self._waiting)[:left]] if left > 0 else []
            del self._positions[keep:]


def joined_layers(features: Features) -> mx.array:
    """The captured layers side by side, [T, F]."""
    return mx.concatenate(list(features.hidden), axis=-1)


def check_capture(capture: Sequence[int], config: Mapping[str, Any]) -> None:
    """Raise Mismatch unless `capture` names different layers of the target in a drafter's config.json."""
    layers = config["target"]["num_hidden_layers"]
    there = all(0 <= index < layers for index in capture)
    if not (capture and there and len(set(capture)) == len(capture)):
        raise Mismatch(
            f"drafter reads the outputs of layers {list(capture)}, the target has layers 0 to {layers - 1} "
            "and each is read once: convert it again for this target"
        )
