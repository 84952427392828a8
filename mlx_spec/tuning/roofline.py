"""What speculation should bring on a chip, from its bandwidth and the kernels MLX picks there: a prediction.

A pass over M rows reads the weights once or more, computes on M rows, whichever takes longer, and has a
fixed cost of its kernels' launches. Which kernel runs follows mlx/backend/metal/quantized.cpp of MLX 0.32.
Rates were fitted to published times and agree with them within 22 % for single kernels, within 25 % for whole
rounds (tests/test_roofline.py lists both). What was measured on the device itself is to be preferred.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlx_spec.hub.weights import DecodeSizes, WeightFormat
from mlx_spec.tuning.devices import Chip

TILE = 5  # rows for which qmv_wide reads the weights once
WIDE_GENERATION = 15  # the first GPU with wide kernels for affine and dense weights
MATMUL_TILE = 32  # rows of a matmul tile: fewer cost as much
DENSE_WIDE_ROWS = 15  # the most rows of gemv_wide (mlx#3888)
# A further row of `qmv` finds a part of the weights in the caches: rounds of M1 Ultra (mlxcel) cost 0.35 to
# 0.77 plain steps more for each row.
REREAD = 0.8
# Share of the peak rate that kernels reach, fitted to mlx#3839, #3852, #3863 and mlxcel's LM head.
ROW_RATE, MATMUL_RATE, MATRIX_RATE = 0.31, 0.75, 0.3
# Seconds of a layer that are neither reading nor arithmetic: 0.08 to 0.3 ms, from published plain rates of 4B
# to 31B models on M3 Ultra, M4 Pro, M4 Max and M5 Max.
LAYER_SECONDS = 0.15e-3
# The same as a share of reading where the layers are not known. Plain decoding then reaches 0.65 to 0.76 of
# the nominal bandwidth, as published of 4-bit models (mlx-lm's BENCHMARKS.md, mlxcel, Rapid-MLX#567).
FIXED_SHARE = 0.25
HOST_SHARE = 0.05  # of a plain step: reading a verdict back, 3 to 6 % (mlxcel)
FUSED_ROWS, UNFUSED = 8, 2.5  # beyond 8 rows attention is no longer one kernel: 2.3 to 2.8 times (mlx#3826)
MAX_DRAFT_TOKENS = 16


@dataclass(frozen=True)
class Prediction:
    """What is to be expected of a chip. Nothing in it was measured."""

    chip: Chip
    ceiling: float  # plain tokens/s if all of the nominal bandwidth went into reading
    plain: float  # tokens/s without speculation
    num_draft_tokens: int  # of the best round; 0: speculation does not pay
    speed_up: float  # over plain, with that many
    needs: float  # bytes of weights and K/V
    memory: int | None  # GB, the least sold in which that fits; None: it does not

    @property
    def tokens_per_second(self) -> float:
        """With speculation, where that pays."""
        return self.plain * self.speed_up


def predict(chip: Chip, target: DecodeSizes, drafter: DecodeSizes | None, acceptance: float) -> Prediction:
    """The best number of draft tokens on a chip and what it brings, the same acceptance at every position.

    Without a drafter model drafting costs nothing, as with lookup.
    """
    lengths = range(_longest(chip, target.format) + 1)
    gains = [speed_up(chip, target, drafter, acceptance, k) for k in lengths]
    best = max(lengths, key=gains.__getitem__)
    models = [target] if drafter is None else [target, drafter]
    needs = sum(model.held + model.kv_held for model in models)
    return Prediction(
        chip=chip,
        ceiling=chip.bandwidth * 1e9 / (target.read + target.kv_read),
        plain=1 / seconds(chip, target, rows=1),
        num_draft_tokens=best,
        speed_up=gains[best],
        needs=needs,
        memory=chip.memory_for(needs),
    )


def _longest(chip: Chip, format: WeightFormat) -> int:
    """The most draft tokens for which verification can be predicted.

    No time of quantized matmul kernels on few rows is published for M1 and M2.
    """
    if _is_wide(chip, format) or format.group_size is None:
        return MAX_DRAFT_TOKENS
    return _matmul_from(chip, format) - 2


def speed_up(
    chip: Chip, target: DecodeSizes, drafter: DecodeSizes | None, acceptance: float, k: int
) -> float:
    """Tokens a second of rounds with k draft tokens, over plain decoding.

    Leviathan et al., arXiv:2211.17192, but with verification of k + 1 rows at its own cost.
    """
    return tokens(acceptance, k) / round_cost(chip, target, drafter, k)


def tokens(acceptance: float, k: int) -> float:
    """Tokens expected of a round with k draft tokens."""
    return sum(acceptance**position for position in range(k + 1))


def round_cost(chip: Chip, target: DecodeSizes, drafter: DecodeSizes | None, k: int) -> float:
    """Time of a round with k draft tokens, in plain steps."""
    if k == 0:
        return 1.0
    plain = seconds(chip, target, rows=1)
    draft = 0.0 if drafter is None else seconds(chip, drafter, rows=1)
    return (seconds(chip, target, rows=k + 1) + k * draft) / plain + HOST_SHARE


def seconds(chip: Chip, model: DecodeSizes, rows: int) -> float:
    """A forward pass over `rows` tokens."""
    one = weight_seconds(chip, model, rows=1)
    fixed = FIXED_SHARE * one if model.layers is None else LAYER_SECONDS * model.layers
    attention = model.kv_read / _speed(chip) * (1 if rows <= FUSED_ROWS else UNFUSED)
    return fixed + weight_seconds(chip, model, rows) + attention


def weight_seconds(chip: Chip, model: DecodeSizes, rows: int) -> float:
    """The matrix multiplications of a pass: the staircase that limits speculation."""
    shared = model.read - model.experts
    reading = passes(chip, model.format, rows) * shared / _speed(chip)
    # gather_qmv has no wide form: the experts of every row are read for it alone.
    return max(reading, _arithmetic(chip, model.format, rows) * shared) + rows * model.experts / _speed(chip)


def passes(chip: Chip, format: WeightFormat, rows: int) -> float:
    """How often the weights are read for `rows` rows."""
    if rows == 1 or rows >= _matmul_from(chip, format):
        return 1.0
    if _is_wide(chip, format):
        return math.ceil(rows / TILE)
    return 1 + REREAD * (rows - 1)


def _speed(chip: Chip) -> float:
    """Bytes a second."""
    return chip.sustained * 1e9


def _arithmetic(chip: Chip, format: WeightFormat, rows: int) -> float:
    """Seconds to multiply one byte of weights by `rows` rows."""
    rate, computed = ROW_RATE * chip.alu_tflops, rows
    if rows >= _matmul_from(chip, format):
        rate = MATRIX_RATE * chip.matrix_tflops if chip.matrix_tflops else MATMUL_RATE * chip.alu_tflops
        computed = MATMUL_TILE * math.ceil(rows / MATMUL_TILE)
    return 2 * computed / format.bytes_per_weight / (rate * 1e12)


def _is_wide(chip: Chip, format: WeightFormat) -> bool:
    """Whether a few rows go to a kernel that reads the weights once for all of a tile."""
    floating = format.group_size is not None and format.mode != "affine"
    return floating or chip.generation >= WIDE_GENERATION


def _matmul_from(chip: Chip, format: WeightFormat) -> int:
    """Rows from which MLX takes a matmul kernel, for matrices with a side beyond 4096: most weights."""
    if format.group_size is None:
        return DENSE_WIDE_ROWS + 1 if _is_wide(chip, format) else 2
    if chip.tier == "Ultra":
        return 12
    return 13 if chip.generation >= WIDE_GENERATION else 6
