"""An unmodified mlx-lm model as a Target: uncommitted writes, exact rollback, captured hidden states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.errors import NotRewindable
from mlx_spec.model.caches import (
    MAX_UNCOMMITTED,
    AttentionCache,
    FullCache,
    LayerCache,
    RecurrentCache,
    SlidingCache,
    make_caches,
)
from mlx_spec.model.hooks import Capture, capture, decoder_of, parts_of, start_layers_early
from mlx_spec.model.tree import (
    TreeCacheView,
    has_rowwise_ropes,
    rope_obstacle,
    tree_of,
    tree_view,
    unwrap_ropes,
    wrap_ropes,
)
from mlx_spec.types import CacheState, Features, FeatureSpec, KVRows

CHECKPOINT_TOKENS = 32  # before the end of a prompt: a second checkpoint of a recurrent target, because the
# next turn often drops what a chat template appends to begin an answer
MAX_REPLAY_TOKENS = 16  # committed tokens that may join a forward pass; more get a pass of their own

SharedKV = Callable[[], Mapping[str, KVRows]]


@dataclass(frozen=True)
class _Checkpoint:
    """A size that `rewind` can return to even if later rows pushed earlier ones out of the caches."""

    size: int
    snapshots: list[Any]


class LMTarget:
    """A language model, its caches and the tokens they hold, for one sequence.

    The caches hold `size` committed tokens. Those of a recurrent target may lack the last few (`_replay`):
    after a rejection its state is restored, and the accepted tokens join the next forward pass instead of
    costing a pass of their own.
    """

    def __init__(
        self, model: nn.Module, needs: FeatureSpec | None = None, *, kv_bits: int | None = None
    ) -> None:
        self._model = model
        self._kv_bits = kv_bits
        self._needs = needs or FeatureSpec()
        self._captures = captures_of(model, self._needs)
        self._eager = start_layers_early(decoder_of(model)["layers"])
        self.parts = parts_of(model)
        self._reset()
        self._recurrent = any(isinstance(c, RecurrentCache) for c in self._caches)
        self._reads_trees = False  # True once the model was found to read trees
        if self._needs.shared_kv and self._recurrent:
            raise NotRewindable(
                "this drafter reads the target's K/V and this target is recurrent: use a drafter made for it"
            )

    def _reset(self) -> None:
        self._caches = make_caches(self._model, kv_bits=self._kv_bits)
        self._size = 0
        self._replay = mx.array([], dtype=mx.int32)
        self._uncommitted: list[mx.array] = []  # tokens of each uncommitted forward pass
        self._captured: list[list[mx.array]] = []  # by forward pass, by capture: [T, D]
        # Before uncommitted writes: `_replay` and the snapshots of recurrent layers.
        self._rollback: tuple[mx.array, list[Any]] | None = None
        self._checkpoints: list[_Checkpoint] = []
        self._lent_kv: SharedKV | None = None  # while the caches are lent

    @property
    def size(self) -> int:
        return self._size

    @property
    def uncommitted(self) -> int:
        return sum(tokens.size for tokens in self._uncommitted)

    @property
    def is_recurrent(self) -> bool:
        """Return True if its state follows one path, and rollback needs a snapshot."""
        return self._recurrent

    @property
    def nbytes(self) -> int:
        """Return the bytes of the caches."""
        return sum(array.nbytes for cache in self._caches for array in cache.arrays())

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one token in the caches that keep every position."""
        caches = [cache for cache in _attention(self._caches) if cache.window is None]
        return sum(array.nbytes // array.shape[2] for cache in caches for array in cache.arrays())

    def prefill(self, tokens: list[int]) -> Features:
        """Write and commit one chunk of the prompt, without logits. Return its features, evaluated."""
        self._begin()
        rows = mx.array(tokens, dtype=mx.int32)
        early = len(tokens) - CHECKPOINT_TOKENS if self._recurrent else 0
        if early > 0:
            self._write(rows[:early])
            self._add_checkpoint(self._size + early)
        self._write(rows[max(early, 0) :])
        if not self._needs.prompt:
            self._captured = []  # before they are computed
        features = self._features(len(tokens))
        hidden = [*features.hidden, *([] if features.final_hidden is None else [features.final_hidden])]
        mx.eval([c.arrays() for c in self._caches], hidden)
        self._size += len(tokens)
        self._end()
        self._add_checkpoint(self._size)
        return features

    def verify(self, tokens: mx.array) -> mx.array:
        """Write T uncommitted tokens and return logits [T, V]. A second call adds to the first."""
        assert self.uncommitted + tokens.size <= MAX_UNCOMMITTED, "too many uncommitted rows for the caches"
        if not self._uncommitted:
            if self._replay.size > MAX_REPLAY_TOKENS:
                self._write(self._replay[:0])
            self._begin()
        with self._eager.on():
            logits = self._write(tokens)
        self._uncommitted.append(tokens)
        return logits

    def commit(self, keep: int) -> Features:
        """Keep the first `keep` uncommitted rows and drop the others. Return the features of those kept.

        `commit(0)` also repairs the caches after an interrupted forward pass.
        """
        written = self.uncommitted
        assert 0 <= keep <= written, f"commit of {keep} rows, {written} uncommitted"
        features = self._features(keep)
        if keep < written or keep == 0:
            self._undo(keep)
        self._size += keep
        self._end()
        return features

    def lend(self, shared_kv: SharedKV) -> list[LayerCache]:
        """Return the caches for passes shared with other targets, with all committed tokens in them.

        Until `reclaim`, only `record` may be called, and K and V are those that `shared_kv` returns.
        """
        assert not self._uncommitted, "caches are lent after a commit"
        if self._replay.size:
            self._write(self._replay[:0])
            self._end()
        self._lent_kv = shared_kv
        return self._caches

    def reclaim(self) -> list[LayerCache]:
        """Return the caches that were lent, to be filled again."""
        self._lent_kv = None
        return self._caches

    def record(self, tokens: int) -> None:
        """Count tokens that a shared pass committed."""
        self._size += tokens

    def refuses_trees(self) -> str | None:
        """Return why this target cannot verify a tree of draft tokens exactly; None if it can."""
        layers = decoder_of(self._model)["layers"]
        if self._recurrent:
            return "its state is recurrent and follows one path"
        if (reason := rope_obstacle(layers)) or has_rowwise_ropes(layers):
            return reason
        wrap_ropes(layers)
        empty = [tree_view(cache, tree_of((0,))) for cache in _attention(make_caches(self._model))]
        try:  # builds the graph and computes nothing
            self._model(mx.zeros((1, 2), mx.int32), cache=empty)
        except (TypeError, ValueError) as error:
            unwrap_ropes(layers)
            return f"its model calculates with positions ({error})"
        return None

    def verify_tree(self, tokens: mx.array, parents: tuple[int, ...]) -> mx.array:
        """Write the pending token and a tree, [K + 1], uncommitted. Return logits [K + 1, V].

        A second call adds rows to the tree; `parents` are those of all rows. Raises NotRewindable if the
        target cannot verify trees.
        """
        start = self.uncommitted
        assert start + tokens.size == len(parents) + 1 <= MAX_UNCOMMITTED, "a tree follows a commit"
        if not self._reads_trees:
            if reason := self.refuses_trees():
                raise NotRewindable(f"this target cannot verify a tree of drafts, {reason}: draft a chain")
            self._reads_trees = True
        if not start:
            self._begin()
        tree = tree_of(parents)
        with self._eager.on():
            logits = self._write(tokens, [tree_view(c, tree, start) for c in _attention(self._caches)])
        self._uncommitted.append(tokens)
        return logits

    def commit_path(self, rows: Sequence[int]) -> Features:
        """Keep these rows of a tree, a path from row 0 on. Return the features of those kept."""
        if list(rows) != list(range(len(rows))):
            index = mx.array(list(rows))
            for cache in _attention(self._caches):
                cache.keep_rows(self._size, index)
            self._captured = [[hidden[index] for hidden in captured] for captured in self._captured]
        return self.commit(len(rows))

    def rewind(self, size: int) -> int:
        """Keep at most the first `size` tokens. Return the number kept, fewer if rows are gone.

        If the rows are gone, the target returns to a checkpoint at or shortly before the end of the last
        prefill, or to the start.
        """
        assert not self._uncommitted, "rewind with uncommitted rows"
        if size < self._size and (self._recurrent or not self._shorten(size)):
            checkpoints = self._checkpoints
            if not any(self._return_to(checkpoint, size) for checkpoint in reversed(checkpoints)):
                self._reset()
            self._checkpoints = [each for each in checkpoints if each.size <= self._size]
        return self._size

    def reach(self) -> list[tuple[int, int]]:
        """Return the ranges of sizes, both ends included, that `rewind` can return to."""
        return [(self._first_size(point), point.size) for point in self._points()]

    def state(self) -> CacheState:
        """Return what caches and checkpoints hold, as layer@checkpoint. There must be no uncommitted rows."""
        points = self._points()
        replay = cast(list[int], self._replay.tolist())
        parts = {"all": CacheState(numbers={"sizes": [point.size for point in points], "replay": replay})}
        for j, point in enumerate(points):
            for i, (cache, saved) in enumerate(zip(self._caches, point.snapshots, strict=True)):
                if j == 0 or _moves_rows(cache):
                    parts[f"{i}@{j}"] = cache.state(saved)
        return CacheState.join(parts)

    def restore(self, state: CacheState) -> None:
        """Take over the state of a target with the same model; this one is new."""
        numbers = state.part("all").numbers
        self._size, *sizes = numbers["sizes"]
        self._replay = mx.array(numbers["replay"], dtype=mx.int32)
        for i, cache in enumerate(self._caches):
            cache.restore(cache.load(state.part(f"{i}@0")))
        for j, size in enumerate(sizes, 1):
            snapshots = [
                cache.load(state.part(f"{i}@{j}")) if _moves_rows(cache) else size
                for i, cache in enumerate(self._caches)
            ]
            self._checkpoints.append(_Checkpoint(size, snapshots))

    def _points(self) -> list[_Checkpoint]:
        """Return the present place and the checkpoints before it."""
        before = [checkpoint for checkpoint in self._checkpoints if checkpoint.size <= self._size]
        return [_Checkpoint(self._size, [c.snapshot() for c in self._caches]), *before]

    def _first_size(self, point: _Checkpoint) -> int:
        if self._recurrent:
            return point.size
        places = zip(_attention(self._caches), point.snapshots, strict=True)
        return max(cache.first_size(saved) for cache, saved in places)

    def _shorten(self, size: int) -> bool:
        """Move the offsets of all caches back to `size` if that is exact. Return True if it is."""
        attention = _attention(self._caches)
        exact = all(cache.can_rewind(size) for cache in attention)
        for cache in attention if exact else []:
            cache.rewind(size)
        self._size = size if exact else self._size
        return exact

    def _return_to(self, checkpoint: _Checkpoint, size: int) -> bool:
        """Restore the caches of a checkpoint and shorten them to `size`. Return True if that is exact."""
        if self._recurrent and checkpoint.size > size:
            return False
        for layer, saved in zip(self._caches, checkpoint.snapshots, strict=True):
            layer.restore(saved)
        self._size, self._replay = checkpoint.size, self._replay[:0]
        return self._recurrent or self._shorten(min(size, checkpoint.size))

    def _add_checkpoint(self, size: int) -> None:
        self._checkpoints = [*self._checkpoints[-1:], _Checkpoint(size, [c.snapshot() for c in self._caches])]

    def _begin(self) -> None:
        recurrent = [c.snapshot() for c in self._caches if isinstance(c, RecurrentCache)]
        self._rollback = self._replay, recurrent

    def _end(self) -> None:
        self._uncommitted, self._captured, self._rollback = [], [], None

    def _undo(self, keep: int) -> None:
        if self._rollback is None:
            return
        replay, snapshots = self._rollback
        size = self._size + keep
        if self._recurrent:
            size = self._size - replay.size
            self._replay = mx.concatenate([replay, *self._uncommitted])[: replay.size + keep]
        for cache in _attention(self._caches):
            cache.rewind(size)
        recurrent = [c for c in self._caches if isinstance(c, RecurrentCache)]
        for layer, saved in zip(recurrent, snapshots, strict=True):
            layer.restore(saved)

    def _write(self, tokens: mx.array, views: list[TreeCacheView] | None = None) -> mx.array:
        T, rows = tokens.size, mx.concatenate([self._replay, tokens]) if self._replay.size else tokens
        self._replay = self._replay[:0] if self._replay.size else self._replay
        logits: mx.array = self._model(rows[None], cache=views or self._caches)[0]
        self._captured.append([each.outputs.pop()[0, rows.size - T :] for each in self._captures])
        return logits[rows.size - T :] if rows.size > T else logits

    def _features(self, keep: int) -> Features:
        hidden = [
            mx.concatenate(list(h))[:keep] if len(h) > 1 else h[0][:keep]
            for h in zip(*self._captured, strict=True)
        ]
        return features_of(self._needs, hidden, self.shared_kv)

    def shared_kv(self) -> Mapping[str, KVRows]:
        """Return K and V of the committed rows, also while others are uncommitted."""
        if self._lent_kv is not None:
            return self._lent_kv()
        own = [c for c in self._caches if isinstance(c, FullCache | SlidingCache)]
        return {c.attention_type: c.rows(self._size) for c in own}


def captures_of(model: nn.Module, needs: FeatureSpec) -> list[Capture]:
    """Return the captures of the hidden states that a drafter reads, the final one last."""
    decoder = decoder_of(model)
    final = [capture(decoder, "norm")] if needs.final_hidden else []
    return [*(capture(decoder["layers"], i) for i in needs.hidden_layers), *final]


def features_of(needs: FeatureSpec, hidden: Sequence[mx.array], shared_kv: SharedKV) -> Features:
    """Return the features that a drafter needs, of hidden states [T, D] in the order of `captures_of`."""
    layers = len(needs.hidden_layers)
    return Features(
        tuple(hidden[:layers]),
        hidden[layers] if needs.final_hidden and hidden else None,
        shared_kv if needs.shared_kv else None,
    )


def _attention(caches: list[LayerCache]) -> list[AttentionCache]:
    return [cache for cache in caches if not isinstance(cache, RecurrentCache)]


def _moves_rows(cache: LayerCache) -> bool:
    """Return True if a checkpoint of this cache is more than a size: later writes replace its rows."""
    return isinstance(cache, SlidingCache | RecurrentCache)
