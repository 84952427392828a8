"""Say which passes keep a matrix of attention scores, and how long a pass of a prompt may be because of it.

Scores are heads x rows x keys numbers. For 32 heads, 1,024 rows and 128,000 keys they take 8 GB.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Literal

from mlx_spec.device.memory import most_scores


@dataclass(frozen=True)
class Kernels:
    """The facts that decide how MLX computes attention."""

    backend: Literal["metal", "cuda", "cpu"]
    mlx: tuple[int, ...] = (0, 32, 4)
    is_neural: bool = False  # an M5 or later, with macOS 26.2 or later: matrix units in the GPU's cores


@cache
def kernels() -> Kernels:
    """Return what decides on this machine."""
    import mlx.core as mx

    numbers = tuple(int(number) for number in re.findall(r"\d+", version("mlx"))[:3])
    if mx.default_device().type == mx.cpu:
        return Kernels("cpu", numbers)
    if not mx.metal.is_available():
        return Kernels("cuda", numbers)
    generation = re.search(r"applegpu_g(\d+)", str(mx.device_info(mx.gpu).get("architecture")))
    system = tuple(int(number) for number in re.findall(r"\d+", platform.mac_ver()[0])[:2])
    return Kernels(
        "metal", numbers, generation is not None and int(generation[1]) >= 17 and system >= (26, 2)
    )


@dataclass(frozen=True)
class FullAttention:
    """The attention of layers that see all keys, as far as its kernels depend on it."""

    heads: int
    head_dim: int
    number_bytes: int = 2
    is_quantized: bool = False  # K and V are: mlx-lm computes their scores in a matrix

    def keeps_scores(self, rows: int, kernels: Kernels) -> bool:
        """Return True if a pass of `rows` has its scores in memory. Read in MLX 0.32.4.

        (mlx/backend/metal/scaled_dot_product_attention.cpp, `use_fallback`)
        """
        if self.is_quantized or kernels.backend == "cpu":
            return True
        if kernels.backend == "cuda":
            return self.head_dim > 128
        if self.head_dim == 256:
            return not kernels.is_neural
        if self.head_dim == 512:  # in blocks
            return rows < 1024 or kernels.mlx < (0, 32, 4) or self.number_bytes != 2
        return self.head_dim not in (64, 80, 96, 128)

    def scores(self, rows: int, keys: int, kernels: Kernels) -> int:
        """Return the bytes of the scores of one layer, the most that are in memory at a time."""
        return self.heads * rows * keys * self.number_bytes * self.keeps_scores(rows, kernels)

    def longest_pass(
        self, start: int, rows: int, most: int | None = None, machine: Kernels | None = None
    ) -> int:
        """Return how many of the `rows` tokens after position `start` one pass should read.

        That is all if their scores take at most `most` bytes, else one of few sizes. `most` and `machine`
        default to this machine.
        """
        most, machine = most_scores() if most is None else most, machine or kernels()
        sizes = [rows, *(size for size in (512, 256, 128, 64, 32) if size < rows)]
        fitting = (size for size in sizes if self.scores(size, start + size, machine) <= most)
        return next(fitting, sizes[-1])
