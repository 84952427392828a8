"""An unmodified mlx-lm model as a Target: taps on what a drafter reads, writes on trial, exact rollback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.errors import NotRewindable
from mlx_spec.model import tree_attention
from mlx_spec.model.caches import (
    MAX_TRIAL,
    AttentionCache,
    FullCache,
    LayerCache,
    RecurrentCache,
    SlidingCache,
    TreeView,
    make_caches,
    view,
)
from mlx_spec.model.hooks import begin_early, decoder_of, parts_of, tap
from mlx_spec.model.tree import tree_of
from mlx_spec.types import Features, FeatureSpec, KVRows

MARK_BEFORE = 32  # tokens before the end of a prompt where the state of a recurrent target is kept, too:
# what a chat template puts there to begin an answer is often left out when the next turn repeats it
MAX_REPLAY = 16  # tokens; a longer backlog of a recurrent target is written for good


@dataclass(frozen=True)
class _Before:
    """What a trial must put back."""

    owed: mx.array
    recurrent: list[Any]


@dataclass(frozen=True)
class _Mark:
    """A place that `rewind` can come back to although later rows pushed it out of the caches."""

    size: int
    snapshots: list[Any]


class LMTarget:
    """A language model, its caches and the tokens they hold. One sequence.

    The caches hold `size` committed tokens, except that a recurrent target may still owe them the last few
    (`_owed`): after a rejection its state is restored, and the kept tokens go into the next forward pass in
    front of the new ones instead of costing a pass of their own.
    """

    def __init__(
        self, model: nn.Module, needs: FeatureSpec | None = None, *, kv_bits: int | None = None
    ) -> None:
        self._model = model
        self._kv_bits = kv_bits
        self._needs = needs or FeatureSpec()
        decoder = decoder_of(model)
        self._taps = [tap(decoder["layers"], i) for i in self._needs.hidden_layers]
        if self._needs.final_hidden:
            self._taps.append(tap(decoder, "norm"))
        self._gate = begin_early(decoder["layers"])
        self.parts = parts_of(model)
        self._reset()
        self._recurrent = any(isinstance(c, RecurrentCache) for c in self._caches)
        self._by_row = False  # whether the model's positions may be those of a tree
        if self._needs.shared_kv and self._recurrent:
            raise NotRewindable(
                "this drafter reads the target's K/V and this target is recurrent: use a drafter made for it"
            )

    def _reset(self) -> None:
        self._caches = make_caches(self._model, kv_bits=self._kv_bits)
        self._size = 0
        self._owed = mx.array([], dtype=mx.int32)
        self._trial: list[mx.array] = []
        self._seen: list[list[mx.array]] = []  # per forward pass of the trial, per tap: [T, D]
        self._before: _Before | None = None
        self._marks: list[_Mark] = []

    @property
    def size(self) -> int:
        """Committed tokens."""
        return self._size

    @property
    def on_trial(self) -> int:
        """Rows written and not yet committed."""
        return sum(tokens.size for tokens in self._trial)

    @property
    def nbytes(self) -> int:
        """Bytes of the caches."""
        return sum(array.nbytes for cache in self._caches for array in cache.arrays())

    def prefill(self, tokens: list[int]) -> Features:
        """Write and commit one chunk of the prompt, without logits. Returns its features, evaluated."""
        self._begin()
        rows = mx.array(tokens, dtype=mx.int32)
        early = len(tokens) - MARK_BEFORE if self._recurrent else 0
        if early > 0:
            self._write(rows[:early])
            self._set_mark(self._size + early)
        self._write(rows[max(early, 0) :])
        if not self._needs.prompt:
            self._seen = []  # before they are computed
        features = self._features(len(tokens))
        hidden = [*features.hidden, *([] if features.final_hidden is None else [features.final_hidden])]
        mx.eval([c.arrays() for c in self._caches], hidden)
        self._size += len(tokens)
        self._end()
        self._set_mark(self._size)
        return features

    def verify(self, tokens: mx.array) -> mx.array:
        """Write T tokens on trial and return logits [T, V]. A second call extends the trial."""
        assert self.on_trial + tokens.size <= MAX_TRIAL, "trial too long for the caches"
        if not self._trial:
            if self._owed.size > MAX_REPLAY:
                self._write(self._owed[:0])
            self._begin()
        with self._gate.opened():
            logits = self._write(tokens)
        self._trial.append(tokens)
        return logits

    def commit(self, keep: int) -> Features:
        """Keep the first rows of the trial and drop the rest. Returns the features of those kept.

        `commit(0)` also mends the caches after a forward pass that was interrupted half way.
        """
        written = self.on_trial
        assert 0 <= keep <= written, f"commit of {keep} rows, {written} on trial"
        features = self._features(keep)
        if keep < written or keep == 0:
            self._undo(keep)
        self._size += keep
        self._end()
        return features

    def refuses_trees(self) -> str | None:
        """Why a tree of draft tokens cannot be verified exactly; None where it can."""
        layers = decoder_of(self._model)["layers"]
        if self._recurrent:
            return "its state is recurrent and follows one path"
        if (reason := tree_attention.unknown(layers)) or tree_attention.is_by_row(layers):
            return reason
        tree_attention.by_row(layers)
        empty = [view(cache, tree_of((0,))) for cache in _attention(make_caches(self._model))]
        try:  # nothing is computed
            self._model(mx.zeros((1, 2), mx.int32), cache=empty)
        except (TypeError, ValueError) as error:
            tree_attention.as_before(layers)
            return f"its model calculates with positions ({error})"
        return None

    def verify_tree(self, tokens: mx.array, parents: tuple[int, ...]) -> mx.array:
        """Write the pending token and a tree on trial, [K + 1], and return logits [K + 1, V].

        Raises NotRewindable for a target that cannot.
        """
        assert not self._trial and tokens.size <= MAX_TRIAL, "a tree begins a trial"
        if not self._by_row:
            if reason := self.refuses_trees():
                raise NotRewindable(f"this target cannot verify a tree of drafts, {reason}: draft a chain")
            self._by_row = True
        self._begin()
        tree = tree_of(parents)
        with self._gate.opened():
            logits = self._write(tokens, [view(cache, tree) for cache in self._attention_caches()])
        self._trial.append(tokens)
        return logits

    def commit_path(self, rows: Sequence[int]) -> Features:
        """Keep these rows of a tree, a path from row 0 on. Returns the features of those kept."""
        if list(rows) != list(range(len(rows))):
            index = mx.array(list(rows))
            for cache in self._attention_caches():
                cache.select(self._size, index)
            self._seen = [[hidden[index] for hidden in taps] for taps in self._seen]
        return self.commit(len(rows))

    def rewind(self, size: int) -> int:
        """Keep at most the first `size` tokens. Returns how many were kept: fewer where rows are gone.

        The fall-back is a place at or shortly before the end of the last prefill, then the start.
        """
        assert not self._trial, "rewind during a trial"
        if size < self._size and (self._recurrent or not self._shorten(size)):
            marks = self._marks
            if not any(self._return_to(mark, size) for mark in reversed(marks)):
                self._reset()
            self._marks = [mark for mark in marks if mark.size <= self._size]
        return self._size

    def _shorten(self, size: int) -> bool:
        """Move the offsets of all caches back to `size`, if that is exact. Says whether it is."""
        attention = self._attention_caches()
        exact = all(cache.rewinds(size) for cache in attention)
        for cache in attention if exact else []:
            cache.rewind(size)
        self._size = size if exact else self._size
        return exact

    def _return_to(self, mark: _Mark, size: int) -> bool:
        """Restore the caches as they were at `mark`, shortened to `size`. Says whether that was exact."""
        if self._recurrent and mark.size > size:
            return False
        for layer, saved in zip(self._caches, mark.snapshots, strict=True):
            layer.restore(saved)
        self._size, self._owed = mark.size, self._owed[:0]
        return self._recurrent or self._shorten(min(size, mark.size))

    def _set_mark(self, size: int) -> None:
        self._marks = [*self._marks[-1:], _Mark(size, [c.snapshot() for c in self._caches])]

    def _begin(self) -> None:
        recurrent = [c.snapshot() for c in self._caches if isinstance(c, RecurrentCache)]
        self._before = _Before(self._owed, recurrent)

    def _end(self) -> None:
        self._trial, self._seen, self._before = [], [], None

    def _undo(self, keep: int) -> None:
        if self._before is None:
            return
        owed = self._before.owed
        size = self._size + keep
        if self._recurrent:
            size = self._size - owed.size
            self._owed = mx.concatenate([owed, *self._trial])[: owed.size + keep]
        for cache in self._attention_caches():
            cache.rewind(size)
        recurrent = [c for c in self._caches if isinstance(c, RecurrentCache)]
        for layer, saved in zip(recurrent, self._before.recurrent, strict=True):
            layer.restore(saved)

    def _write(self, tokens: mx.array, views: list[TreeView] | None = None) -> mx.array:
        T, rows = tokens.size, mx.concatenate([self._owed, tokens]) if self._owed.size else tokens
        self._owed = self._owed[:0] if self._owed.size else self._owed
        logits: mx.array = self._model(rows[None], cache=views or self._caches)[0]
        self._seen.append([tap.seen.pop()[0, rows.size - T :] for tap in self._taps])
        return logits[rows.size - T :] if rows.size > T else logits

    def _features(self, keep: int) -> Features:
        hidden = [
            mx.concatenate(list(h))[:keep] if len(h) > 1 else h[0][:keep]
            for h in zip(*self._seen, strict=True)
        ]
        layers = len(self._needs.hidden_layers)
        return Features(
            tuple(hidden[:layers]) if hidden else (),
            hidden[layers] if self._needs.final_hidden and hidden else None,
            self._shared_kv if self._needs.shared_kv else None,
        )

    def _shared_kv(self) -> Mapping[str, KVRows]:
        """Of committed rows, also while others are on trial."""
        own = [c for c in self._caches if isinstance(c, FullCache | SlidingCache)]
        return {c.attention_type: c.rows(self._size) for c in own}

    def _attention_caches(self) -> list[AttentionCache]:
        return _attention(self._caches)


def _attention(caches: list[LayerCache]) -> list[AttentionCache]:
    return [cache for cache in caches if not isinstance(cache, RecurrentCache)]
