"""Memory bandwidth of the present device, measured with MLX: the roof that decoding is held against."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from mlx_spec.hub.weights import WeightFormat

SIZE = 2**28  # bytes of a buffer: more than the last cache of any chip in `devices.py`
SECONDS = 0.5  # for each of the three figures
REPEATS = 5  # at least
LAUNCH = 0.02  # seconds of work handed over at once, so that the hand-over does not count
MOST = 256  # passes handed over at once
WIDTH = 4096  # numbers in a row of the matrix
KERNEL_BITS = (2, 3, 4, 5, 6, 8)
KERNEL_GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class Bandwidth:
    """GB/s, medians. Nothing here is nominal."""

    read: float  # sum of a buffer
    copy: float  # one added to it: read and written, both counted
    row: float  # one row times a matrix, as in plain decoding: what its weights are read with

    @property
    def best(self) -> float:
        """What memory was seen to give at all."""
        return max(self.read, self.copy, self.row)


def device_name() -> str:
    """The present device as MLX names it."""
    return str(mx.device_info()["device_name"])


def device_memory() -> int:
    """Bytes of memory of the present device."""
    found = mx.device_info()
    named = found.get("memory_size") or found.get("total_memory")
    return int(named) if named else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def measure(format: WeightFormat, *, size: int = SIZE, seconds: float = SECONDS) -> Bandwidth:
    """Measure for three times `seconds` and a warm-up, with weights in `format` for the row.

    Affine formats that MLX has a kernel for are measured as such, others as 16- or 32-bit floats.
    """
    buffer = mx.ones((size // 4,), mx.float32)
    mx.eval(buffer)
    bandwidth = Bandwidth(
        read=_rate(lambda passes: [mx.sum(buffer) for _ in range(passes)], size, seconds),
        copy=_rate(lambda passes: [_incremented(buffer, passes)], 2 * size, seconds),
        row=_row_rate(format, size, seconds),
    )
    mx.clear_cache()
    return bandwidth


def _incremented(buffer: mx.array, passes: int) -> mx.array:
    """Each pass waits for the one before it."""
    for _ in range(passes):
        buffer = buffer + 1
    return buffer


def _row_rate(format: WeightFormat, size: int, seconds: float) -> float:
    build = _quantized if _has_kernel(format) else _dense
    block = build(format, WIDTH)
    mx.eval(block.launch(1))
    affordable = seconds / REPEATS / _timed(block.launch, 1)  # where reading is slow a small matrix will do
    blocks = max(1, int(min(size / block.size, affordable)))
    matrix = build(format, blocks * WIDTH)
    return _rate(matrix.launch, matrix.size, seconds)


def _has_kernel(format: WeightFormat) -> bool:
    return format.mode == "affine" and format.bits in KERNEL_BITS and format.group_size in KERNEL_GROUPS


@dataclass(frozen=True)
class _Matrix:
    """A matrix whose product with a row is the next row, cut to size."""

    size: int  # bytes
    product: Callable[[mx.array], mx.array]
    dtype: mx.Dtype

    def launch(self, passes: int) -> list[mx.array]:
        """So many products, each of which waits for the one before it."""
        row = mx.zeros((1, WIDTH), self.dtype)
        for _ in range(passes):
            row = self.product(row)[:, :WIDTH]
        return [row]


def _quantized(format: WeightFormat, rows: int) -> _Matrix:
    bits, group_size = format.bits, format.group_size or WIDTH
    words = mx.ones((rows, WIDTH * bits // 32), mx.uint32)
    scales = mx.ones((rows, WIDTH // group_size), mx.bfloat16)
    mx.eval(words, scales)

    def product(row: mx.array) -> mx.array:
        return mx.quantized_matmul(row, words, scales, scales, group_size=group_size, bits=bits)

    return _Matrix(words.nbytes + 2 * scales.nbytes, product, mx.bfloat16)


def _dense(format: WeightFormat, rows: int) -> _Matrix:
    dtype = mx.float32 if format.bits == 32 else mx.bfloat16
    matrix = mx.ones((rows, WIDTH), dtype)
    mx.eval(matrix)
    return _Matrix(matrix.nbytes, lambda row: row @ matrix.T, dtype)


def _rate(work: Callable[[int], list[mx.array]], size: int, seconds: float) -> float:
    """GB/s of `work`, which moves `size` bytes a pass: the median of launches worth `seconds`."""
    mx.eval(work(1))
    passes = min(MOST, max(1, round(LAUNCH / _timed(work, 1))))
    times = [_timed(work, passes)]
    while len(times) < REPEATS or sum(times) < seconds:
        times.append(_timed(work, passes))
    return passes * size / statistics.median(times) / 1e9


def _timed(work: Callable[[int], list[mx.array]], passes: int) -> float:
    start = time.perf_counter()
    mx.eval(work(passes))
    return time.perf_counter() - start
