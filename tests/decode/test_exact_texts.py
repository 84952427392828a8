"""In half precision, with a Mac's kernels: drafts change no bit, and without row classes they do.

Long texts of real models, where near ties are frequent: `benchmarks/exact.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import mlx.core as mx
import mlx.nn as nn
import pytest
from support import tiny
from support.exact_arms import Comparison, Ways
from support.metal import M1, M3, M3_MAX, M5, Chip, metal
from support.pairs import pair_with

from mlx_spec.drafters.draft_model import VocabularySizes, draft_model_source
from mlx_spec.model.row_class import RowClass
from mlx_spec.pair import Pair
from mlx_spec.sampling import GREEDY, Sampling

# Layers of 64 and 128 take one kernel for all rows. These have the classes of larger ones.
SIZES = {"hidden_size": 192, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}
SEEDED = Sampling(temperature=0.8, seed=7)


def full() -> nn.Module:
    return tiny.full(**SIZES)


def small() -> nn.Module:
    return tiny.full(num_hidden_layers=2, intermediate_size=64)


def sliding() -> nn.Module:
    return tiny.sliding(sliding_window=16, **SIZES)


def pair_of(build: Callable[[], nn.Module], dtype: mx.Dtype = mx.float16, bits: int | None = 4) -> Pair:
    """A pair that drafts for itself. In float16 kernels that differ change eight times as many numbers."""
    model = build()
    if bits is not None:
        nn.quantize(model, 64, bits)
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    source = draft_model_source("same", model, VocabularySizes(tiny.VOCAB, tiny.VOCAB))
    return pair_with(model, [source], 3)


def kernels(chip: Chip | None) -> AbstractContextManager[None]:
    return nullcontext() if chip is None else metal(chip, known_rows={})


def ways(
    pair: Pair, sampling: Sampling, tokens: int, count: int, most: int | None = None
) -> list[Comparison]:
    """Compare the ways, or the first `most`: reading a long prompt for each takes seconds."""
    lengths = [1, min(pair.rows.most, 8) - 1]
    compared = Ways(pair, tiny.prompt(tokens), sampling, count, lengths).compare([tiny.prompt(24, seed=9)])
    return list(itertools.islice(compared, most))


@pytest.mark.parametrize(
    ("build", "chip", "base", "tokens", "sampling"),
    [
        (full, M3, 2, 24, GREEDY),
        (full, M1, 1, 24, SEEDED),
        (sliding, M3, 2, 138, SEEDED),  # past the window, and the view moves on by a step
        (sliding, M5, 2, 40, GREEDY),
        (small, M3_MAX, 2, 1020, SEEDED),  # across 1,024 keys, where attention takes two passes
    ],
)
def test_no_bit_differs_with_the_kernels_of_a_chip(
    build: Callable[[], nn.Module],
    chip: Chip,
    base: int,
    tokens: int,
    sampling: Sampling,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLX_SDPA_BLOCKS", "128")
    pair = pair_of(build)
    with kernels(chip):
        pair.rows = RowClass(base, ((0, 8),), 12, edges=(1024,))  # as test_row_class.py measures it
        found = ways(pair, sampling, tokens, 9, 3 if tokens > 1000 else None)
    assert [each for each in found if not each.is_equal] == []
    assert len(found) == (3 if tokens > 1000 else 8)


def test_bits_differ_without_row_classes() -> None:
    """So the tests above can fail."""
    pair = pair_of(full)
    with kernels(M3):
        pair.rows = RowClass()
        found = ways(pair, GREEDY, 24, 12, 1)
    assert not all(each.is_equal for each in found)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_no_bit_differs_on_a_cpu(dtype: mx.Dtype) -> None:
    """MLX's CPU kernels round a row alike in every pass. A difference would be our fault."""
    pair = pair_of(sliding, dtype, None)
    pair.rows = RowClass()
    assert [each for each in ways(pair, SEEDED, 40, 9) if not each.is_equal] == []
