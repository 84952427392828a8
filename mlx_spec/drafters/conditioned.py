"""Drafters that read, beside each token, what the target computed before it: EAGLE-3, native MTP heads.

Row i pairs the target's features of position i with token i + 1, and its output predicts token i + 2. Behind
the newest row the network goes on by itself: its own output stands in for features that do not exist yet.
Those rows are dropped after the draft, and tokens that were accepted are written with the target's features.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
from mlx_lm.models.cache import create_attention_mask

from mlx_spec.drafters.chain import Chain
from mlx_spec.drafters.recorded import KEY, POST, PRE, WHERE, Recorded
from mlx_spec.errors import BadCheckpoint
from mlx_spec.model.caches import write_rows
from mlx_spec.types import Draft, Features, FeatureSpec, Sampler, TargetParts, no_draft

BACKLOG = 64  # rows not yet written at which `observe` writes all but the newest


class Rows:
    """K and V of one layer of a drafter. Positions may have gaps where rows are gone for good."""

    def __init__(self) -> None:
        self.offset = 0  # position of the next row, by this name for mlx-lm's attention
        self.size = 0
        self._keys: mx.array | None = None  # [1, H, capacity, Dk]
        self._values: mx.array | None = None  # [1, H, capacity, Dv]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append [1, H, T, D] and return all rows [1, H, S, D]."""
        start, end = self.size, self.size + keys.shape[2]
        self._keys = write_rows(self._keys, keys, start, end)
        self._values = write_rows(self._values, values, start, end)
        self.size, self.offset = end, self.offset + keys.shape[2]
        return self._keys[..., :end, :], self._values[..., :end, :]

    def mask(self, T: int, *, array: bool = False) -> mx.array | str | None:
        """What each of the next T rows may see: the rows before it and itself."""
        mask: mx.array | str | None = create_attention_mask(
            T, self.size, return_array=array, window_size=None
        )
        return mask

    def cut(self, size: int, position: int) -> None:
        """Keep the first rows; the next one is at `position`."""
        self.size, self.offset = min(self.size, size), position

    def arrays(self) -> list[mx.array]:
        """The buffers."""
        return [a for a in (self._keys, self._values) if a is not None]


class Network(Protocol):
    """The layers of such a drafter, shared by all sequences."""

    @property
    def depth(self) -> int:
        """Layers that have K and V."""
        ...

    def fuse(self, features: mx.array) -> mx.array:
        """Features of the target [T, F] to the hidden [T, D] that the layers read."""
        ...

    def __call__(
        self, embedded: mx.array, hidden: mx.array, caches: Sequence[Rows]
    ) -> tuple[mx.array, mx.array]:
        """Embeddings and hidden [T, D] of T rows to the hidden of their next steps and the head's input."""
        ...


def check_conventions(recorded: Recorded, read: tuple[str, ...]) -> None:
    """Raise BadCheckpoint for conventions that `Conditioned` does not follow; `read`: known as its input."""
    known: dict[str, tuple[object, tuple[object, ...]]] = {
        "hidden": (recorded.hidden, read),
        "chain": (recorded.chain, (POST, PRE)),
        "shift": (recorded.shift, (1,)),
    }
    for key, (found, choices) in known.items():
        if found not in choices:
            shown = " or ".join(repr(choice) for choice in choices)
            raise BadCheckpoint(
                f"{KEY!r} in {WHERE} has {key} {found!r}, it must be {shown}: convert it again"
            )


class Conditioned:
    """Drafts one sequence with a network and rows of its own.

    After a target went back to an earlier place, rows from there on are dropped. Where the token at that
    place changed, the row before it is gone, too: the features it was made of are no longer there. A target
    that already holds a prefix which this drafter never saw leaves it without those rows. Both cost
    acceptance for a while, and neither the text.
    """

    def __init__(
        self, network: Network, parts: TargetParts, needs: FeatureSpec, *, position_offset: int = 0
    ) -> None:
        self.needs = needs
        self._network = network
        self._parts = parts
        self._position_offset = position_offset  # of the rows that the network adds by itself
        self._caches = [Rows() for _ in range(network.depth)]
        self._positions: list[int] = []  # of all rows with the target's features, ascending
        self._tokens: list[int] = []  # that each of them reads
        self._waiting: list[mx.array] = []  # features of the last of them, not yet written: contiguous
        self._newest: tuple[mx.array, mx.array] | None = None  # what the network made of the last row

    def observe(self, history: Sequence[int], features: Features) -> None:
        """The rows of `features`, which end before the last token of `history`, are to be written."""
        read = [*features.hidden, *([] if features.final_hidden is None else [features.final_hidden])]
        rows = mx.concatenate(read, axis=-1) if len(read) > 1 else read[0]
        first = len(history) - 1 - rows.shape[0]
        self._forget(first, history[first])
        if self._positions and self._positions[-1] + 1 != first:
            self._write(self._held)
        self._positions += range(first, len(history) - 1)
        self._tokens += history[first + 1 :]
        self._waiting.append(rows)
        if self._held > BACKLOG:
            self._write(self._held - 1)
            mx.async_eval([cache.arrays() for cache in self._caches])

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """`limit` tokens; none where the newest row is not that of `history`."""
        here = self._positions[-1:] == [len(history) - 2] and self._tokens[-1] == history[-1]
        if limit < 1 or not here:
            return no_draft()
        if self._waiting:
            self._newest = self._write(self._held)
        assert self._newest is not None
        hidden, normed = self._newest
        self._cut(len(self._positions), len(history) - 1 + self._position_offset)
        chain = Chain(history, sampler)
        for step in range(limit):
            token = chain.extend(self._parts.unembed(normed))
            if step + 1 < limit:
                hidden, normed = self._network(self._parts.embed(token), hidden, self._caches)
        return chain.draft()

    @property
    def nbytes(self) -> int:
        """Bytes of its caches."""
        return sum(array.nbytes for cache in self._caches for array in cache.arrays())

    def missing(self, size: int) -> int:
        """Of how many of the first `size` positions it has no row."""
        return size - bisect_left(self._positions, size)

    @property
    def _held(self) -> int:
        """How many rows wait."""
        return sum(rows.shape[0] for rows in self._waiting)

    def _forget(self, position: int, token: int) -> None:
        """Drop the rows from `position` on, and the one before it if it read another token than this."""
        keep = bisect_left(self._positions, position)
        if keep and self._positions[keep - 1] == position - 1 and self._tokens[keep - 1] != token:
            keep -= 1
        dropped = len(self._positions) - keep
        if not dropped:
            return
        left = self._held - dropped
        self._waiting = [mx.concatenate(self._waiting)[:left]] if left > 0 else []
        self._newest = None
        del self._positions[keep:], self._tokens[keep:]

    def _write(self, count: int) -> tuple[mx.array, mx.array] | None:
        """Write the first `count` of the rows that wait. Returns what the network made of the last one."""
        if not count:
            return None
        rows, start = mx.concatenate(self._waiting), len(self._positions) - self._held
        self._cut(start, self._positions[start])
        embedded = self._parts.embed(mx.array(self._tokens[start : start + count], dtype=mx.int32))
        hidden, normed = self._network(embedded, self._network.fuse(rows[:count]), self._caches)
        self._waiting = [rows[count:]] if count < rows.shape[0] else []
        return hidden[-1:], normed[-1:]

    def _cut(self, size: int, position: int) -> None:
        for cache in self._caches:
            cache.cut(size, position)
