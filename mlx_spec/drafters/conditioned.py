"""Drafters that read the target's hidden states: EAGLE-3, P-EAGLE, DFlash, native MTP heads.

A row of the drafter's own caches is computed from the target's features of one position. In most families it
also reads the next token, so it predicts the token after the next one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import create_attention_mask

from mlx_spec.drafters.checkpoint import CONFIG, KEY, POST_NORM, PRE_NORM, Conventions, own_parts
from mlx_spec.drafters.drafter import DraftBuilder, DrafterSource
from mlx_spec.errors import BadCheckpoint
from mlx_spec.model.layer_caches import capacity_for
from mlx_spec.types import CacheState, Draft, Drafter, Features, FeatureSpec, Sampler, TargetParts, no_draft


class DrafterCache:
    """K and V of one layer of a drafter. Positions have gaps if rows are missing."""

    def __init__(self) -> None:
        self.offset = 0  # position of the next row; mlx-lm's attention reads it by this name
        self.size = 0
        self.buffers: list[mx.array] = []  # keys and values [1, H, capacity, D]; none before any row

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append [1, H, T, D] and return all rows [1, H, S, D]."""
        start, end = self.size, self.size + keys.shape[2]
        pairs = zip(self.buffers or (None, None), (keys, values), strict=True)
        self.buffers = [_write_rows(buffer, rows, start, end) for buffer, rows in pairs]
        self.size, self.offset = end, self.offset + keys.shape[2]
        return self.buffers[0][..., :end, :], self.buffers[1][..., :end, :]

    def mask(self, T: int, *, array: bool = False) -> mx.array | str | None:
        """Return the causal mask of the next T rows."""
        made: mx.array | str | None = create_attention_mask(
            T, self.size, return_array=array, window_size=None
        )
        return made

    def cut(self, size: int, position: int) -> None:
        """Keep the first `size` rows; the next one is at `position`."""
        self.size, self.offset = min(self.size, size), position


class ConditionedDrafter(Drafter, ABC):
    """Drafts with layers over the target's hidden states. Keeps the rows of one sequence.

    The first rows are in the caches; the last ones still wait to be written. When the target goes back to an
    earlier position, rows from there on are dropped. If the token at that position changed, the row before it
    is dropped, too, because it read that token. A reused prefix that this drafter never saw has no rows.
    Missing rows lower acceptance and do not change the text.

    A family implements `process` and `draft_next`.
    """

    reads_next_token: ClassVar[bool] = True  # False if a row depends on the target's features only

    def __init__(self, network: nn.Module, parts: TargetParts, needs: FeatureSpec) -> None:
        self.needs = needs
        self._network, self._parts = network, parts
        self._caches = [DrafterCache() for _ in network.layers]
        self._positions: list[int] = []  # of all rows, ascending
        self._tokens: list[int] = []  # the token after each of them
        self._waiting: list[mx.array] = []  # features [T, F] of the last rows, contiguous

    @abstractmethod
    def process(self, rows: mx.array, tokens: list[int]) -> None:
        """Append rows of features [T, F], and the tokens after them, to the caches."""

    @abstractmethod
    def draft_next(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """Return at most `limit` tokens, 1 or more; the newest row belongs to `history`."""

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """Return at most `limit` tokens; none if the newest row belongs to another history."""
        follows = self._positions[-1:] == [len(history) - 2] and self._tokens[-1] == history[-1]
        return self.draft_next(history, limit, sampler) if follows and limit > 0 else no_draft()

    def observe(self, history: Sequence[int], features: Features) -> None:
        """Queue the rows of `features`, which end before the last token of `history`."""
        read = [*features.hidden, *([] if features.final_hidden is None else [features.final_hidden])]
        rows = mx.concatenate(read, axis=-1) if len(read) > 1 else read[0]
        if not rows.shape[0]:
            return
        first = len(history) - 1 - rows.shape[0]
        self._forget(first, history[first])
        if self._positions and self._positions[-1] + 1 != first:
            self._write(self._num_waiting)  # rows of one write have no gap between them
        self._positions += range(first, len(history) - 1)
        self._tokens += history[first + 1 :]
        self._waiting.append(rows)
        if self._num_waiting > 64:  # More rows are written at once, so that no draft waits for a long pass.
            self._write(self._num_waiting - 1)
            mx.async_eval([cache.buffers for cache in self._caches])

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for cache in self._caches for array in cache.buffers)

    def state(self) -> CacheState:
        """Return all rows: the written ones as K and V, the waiting ones as features."""
        written = len(self._positions) - self._num_waiting
        layers = {
            str(i): CacheState({str(j): a[..., :written, :] for j, a in enumerate(cache.buffers)})
            for i, cache in enumerate(self._caches)
        }
        waiting = CacheState({"rows": mx.concatenate(self._waiting)} if self._waiting else {})
        history = CacheState(numbers={"positions": self._positions, "tokens": self._tokens})
        return CacheState.join({**layers, "waiting": waiting, "all": history})

    def restore(self, state: CacheState) -> None:
        for i, cache in enumerate(self._caches):
            if rows := state.part(str(i)).arrays:
                cache.update_and_fetch(rows["0"], rows["1"])
        history = state.part("all").numbers
        self._positions, self._tokens = list(history["positions"]), list(history["tokens"])
        self._waiting = list(state.part("waiting").arrays.values())

    def missing(self, size: int) -> int:
        """Return how many of the first `size` positions have no row."""
        return size - bisect_left(self._positions, size)

    @property
    def _num_waiting(self) -> int:
        return sum(rows.shape[0] for rows in self._waiting)

    def _write(self, count: int) -> None:
        """Write the first `count` of the waiting rows to the caches."""
        if count:
            self.process(*self._next_rows(count))
            self._mark_written(count)

    def _next_rows(self, count: int) -> tuple[mx.array, list[int]]:
        """Return the first `count` waiting rows [T, F] and their tokens. The caches are ready for them."""
        start = len(self._positions) - self._num_waiting
        self._cut()
        return mx.concatenate(self._waiting)[:count], self._tokens[start : start + count]

    def _mark_written(self, count: int) -> None:
        left = mx.concatenate(self._waiting)[count:]
        self._waiting = [left] if left.shape[0] else []

    def _cut(self) -> None:
        """Drop what a draft left in the caches after the written rows."""
        written = len(self._positions) - self._num_waiting
        following = self._positions[written] if self._waiting else self._positions[-1] + 1
        for cache in self._caches:
            cache.cut(written, following)

    def _forget(self, position: int, token: int) -> None:
        """Drop the rows from `position` on, and the one before if it read another token than `token`."""
        keep = bisect_left(self._positions, position)
        adjacent = keep > 0 and self._positions[keep - 1] == position - 1
        if adjacent and self.reads_next_token and self._tokens[keep - 1] != token:
            keep -= 1
        if dropped := len(self._positions) - keep:
            left = self._num_waiting - dropped
            self._waiting = [mx.concatenate(self._waiting)[:left]] if left > 0 else []
            del self._positions[keep:], self._tokens[keep:]


class ChainDrafter(ConditionedDrafter):
    """Drafts token by token: its own output replaces the features that do not exist yet (EAGLE-3, MTP).

    Its network's `fuse` turns features [T, F] of the target into the layers' input [T, D]. The network takes
    embeddings and this input. It returns the hidden state for the next step and the head's input, [T, D]
    each. Rows of drafted tokens are dropped after the draft. Accepted tokens are written again with the
    target's features.
    """

    _newest: tuple[mx.array, mx.array]  # the network's output for the newest row

    def process(self, rows: mx.array, tokens: list[int]) -> None:
        """Run the network on rows [T, F] and keep its output for the last one."""
        embedded = self._parts.embed(mx.array(tokens, dtype=mx.int32))
        hidden, normed = self._network(embedded, self._network.fuse(rows), self._caches)
        self._newest = hidden[-1:], normed[-1:]

    def draft_next(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        self._write(self._num_waiting)
        hidden, normed = self._newest
        self._cut()
        builder = DraftBuilder(history, sampler)
        for step in range(limit):
            token = builder.draw(self._parts.unembed(normed))
            if step + 1 < limit:
                hidden, normed = self._network(self._parts.embed(token), hidden, self._caches)
        return builder.draft()


def check_conventions(conventions: Conventions, readable: tuple[str, ...]) -> None:
    """Raise BadCheckpoint for conventions that `ChainDrafter` does not follow. `readable` are its inputs."""
    known = {"hidden": readable, "chain": (POST_NORM, PRE_NORM), "shift": (1,)}
    for key, choices in known.items():
        convention = vars(conventions)[key]
        if convention not in choices:
            shown = " or ".join(repr(choice) for choice in choices)
            raise BadCheckpoint(
                f"{KEY!r} in {CONFIG} has {key} {convention!r}, it must be {shown}: convert it again"
            )


def network_source(
    name: str,
    network: nn.Module,
    needs: FeatureSpec,
    vocab_size: int,
    drafter_class: Callable[..., Drafter] = ChainDrafter,
    *options: object,
) -> DrafterSource:
    """Return the source of drafters `drafter_class(network, parts, needs, *options)`.

    `network` may bring an embedding and an LM head.
    """
    return DrafterSource(
        name,
        needs,
        lambda parts: drafter_class(network, own_parts(network, parts, vocab_size), needs, *options),
        network,
    )


def _write_rows(buffer: mx.array | None, rows: mx.array, start: int, end: int) -> mx.array:
    """Write `rows` to start..end of a buffer [1, H, capacity, D]. Return it, grown if it was too short."""
    if buffer is None or end > buffer.shape[2]:
        grown = mx.zeros((*rows.shape[:2], capacity_for(end), rows.shape[3]), rows.dtype)
        if buffer is not None:
            grown[..., :start, :] = buffer[..., :start, :]
        buffer = grown
    buffer[..., start:end, :] = rows
    return buffer
