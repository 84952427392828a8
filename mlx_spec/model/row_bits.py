"""Measure the row class of a target: compare passes of several rows with plain passes, bit by bit.

Whole passes show what reaches the logits and the caches. A small model rounds so seldom that they may agree
by luck. So each distinct linear layer also runs alone, with many random rows. Attention runs alone over as
many keys as its kernels distinguish.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_spec.model.layers_alone import AttentionKind, Layer, bits, recorded
from mlx_spec.model.row_class import RowClass
from mlx_spec.model.target import LMTarget
from mlx_spec.types import MAX_DRAFT_TOKENS


def measure_rows(
    model: nn.Module,
    target: LMTarget,
    vocab_size: int,
    context_length: int | None = None,
    *,
    context: int = 24,
    # Attention on a GPU may take another kernel from these numbers of keys on (dispatch by keys in
    # mlx/backend/metal/scaled_dot_product_attention.cpp).
    edges: Sequence[int] = (1024, 4096, 8192, 16384, 32768, 65536),
    outputs: int = 2**16,
) -> RowClass:
    """Return the row class of a target on this device. `target` is new, and has no class.

    Whole passes follow `context` tokens. Layers alone compute about `outputs` numbers. If no draft agrees
    with plain decoding, the class says why.
    """
    is_gpu, most, recorded_rows = mx.default_device().type == mx.gpu, MAX_DRAFT_TOKENS + 1, 5
    tokens = np.random.default_rng(0).integers(0, vocab_size, context + most).tolist()
    target.prefill(tokens[:context])
    run_pass = partial(_one_pass, target, tokens[context:][:recorded_rows])
    layers, attentions = recorded(model, run_pass, recorded_rows, outputs)
    alone = Alone(
        layers,
        attentions,
        8 if is_gpu else most,  # on a GPU attention takes a kernel for matrices from 9 rows on
        # Kernels of a CPU do not depend on the keys: one number shows it.
        [edge for edge in (edges if is_gpu else edges[:1]) if edge < (context_length or edge + 1)],
        sorted({w for cache in target.caches.attention if (w := cache.columns.window) is not None}),
        keeps_edges=is_gpu,
    )
    best, drafted, rows = RowClass(doubt=_doubt(target)), 0, 0
    for base in (1,) if target.is_recurrent else (1, 2):
        candidate = alone.measured(base)
        most, compared = _whole_rows(target, tokens, base, candidate.most)
        if most < candidate.most:
            candidate = replace(candidate, differs=f"a pass of {most + 1} rows")
        rows += compared
        if most - 1 > drafted:
            best = replace(
                candidate,
                limits=tuple((keys, min(most, rows_there)) for keys, rows_there in candidate.limits),
            )
            drafted = most - 1
        elif not best.limits:
            best = replace(best, differs=best.differs or candidate.differs)
        if most >= 5:  # a second row has a price, and drafts of more than 4 tokens hardly pay
            break
    cost = _cost(target, tokens[context], best.base) if best.base > 1 else 1.0
    return replace(best, cost=cost, compared=(rows, len(layers) + len(attentions)))


def _doubt(target: LMTarget) -> str:
    if target.is_recurrent:
        return "its state is recurrent, and passes of several rows round otherwise"
    return "passes of several rows round otherwise on this device"


# --- layers alone


@dataclass(frozen=True)
class Alone:
    """The layers of a model that run alone, and where attention may take another kernel."""

    layers: Sequence[Layer]
    attentions: Sequence[AttentionKind]
    limit: int  # rows of a pass of one sequence
    edges: Sequence[int]  # numbers of keys
    windows: Sequence[int]
    keeps_edges: bool  # every edge counts, whether or not bits differ across it

    def measured(self, base: int) -> RowClass:
        """Return the class of plain passes of `base` rows."""
        linear, differs, is_shared = MAX_DRAFT_TOKENS + 1, None, True
        for layer in self.layers:
            plain = layer.plain(base)
            rows = _agreeing(_sampled(linear), partial(layer.agrees, plain=plain))
            if rows < linear:
                linear, differs = rows, f"{layer.name} in passes of {rows + 1} rows"
            is_shared = is_shared and layer.agrees_side_by_side(linear, plain)
        most = min(linear, self.limit)
        windowed, limits = most, list[tuple[int, int]]()
        for keys in sorted({0, *self.edges, *self.windows}):
            rows = min(self._attended(base, most, keys, None), windowed)
            if keys in self.windows:
                windowed = rows = min(rows, self._attended(base, most, keys, keys))
            if not limits or rows != limits[-1][1]:
                limits.append((keys, rows))
        fewest = next((T for T in (1, 2) if self._agrees_in_batch(base, T)), 0)
        is_shared = is_shared and fewest > 0 and self._agrees_in_batch(base, limits[0][1])
        rows = min(rows for _, rows in limits)
        edges = tuple(edge for edge in self.edges if self.keeps_edges or self._is_edge(base, rows, edge))
        return RowClass(base, tuple(limits), linear * is_shared, max(fewest, 1), edges, differs=differs)

    def _attended(self, base: int, most: int, keys: int, window: int | None) -> int:
        """Return up to how many rows attention agrees after `keys` tokens or a few more."""
        for attention in self.attentions:
            # Within the rows the view of a window moves on by a step.
            rows = attention.over(keys + 48 if window is None else window + 123, window)
            most = _agreeing(_sampled(most), partial(rows.agrees, plain=rows.plain(base)))
        return most

    def _agrees_in_batch(self, base: int, T: int) -> bool:
        """Return True if T rows of a sequence in a batch, where masks are arrays, agree with plain passes."""
        drawn = [attention.over(48) for attention in self.attentions]
        return all(rows.agrees(T, rows.plain(base), has_mask=True) for rows in drawn)

    def _is_edge(self, base: int, most: int, edge: int) -> bool:
        """Return True if the rows of a pass differ that ends beyond an edge and begins before it."""
        drawn = [attention.over(edge - most // 2 - 1) for attention in self.attentions]
        return not all(rows.agrees(most, rows.plain(base)) for rows in drawn)


def _agreeing(counts: Sequence[int], agrees: Callable[[int], bool]) -> int:
    """Return up to how many of these rows passes agree, 1 if none does."""
    best = 1
    for T in counts:
        if not agrees(T):
            break
        best = T
    return best


def _sampled(most: int) -> list[int]:
    """Return row counts up to `most`: all up to 8, and two beyond them, which only a CPU has in one class."""
    return [T for T in range(2, most + 1) if T <= 8 or T in (9, 12, most)]


# --- whole passes


def _one_pass(target: LMTarget, tokens: Sequence[int]) -> None:
    mx.eval(target.verify(mx.array(list(tokens), dtype=mx.int32)))
    target.commit(0)


def _whole_rows(target: LMTarget, tokens: Sequence[int], base: int, most: int) -> tuple[int, int]:
    """Return up to how many rows whole passes agree, and how many rows were compared.

    `tokens` begin with those that the target holds. It is left as it was.
    """
    size, compared, agreeing = target.size, 0, 1
    if most == 1:
        return 1, 0
    expected = list[list[mx.array]]()  # by row: the logits, and the recurrent states after it
    for token in tokens[size : size + most]:
        logits = target.verify(mx.array([token] * base, dtype=mx.int32))[:1]
        target.commit(1)
        expected.append([logits, *_states(target)])
        mx.eval(expected[-1])
    written = _written(target, size, most)
    mx.eval(written)
    target.rewind(size)
    for T in _sampled(most):
        got = target.verify(mx.array(list(tokens[size : size + T]), dtype=mx.int32))
        pairs = [(got, mx.concatenate([row[0] for row in expected[:T]]))]
        pairs += zip(_states(target), expected[T - 1][1:], strict=True)
        pairs += zip(_written(target, size, T), (rows[:, :, :T] for rows in written), strict=True)
        same = mx.all(mx.stack([mx.array_equal(bits(ours), bits(plain)) for ours, plain in pairs]))
        is_same = bool(same)
        target.commit(0)
        if not is_same:
            break
        agreeing, compared = T, compared + T
    return agreeing, compared


def _states(target: LMTarget) -> list[mx.array]:
    return [array for cache in target.caches.recurrent for array in cache.arrays()]


def _written(target: LMTarget, size: int, count: int) -> list[mx.array]:
    """Return the rows of all caches at `count` positions from `size` on."""
    rows = list[mx.array]()
    for cache in target.caches.attention:
        first = size - cache.columns.first[0]
        rows += [mx.contiguous(buffer[:1, :, first : first + count]) for buffer in cache.buffers]
    return rows


def _cost(target: LMTarget, token: int, base: int) -> float:
    """Return the time of a pass of `base` rows in passes of one row."""
    seconds: dict[int, list[float]] = {1: [], base: []}
    for _ in range(5):  # other programs only add time, so the least one counts
        for rows, known in seconds.items():
            start = time.perf_counter()
            _one_pass(target, [token] * rows)
            known.append(time.perf_counter() - start)
    return max(min(seconds[base]) / min(seconds[1]), 1.0)
