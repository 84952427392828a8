"""An unmodified mlx-lm model as a target: uncommitted writes, exact rollback, captured hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import cast

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.errors import NotRewindable
from mlx_spec.model.caches import Caches
from mlx_spec.model.fork_rows import ForkRows, Lane
from mlx_spec.model.hooks import (
    SharedKV,
    captures_of,
    decoder_of,
    features_of,
    parts_of,
    start_layers_early,
    take_outputs,
)
from mlx_spec.model.layer_caches import MAX_UNCOMMITTED
from mlx_spec.model.rewind_points import RewindPoint, RewindPoints, cuts
from mlx_spec.model.row_class import RowClass
from mlx_spec.model.spans import blocks_of, run_with_spans, spans_between
from mlx_spec.model.tree import Tree, TreeCacheView, model_obstacle, tree_of
from mlx_spec.prompt import RotaryPositions, Sight, Span
from mlx_spec.types import CacheState, Features, FeatureSpec, KVRows

MAX_REPLAY_TOKENS = 16  # committed tokens that may join a forward pass; more get a separate pass


class LMTarget(ForkRows):
    """A language model, its caches and the tokens they hold, for one sequence.

    The caches hold `size` committed tokens. A recurrent target's caches may lack the last few (`_replay`).
    After a rejection its state is restored. The accepted tokens join the next forward pass, which saves one.
    """

    def __init__(
        self,
        model: nn.Module,
        needs: FeatureSpec | None = None,
        *,
        kv_bits: int | None = None,
        sight: Sight | None = None,
        rows: RowClass | None = None,
    ) -> None:
        self.rows = rows or RowClass()
        self._model, self._sight, self._kv_bits = model, sight, kv_bits
        self._needs = needs or FeatureSpec()
        self._captures = captures_of(model, self._needs)
        self._eager = start_layers_early(decoder_of(model).layers)
        self.parts = parts_of(model)
        super().__init__()
        self.forget()
        # Its state follows one path, and rollback needs a rewind point.
        self.is_recurrent = bool(self.caches.recurrent)
        if self._needs.shared_kv and self.is_recurrent:
            raise NotRewindable(
                "this drafter reads the target's K/V and this target is recurrent: use a drafter made for it"
            )

    def forget(self) -> None:
        """Hold no tokens, also after a pass that failed: what it wrote is not known."""
        self.hold_rows()
        self.caches = Caches.of_model(self._model, self._kv_bits)
        self.size = 0
        self._from_prompt = 0  # how many of the first tokens were written as a prompt
        self.rotary = RotaryPositions()  # beside pictures
        self._replay = mx.array([], dtype=mx.int32)  # committed tokens that no committed pass has written
        self._uncommitted: list[mx.array] = []  # tokens of each uncommitted forward pass
        self._captured: list[list[mx.array]] = []  # by forward pass, by capture: [T, D]
        self.rewind_points = RewindPoints()  # that `rewind` can return to after rows are gone
        self._batch_kv: SharedKV | None = None  # returns K and V while a batch has the caches
        self._lane = None  # returns the batch's caches and the lane, while it has them
        self._copies, self._window_copies, self._has_own_windows = [], [], False

    @property
    def uncommitted(self) -> int:
        return sum(tokens.size for tokens in self._uncommitted)

    @property
    def is_in_pass(self) -> bool:
        """Return True between two layers of a pass that reads a prompt: its rows cannot be copied."""
        return bool(self.caches.uncommitted) and not self._uncommitted

    @property
    def most_rows(self) -> int:
        """Return the most rows of the next pass, so that it has the bits of plain decoding."""
        return self.rows.most_rows(self.size) - self._replay.size

    @property
    def nbytes(self) -> int:
        """Return the bytes of the caches, with rewind points."""
        return sum(array.nbytes for array in self.caches.arrays()) + sum(self.pinned.values())

    @property
    def pinned(self) -> dict[int, int]:
        """Return the bytes of the arrays that only rewind points have, by a number that forks share."""
        present = {id(array) for array in self.caches.arrays()}
        blocks = self.rewind_points.blocks().values()
        return {id(b): b.nbytes for b in blocks if b.arrays() and id(b.arrays()[0]) not in present}

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one token in the caches that keep every position."""
        buffers = [b for c in self.caches.attention if c.columns.window is None for b in c.buffers]
        return sum(buffer.nbytes // buffer.shape[2] for buffer in buffers)

    @property
    def reads_spans_whole(self) -> bool:
        """Return True if attention within a span is bidirectional, so that one pass has to write it whole."""
        return self._sight is not None and self._sight.together is not None

    def prefill(
        self, tokens: Sequence[int], spans: Sequence[Span] = (), *, ends_prompt: bool = True
    ) -> Features:
        """Write and commit one chunk of the prompt, without logits. Return its features, evaluated.

        `spans` are the spans of the whole prompt. Positions of the chunk inside a span get the span's rows.
        `ends_prompt` says that this chunk is the last one.
        """
        features, points = self._begin_prefill(tokens, spans, ends_prompt)
        return self._end_prefill(len(tokens), features, points, ends_prompt)

    @property
    def prefill_parts(self) -> int:
        """Return the number of parts of `prefill_by_layers`, 1 if a prompt is read in whole passes only."""
        return len(self.caches.layers) + 1

    def prefill_by_layers(
        self, tokens: Sequence[int], spans: Sequence[Span] = (), *, ends_prompt: bool = True
    ) -> Iterator[Features | None]:
        """Do what `prefill` does. Yield None after each layer, and then the features.

        No other code may use this target meanwhile. If it is closed early, nothing has been written.
        """
        features, points = self._begin_prefill(tokens, spans, ends_prompt)
        try:
            for cache in self.caches.layers:  # its arrays depend on the layers before, which run first
                mx.eval(cache.arrays())
                yield None
            yield self._end_prefill(len(tokens), features, points, ends_prompt)
        finally:
            if self.caches.uncommitted:
                self.commit(0)

    def _begin_prefill(
        self, tokens: Sequence[int], spans: Sequence[Span], ends_prompt: bool
    ) -> tuple[Features, list[RewindPoint]]:
        """Write a chunk. Return its features, not evaluated, and the rewind points within it.

        A recurrent state is kept where a pass ends. Each pass reads all weights, so there are few.
        """
        rows, points = mx.array(list(tokens), dtype=mx.int32), list[RewindPoint]()
        if spans:  # of a text, nothing is kept that has any
            self.rotary = RotaryPositions.of(self._sight, spans)
        start, low = self.size, 0
        ends = (
            cuts(self.rewind_points.wanted, start, start + len(tokens), spans, ends_prompt)
            if self.is_recurrent
            else []
        )
        for size, reason in ends:
            self._write(rows[low : size - start], reads_prompt=True, spans=spans)
            points.append(self.caches.rewind_point(size, reason))
            low = size - start
        self._write(rows[low:], reads_prompt=True, spans=spans)
        if not self._needs.prompt_hidden:
            self._captured = []  # before they are computed
        return self._features(len(tokens)), points

    def _end_prefill(
        self, count: int, features: Features, points: Sequence[RewindPoint], ends_prompt: bool
    ) -> Features:
        """Evaluate and commit a chunk. Return its features."""
        hidden = [*features.hidden, *([] if features.final_hidden is None else [features.final_hidden])]
        mx.eval([point.arrays() for point in points], self.caches.arrays(), hidden)
        self.count(count, reads_prompt=True)
        self._commit_all()
        self.keep_rewind_points(count, points, ends_prompt=ends_prompt)
        return features

    def pin_at(self, sizes: Sequence[int], length: int = 0, opening: int = 0) -> None:
        """Keep rewind points at these sizes of a prompt of that `length`, too. A rewind forgets them.

        Other prompts are expected to part from it in its `opening`: the tokens before the end of a turn.
        """
        self.rewind_points.pin_at(sizes, length, opening)

    def keep_rewind_points(
        self, count: int, points: Sequence[RewindPoint] = (), *, ends_prompt: bool = True, apart: int = 1024
    ) -> None:
        """Keep `points`, the wanted ones among the last `count` tokens, and perhaps one at the end."""
        if self.is_recurrent or self.caches.has_windows:
            first = max(self.caches.first_size(), self.size - count + 1)
            sizes, make = (first, self.size), self.caches.rewind_point
            self.rewind_points.keep(points, sizes, make, self.row_bytes, ends_prompt, apart)

    def drop_rewind_point(self, size: int) -> None:
        self.rewind_points.drop(size)

    def slack(self) -> int:
        """Return the bytes that `trim` frees."""
        return self.caches.slack(self.rewind_points.blocks())

    def trim(self) -> None:
        """Free buffers that no token needs, and rows that rewind points have. `rewind` gives them back."""
        self._refer()
        if self.caches.has_windows and not self.is_recurrent and self.rewind_points.parked is None:
            self.rewind_points.park(self.caches.drop_windows(self.rewind_points.blocks()))
        self.caches.trim()
        mx.eval(self.caches.arrays(), [point.arrays() for *_, point in self.rewind_points.reach()])

    def verify(self, tokens: mx.array, *, early: bool = True) -> mx.array:
        """Write T uncommitted tokens and return logits [T, V]. A second call adds to the first.

        With `early` the device begins while the pass is built; without, a GPU still has another to compute.
        """
        assert self.uncommitted + tokens.size <= MAX_UNCOMMITTED, "too many uncommitted rows for the caches"
        if self._replay.size > MAX_REPLAY_TOKENS:
            self._write_replay()
        with self._eager.on(early):
            logits = self._write(tokens, padding=max(self.rows.base - tokens.size, 0))
        self._uncommitted.append(tokens)
        return logits

    def commit(self, keep: int) -> Features:
        """Keep the first `keep` uncommitted rows and drop the others. Return the features of those kept.

        `commit(0)` also repairs the caches after an interrupted forward pass.
        """
        written = self.uncommitted
        assert 0 <= keep <= written, f"commit of {keep} rows, {written} uncommitted"
        features = self._features(keep)
        self.size += keep
        if self.is_recurrent and (keep < written or not keep):
            replay = mx.concatenate([self._replay, *self._uncommitted])[: self._replay.size + keep]
            self._drop_passes([0], replay)
        elif self.is_recurrent:
            self._commit_all()
        else:
            self._drop_passes([keep], self._replay)
        return features

    def move_to(self, size: int) -> None:
        """Hold `size` tokens that nothing wrote, to check passes there; see `Caches.move_to`."""
        self.caches.move_to(size)
        self.size = size

    def detach(self, shared_kv: SharedKV, lane: Lane) -> Caches:
        """Return the caches for passes shared with other targets, with all committed tokens in them.

        Until `attach`, only `count` may be called. `shared_kv` returns the K and V, `lane` the shared
        caches and the lane of this target.
        """
        assert not self._uncommitted, "caches are detached after a commit"
        self._refer()
        if self._replay.size:
            self._write_replay()
        self._batch_kv, self._lane = shared_kv, lane
        self.caches.shifts = [self.rotary.shift(self.size)]
        return self.caches

    def attach(self, replay: mx.array) -> Caches:
        """Return the detached caches. The caller fills them with all tokens except `replay`."""
        self._batch_kv, self._lane, self._replay = None, None, replay
        return self.caches

    def count(self, tokens: int, *, reads_prompt: bool = False) -> None:
        """Count tokens that a shared or own pass committed."""
        self._from_prompt += tokens if reads_prompt and self._from_prompt == self.size else 0
        self.size += tokens

    @cached_property
    def tree_obstacle(self) -> str | None:
        """Return why this target cannot verify a tree of draft tokens exactly; None if it can."""
        if self.is_recurrent:
            return "its state is recurrent and follows one path"
        if self.rows.is_bitwise:
            return "the keys of a path lie apart, so its rows would not have the bits of plain decoding"
        return model_obstacle(self._model)

    def verify_tree(self, tokens: mx.array, parents: tuple[int, ...]) -> mx.array:
        """Write the pending token and a tree, [K + 1], uncommitted. Return logits [K + 1, V].

        A second call adds rows to the tree; `parents` has an entry for all rows. Raises NotRewindable if the
        target cannot verify trees.
        """
        start = self.uncommitted
        assert start + tokens.size == len(parents) + 1 <= MAX_UNCOMMITTED, "a tree follows a commit"
        if reason := self.tree_obstacle:
            raise NotRewindable(f"this target cannot verify a tree of drafts, {reason}: draft a chain")
        with self._eager.on():
            logits = self._write(tokens, tree_of(parents))
        self._uncommitted.append(tokens)
        return logits

    def commit_path(self, rows: Sequence[int]) -> Features:
        """Keep these rows of a tree, a path from row 0 on, and drop the others. Return their features."""
        if list(rows) != list(range(len(rows))):
            index = mx.array(list(rows))
            self.caches.keep_path(index)
            self._captured = [[hidden[index] for hidden in captured] for captured in self._captured]
        return LMTarget.commit(self, len(rows))  # over several ranks this method is announced as a whole

    def rewind(self, size: int) -> int:
        """Keep at most the first `size` tokens. Return the number kept, fewer if rows are gone.

        If the rows are gone, the target returns to the last rewind point from which that is exact, or to the
        start.
        """
        assert not self._uncommitted, "rewind with uncommitted rows"
        size, rewind_points = min(size, self._last_reusable), self.rewind_points
        if size < self.size or self.rewind_points.parked is not None:
            point, kept = self._rewind_point(size)
            self._refer()  # else copies would be made over what is restored
            self.hold_rows(kept)
            if not kept:
                self.forget()
            elif point is not None:
                self.caches.restore(point)
            written = self.caches.sizes[0]
            self.caches.sizes = [min(kept, written)]
            self.size, self._replay = kept, self._replay[: max(kept - written, 0)]
        self.rewind_points = rewind_points.before(self.size)  # other tokens may follow
        self.rotary = self.rotary.before(self.size)
        self._from_prompt = min(self._from_prompt, self.size)
        return self.size

    def fork_from(self, origin: LMTarget, size: int, more: int) -> int:
        """Take over the tokens that `origin.rewind(size)` would keep. Return their number.

        The origin has the same model. It may be in use, and in a batch. This target must be new; it gets room
        for `more` tokens. Rows are copied by `copies`, or when they are needed.
        """
        origin._refer()
        point, kept = origin._rewind_point(min(size, origin._last_reusable))
        if not kept:
            return 0
        caches, lane = (origin.caches, 0) if origin._lane is None else origin._lane()
        written = min(kept, caches.sizes[lane] if point is None else point.size)
        self.caches.fork(
            caches.full_rows(lane, written), point or caches.rewind_point(written), written, more
        )
        self._has_own_windows = point is not None
        self.size, self._from_prompt = kept, min(origin._from_prompt, kept)
        self._replay = origin._replay[: kept - written]
        self.rotary = origin.rotary.before(kept)
        self.rewind_points = origin.rewind_points.before(kept)
        self.compute_later(self.caches.arrays())
        return kept

    def reach(self) -> list[tuple[int, int]]:
        """Return the ranges of sizes, both ends included, that `rewind` can return to."""
        last = self._last_reusable
        return [(low, min(high, last)) for low, high, _ in self._reached() if low <= last]

    def _rewind_point(self, size: int) -> tuple[RewindPoint | None, int]:
        """Return the point that keeps most of `size` tokens, None for the present end; and how many."""
        kept = [(min(size, high), point) for low, high, point in self._reached() if low <= size]
        size, point = max(kept, key=lambda pair: pair[0], default=(0, None))
        return None if point is None else point.cut(size), size

    def _reached(self) -> list[tuple[int, int, RewindPoint | None]]:
        """Return the ranges of sizes that the present end (None) and the rewind points give back.

        Windows and states are not in these caches while a batch has them.
        """
        present = list[tuple[int, int, None]]()
        if self._lane is None and self.rewind_points.parked is None:
            present = [(self.caches.first_size(), self.size, None)]
        elif not self.is_recurrent and not self.caches.has_windows:
            present = [(0, self.size, None)]
        return [*present, *self.rewind_points.reach()]

    @property
    def _last_reusable(self) -> int:
        """Return the largest size to rewind to. If prompts see further, no generated token is reused."""
        return self._from_prompt if self.caches.prompts_see_further else self.size

    def state(self) -> CacheState:
        """Return the content of the caches ("@0") and of the rewind points, all committed."""
        self._refer()
        if (parked := self.rewind_points.parked) is not None:
            self.caches.restore(parked)
            self.rewind_points.park(None)
        rotary = [number for span in self.rotary.before(self.size).spans for number in span]
        replay = cast(list[int], self._replay.tolist())
        numbers = {"size": [self.size, self._from_prompt], "replay": replay, "places": rotary}
        points = self.rewind_points.state()
        return CacheState.join({"all": CacheState(numbers=numbers), "@0": self.caches.state(), **points})

    def restore(self, state: CacheState) -> None:
        """Take over the state of a target with the same model. This target must be new."""
        numbers = state.part("all").numbers
        self.size, self._from_prompt = numbers["size"]
        self._replay = mx.array(numbers["replay"], dtype=mx.int32)
        of_span = iter(numbers["places"])
        spans = tuple(zip(of_span, of_span, of_span, strict=True))
        self.rotary = RotaryPositions(self._sight.axes if self._sight else (), spans)
        self.caches.load(state.part("@0"))
        self.rewind_points = RewindPoints.load(state)

    def _commit_all(self) -> None:
        self._drop_passes([self.caches.uncommitted], self._replay[:0])

    def _drop_passes(self, keep: list[int], replay: mx.array) -> None:
        """Keep the first uncommitted rows of the caches, note the tokens to replay, forget the passes."""
        self.caches.commit(keep)
        self._replay, self._uncommitted, self._captured = replay, [], []

    def _write_replay(self) -> None:
        self._write(self._replay[:0])
        self._commit_all()

    def _write(
        self,
        tokens: mx.array,
        tree: Tree | None = None,
        *,
        reads_prompt: bool = False,
        spans: Sequence[Span] = (),
        padding: int = 0,
    ) -> mx.array:
        """Write `_replay`, tokens, and `padding` rows that are dropped."""
        self._refer()
        first = self._replay.size and not self.caches.uncommitted
        rows = mx.concatenate([self._replay, tokens]) if first else tokens
        before = rows.size - tokens.size
        if padding:
            rows = mx.concatenate([rows, *[tokens[-1:]] * padding])  # an MoE reads no other experts
        start = self.caches.sizes[0] + self.caches.uncommitted
        end = start + rows.size
        spans = spans_between(spans, start, end)
        blocks = blocks_of(self._sight, spans, start, end)
        in_all = self._sight is not None and self._sight.together == "all"
        self.caches.shifts = [self.rotary.shift(start)]
        self.caches.begin(rows.size, reads_prompt=reads_prompt, blocks=blocks, in_all=in_all)
        views = None
        if tree is not None:
            views = [TreeCacheView(cache, tree, self.uncommitted) for cache in self.caches.attention]
        cache = self.caches.for_model(views)
        if spans:
            assert self._sight is not None, "this target reads text alone"
            logits = run_with_spans(self._model, self._sight, self.rotary, rows, start, spans, cache)
        else:
            logits = self._model(rows[None], cache=cache)[0]
        self.caches.drop(padding)
        end = before + tokens.size
        self._captured.append([outputs[0, before:end] for outputs in take_outputs(self._captures)])
        return logits[before:end] if before or padding else logits

    def _features(self, keep: int) -> Features:
        hidden = [
            mx.concatenate(list(h))[:keep] if len(h) > 1 else h[0][:keep]
            for h in zip(*self._captured, strict=True)
        ]
        return features_of(self._needs, hidden, self.shared_kv, self.rotary)

    def shared_kv(self) -> Mapping[str, KVRows]:
        """Return K and V of the committed rows, also while others are uncommitted."""
        if self._batch_kv is not None:
            return self._batch_kv()
        return {cache.attention_type: cache.rows(0, self.size) for cache in self.caches.unquantized}
