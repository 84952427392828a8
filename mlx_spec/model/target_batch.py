"""Targets whose blocks are verified in one pass. Each keeps its own text, draft and rollback."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.checkpoint.files import one_line
from mlx_spec.model.caches import Caches
from mlx_spec.model.hooks import captures_of, decoder_of, features_of, start_layers_early, take_outputs
from mlx_spec.model.layer_caches import lanes_without
from mlx_spec.model.probe import rounding_of
from mlx_spec.model.row_class import RowClass
from mlx_spec.model.target import MAX_REPLAY_TOKENS, LMTarget
from mlx_spec.model.tree import POSITION_ERRORS
from mlx_spec.types import MAX_DRAFT_TOKENS, Features, FeatureSpec, KVRows, no_draft


class SingleTarget:
    """The target of one sequence: its passes need no other lanes, and it can verify trees."""

    takes_drafts = True

    def __init__(self, target: LMTarget) -> None:
        self.target = target
        self.doubt: str | None = None  # why the last pass may not have the bits of plain decoding

    @property
    def nbytes(self) -> int:
        return self.target.nbytes

    @property
    def most_drafted(self) -> int:
        """Return the most draft tokens of the next pass, so that it has the bits of plain decoding."""
        return max(self.target.most_rows - 1, 0)

    @property
    def plain_cost(self) -> float:
        """Return the time of a plain pass, in passes of one row of each sequence."""
        return self.target.rows.cost

    def verify(self, tokens: mx.array, sizes: Sequence[int], *, early: bool = True) -> mx.array:
        self.doubt = self.target.rows.doubt if tokens.size > 1 else None
        return self.target.verify(tokens, early=early)

    def commit(self, keep: Sequence[int]) -> list[Features]:
        return [self.target.commit(keep[0])]


class TargetBatch:
    """Targets of one model whose rows are written and verified in one pass.

    A target joins with its committed tokens, and is not used directly until it leaves. After a rejection a
    recurrent state lacks the accepted tokens. They are put in front of the next block, as in a single target.
    `takes_drafts` is False if a pass may hold only one token of each sequence.
    """

    plain_cost = 1.0  # its plain passes have one row of each sequence, or one is as good as two

    def __init__(
        self,
        model: nn.Module,
        needs: FeatureSpec,
        *,
        takes_drafts: bool = True,
        rows: RowClass | None = None,
    ) -> None:
        self.takes_drafts = takes_drafts
        self.rows = rows or RowClass()
        self.doubt: str | None = None  # why the last pass may not have the bits of plain decoding
        self._model = model
        self._needs = needs
        self._captures = captures_of(model, needs)
        self._eager = start_layers_early(decoder_of(model).layers)
        self._caches = Caches()
        self._origins: list[LMTarget] = []
        self._replays: list[mx.array] = []  # by target: committed tokens that its caches lack
        # By target: tokens of the last pass, replayed ones included. Only for recurrent states.
        self._rows: list[mx.array] = []
        self._captured: list[mx.array] = []  # by capture, [B, T, D]

    @property
    def most_drafted(self) -> int:
        """Return the most draft tokens of each sequence in the next pass.

        With them it has the bits of plain decoding. If no pass of these sequences has, drafts are free.
        """
        most = self.rows.most_shared([origin.size for origin in self._origins])
        replayed = max(replay.size for replay in self._replays)
        return most - 1 - replayed if most > replayed else MAX_DRAFT_TOKENS

    @property
    def must_part(self) -> bool:
        """Return True if the targets may not share the next passes: see `RowClass`."""
        replayed = max(replay.size for replay in self._replays)
        return self.rows.must_part([origin.size for origin in self._origins], replayed)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._caches.arrays())

    def states(self, index: int) -> list[list[mx.array]]:
        """Return the arrays of each recurrent layer of a target, as committed."""
        states = [cache.arrays() for cache in self._caches.recurrent]
        return [[array[index : index + 1] for array in arrays] for arrays in states]

    def join(self, origin: LMTarget) -> None:
        """Move a target into the shared caches."""
        self._caches.join(origin.detach(partial(self._shared_kv, origin), partial(self._lane_of, origin)))
        self._origins.append(origin)
        self._replays.append(no_draft().tokens)

    def leave(self, index: int, *, keep: bool, read: int = 0) -> None:
        """Remove a target; the last one takes its index. With `keep` it gets its caches back.

        If `read` tokens of a prompt were read, up to its end, it also keeps rewind points.
        """
        origin, replay = self._origins[index], self._replays[index]
        if not keep:
            origin.hold_rows()
        self._origins[index], self._replays[index] = self._origins[-1], self._replays[-1]
        self._origins.pop()
        self._replays.pop()
        lanes = lanes_without(index, len(self._origins) + 1)
        if self._rows:
            self._rows = [self._rows[lane] for lane in lanes]
        self._captured = [hidden[mx.array(lanes, dtype=mx.int32)] for hidden in self._captured]
        self._caches.leave(index, origin.attach(replay) if keep else None)
        if read:
            origin.keep_rewind_points(read)

    def prefill(self, tokens: mx.array, sizes: Sequence[int]) -> list[Features]:
        """Write and commit tokens of prompts [R], without logits; `sizes` are the rows of each target.

        Returns their features, evaluated. Not for recurrent targets, whose rewind points would be missing.
        """
        self._write(tokens, sizes, [0] * len(sizes), reads_prompt=True)
        if not self._needs.prompt_hidden:
            self._captured = []  # before they are computed
        features = self._commit(sizes, reads_prompt=True)
        hidden = [
            array
            for of_one in features
            for array in (*of_one.hidden, of_one.final_hidden)
            if array is not None
        ]
        mx.eval(self._caches.arrays(), hidden)
        return features

    def verify(self, tokens: mx.array, sizes: Sequence[int], *, early: bool = True) -> mx.array:
        """Write uncommitted tokens [R]; `sizes` are the rows of each target. Return their logits [R, V].

        `early` is as in `LMTarget.verify`.
        """
        if self._caches.uncommitted:  # the last pass was interrupted
            self._caches.commit([0] * len(sizes))
        if max(replay.size for replay in self._replays) > MAX_REPLAY_TOKENS:
            replayed = [replay.size for replay in self._replays]
            self._write(mx.concatenate(self._replays), replayed, [0] * len(sizes))
            self._caches.commit(replayed)
            self._replays = [no_draft().tokens] * len(sizes)
        starts = [replay.size for replay in self._replays]
        if self._caches.recurrent:
            blocks = mx.split(tokens, list(itertools.accumulate(sizes))[:-1])
            self._rows = [
                mx.concatenate([replay, block]) if replay.size else block
                for replay, block in zip(self._replays, blocks, strict=True)
            ]
            tokens = mx.concatenate(self._rows) if any(starts) else tokens
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        return self._write(tokens, ends, starts, early=early)

    def _write(
        self,
        tokens: mx.array,
        sizes: Sequence[int],
        starts: Sequence[int],
        *,
        reads_prompt: bool = False,
        early: bool = True,
    ) -> mx.array:
        """Write tokens in one padded pass; `sizes` are the rows of each target.

        Returns the logits [R, V] of the rows of each target from its `starts` on.
        """
        T = max(sizes)
        if not reads_prompt:
            T = max(T, self.rows.fewest)
            is_exact = self.rows.most_shared([origin.size for origin in self._origins]) >= T
            beside = f"beside {len(sizes) - 1} other answer{'s' * (len(sizes) > 2)}"
            self.doubt = self.rows.doubt or (None if is_exact else beside)
        self._caches.begin(T, sizes, reads_prompt=reads_prompt)
        if min(sizes) < T:  # any token may serve as padding
            ends = zip(sizes, itertools.accumulate(sizes), strict=True)
            index = [[min(end - size + j, end - 1) for j in range(T)] for size, end in ends]
            tokens = tokens[mx.array(index)]
        with self._eager.on(early):
            logits: mx.array = self._model(tokens.reshape(-1, T), cache=self._caches.for_model())
        self._captured = take_outputs(self._captures)
        logits = logits.reshape(-1, logits.shape[-1])
        if any(starts) or min(sizes) < T:
            ranges = enumerate(zip(starts, sizes, strict=True))
            logits = logits[mx.array([i * T + j for i, (low, high) in ranges for j in range(low, high)])]
        return logits

    def commit(self, keep: Sequence[int]) -> list[Features]:
        """Keep the first uncommitted rows of each target. Return the features of those kept."""
        return self._commit(keep)

    def _commit(self, keep: Sequence[int], *, reads_prompt: bool = False) -> list[Features]:
        recurrent, replays, written = bool(self._caches.recurrent), list(self._replays), list(keep)
        for i, rows in enumerate(self._rows if recurrent else ()):
            size = replays[i].size + keep[i]
            is_whole = size == rows.size
            written[i] = size if is_whole else 0
            self._replays[i] = no_draft().tokens if is_whole else rows[:size]
        self._caches.commit(written)
        captured, self._captured, self._rows = self._captured, [], []
        features = []
        for i, (origin, replay, count) in enumerate(zip(self._origins, replays, keep, strict=True)):
            origin.count(count, reads_prompt=reads_prompt)
            hidden = [outputs[i, replay.size : replay.size + count] for outputs in captured]
            features.append(features_of(self._needs, hidden, origin.shared_kv, origin.rotary))
        return features

    def _shared_kv(self, origin: LMTarget) -> Mapping[str, KVRows]:
        caches, lane = self._lane_of(origin)
        return {cache.attention_type: cache.rows(lane, origin.size) for cache in caches.unquantized}

    def _lane_of(self, origin: LMTarget) -> tuple[Caches, int]:
        return self._caches, next(i for i, other in enumerate(self._origins) if other is origin)


@dataclass(frozen=True)
class BatchSupport:
    """Says whether sequences of one model can share passes exactly."""

    obstacle: str | None  # None if they can
    takes_drafts: bool  # False if padding spoils a recurrent state
    is_bitwise: bool = True  # False if their logits differ from the logits of each alone in a bit


def probe_batch(model: nn.Module, rows: RowClass | None = None) -> BatchSupport:
    """Return whether sequences of a model can share passes: two unequal ones decode together and alone.

    A model that calculates with positions raises, or its logits differ. A model that does not mask padding in
    its recurrent state has wrong logits after an unequal pass. With a row class the bits are compared, too.
    """
    is_recurrent, tolerance = LMTarget(model).is_recurrent, rounding_of(model)
    drafted = 4  # neither 1 nor the number of sequences, so that no wrong shape fits
    try:
        error = _probe(model, [[1, 1] if is_recurrent else [drafted, drafted]])
    except POSITION_ERRORS as reason:
        return BatchSupport(f"its model calculates with positions ({one_line(reason, 80)})", False)
    if not error <= tolerance:  # NaN, too
        return BatchSupport("its logits for two sequences together are not those of each alone", False)
    takes_drafts = True
    if is_recurrent:
        try:
            takes_drafts = _probe(model, [[1, drafted], [1, 1]]) <= tolerance
        except POSITION_ERRORS:
            takes_drafts = False
    is_bitwise = True
    if rows is not None and (most := rows.most_shared([3, 6])) and rows.is_bitwise:
        sizes = [[1, 1], [most, most], [1, most], [1, 1]] if takes_drafts else [[1, 1]]
        is_bitwise = _probe(model, sizes, rows) == 0
    return BatchSupport(None, takes_drafts, is_bitwise)


def _probe(model: nn.Module, passes: Sequence[Sequence[int]], rows: RowClass | None = None) -> float:
    """Return the largest error of two sequences together, over passes with the given rows of each.

    It is the error of logits, or the median error of recurrent states. Padding that is not masked spoils all
    states, and may hardly show in the next logits.
    """
    # Tokens of two prompts: unequal, so that their positions differ. States of some models grow at first.
    lengths = (1, 6)
    shared = TargetBatch(model, FeatureSpec(), rows=rows)
    alone = [LMTarget(model, rows=rows) for _ in lengths]
    for target, length in zip(alone, lengths, strict=True):
        origin = LMTarget(model)
        for reader in (target, origin):
            reader.prefill([7 * i % 11 for i in range(length)])
        shared.join(origin)
    errors = []
    for sizes in passes:
        blocks = [mx.arange(size, dtype=mx.int32) + i for i, size in enumerate(sizes)]
        together = shared.verify(mx.concatenate(blocks), sizes)
        shared.commit(sizes)
        for target, block, ours in zip(alone, blocks, mx.split(together, sizes[:1]), strict=True):
            theirs = target.verify(block)
            target.commit(block.size)
            errors.append(_difference(ours, theirs))
        errors += _state_error(shared, alone)
    return float(mx.stack(errors).max())


def _state_error(shared: TargetBatch, alone: Sequence[LMTarget]) -> list[mx.array]:
    """Return the median error of the recurrent layers, if there are any."""
    by_layer: list[list[mx.array]] = []
    for lane, target in enumerate(alone):
        right = target.detach(target.shared_kv, lambda: (Caches(), 0)).recurrent
        target.attach(no_draft().tokens)
        by_layer = by_layer or [[] for _ in right]
        for errors, ours, theirs in zip(by_layer, shared.states(lane), right, strict=True):
            errors += [_difference(*pair) for pair in zip(ours, theirs.arrays(), strict=True)]
    return [mx.sort(mx.stack([mx.stack(e).max() for e in by_layer]))[len(by_layer) // 2]] if by_layer else []


def _difference(ours: mx.array, theirs: mx.array) -> mx.array:
    """Return the largest difference, as a share of the largest value."""
    ours, theirs = ours.astype(mx.float32), theirs.astype(mx.float32)
    return mx.abs(ours - theirs).max() / mx.maximum(mx.abs(theirs).max(), 1e-30)
