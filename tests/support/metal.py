"""The kernels that MLX chooses on a Mac, by the rows of a pass, imitated with sums of another order.

On Metal a row of a pass gets the bits of a pass of one row only where both run the same kernel. `metal(chip)`
makes quantized layers, dense layers and attention of this process choose as MLX does for a chip. Kernels that
differ on Metal add the same products in another order here, or with the same roundings. Rows of one kernel
have the same bits, however many there are. A text can then differ as on a Mac, and by as much.

The choices were read in ml-explore/mlx 846d1762 (0.32.1). Paths below `mlx/backend/metal/`:

    quantized.cpp:85-136      from how many rows on a quantized layer is a product of matrices
    quantized.cpp:538, 1755   K of 64 or 128: one kernel by row; else one row, or several by generation
    quantized.cpp:1120-1160   a product of matrices in parts of K, their sums rounded to the activations' type
    kernels/quantized.h       one row sums blocks in 32 lanes (qmv), several sum groups in 8 (qmv_wide, :989)
    matmul.cpp:1299-1352      dense layers in half precision, from M3 on: 2 to 5 rows, 6 to 15, more
    scaled_dot_product_attention.cpp:620-720, 870   which kernel of attention
    scaled_dot_product_attention.cpp:476-525        into how many partial sums two passes deal the keys
    kernels/sdpa_vector.h:99  key i goes to partial sum i mod 32

Not imitated: experts (`gather_qmm` runs one kernel by row for the few rows of a draft), recurrent kernels,
the kernel of one row with 8 query heads a K/V head from 8,192 keys on, and products outside layers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

TILE = 8  # rows of every call of BLAS: it takes other kernels for other numbers of rows
LEAST = -3.0e38  # the score of a masked key
DEALT = 32  # partial sums of attention in one pass


@dataclass(frozen=True)
class Chip:
    """What MLX reads of a GPU: applegpu_g15s is generation 15 of size "s"."""

    generation: int  # 13 and 14 are M1 and M2, 15 to 17 are M3 to M5
    size: str = "g"  # "s" is a Max, "d" an Ultra

    def limit(self, K: int, N: int) -> int:
        """Return the rows from which a quantized layer of N x K is a product of matrices."""
        small, middle = max(K, N) <= 2048, max(K, N) <= 4096
        if self.generation >= 15 and self.size != "d":
            small_limit, middle_limit, limit = (33, 25, 13) if self.generation >= 17 else (13, 15, 13)
        else:
            small_limit, middle_limit, limit = (32, 18, 12) if self.size == "d" else (14, 10, 6)
        return small_limit if small else middle_limit if middle else limit

    def quantized_kernel(self, M: int, N: int, K: int, bits: int = 4, mode: str = "affine") -> str:
        """Return the kernel of a quantized layer for M rows."""
        if self.limit(K, N) <= M:
            return "matrix"
        if K in (64, 128) and bits in (2, 4, 8):
            return "quad"
        return "wide" if M > 1 and (self.generation >= 15 or mode != "affine") else "vector"

    def dense_kernel(self, M: int, N: int, K: int, dtype: mx.Dtype) -> str:
        """Return the kernel of a dense layer for M rows."""
        if M == 1:
            return "vector"
        if self.generation < 15 or dtype == mx.float32 or K % 4 or N == 1 or M > 15:
            return "matrix"
        return "wide" if M <= 5 or N <= 64 else "wider"

    def attention_kernel(self, q: mx.array, k: mx.array) -> str:
        """Return the kernel of attention: "whole" is the one for prompts."""
        (_, heads, rows, width), (_, groups, keys, _) = q.shape, k.shape
        if rows > 8:
            return "whole"
        # Metal's kernels have heads of 64 and more. Those of tiny models count as if they had one, too.
        if rows * heads // groups > 32 or width > 256 or rows > keys:
            return "unfused"
        large = self.size in "sd" and keys >= 1024
        return "two passes" if large or (groups < heads and keys >= 4096) else "one pass"

    def blocks(self, rows: int, keys: int) -> int:
        """Return the partial sums of two passes, for `rows` query rows of a K/V head."""
        if wanted := int(os.environ.get("MLX_SDPA_BLOCKS", 0)):
            return -(-wanted // 32) * 32
        if self.size == "s":
            limits = {8192: 128, 32768: 256, 65536: 512}
            many = next((blocks for limit, blocks in limits.items() if keys <= limit), 1024)
            return many if keys > 1024 and rows > 4 else 64
        if self.size == "d":
            if rows >= 6 and keys >= 16384:
                return 512 if keys < 65536 else 1024
            return 256 if rows <= 2 and keys > 8192 else 128
        return 64 if rows >= 4 else 32


M1, M1_MAX, M2_ULTRA = Chip(13), Chip(13, "s"), Chip(14, "d")
M3, M3_MAX, M3_ULTRA, M4 = Chip(15), Chip(15, "s"), Chip(15, "d"), Chip(16)
M5 = Chip(17)


@contextmanager
def metal(chip: Chip, *, known_rows: dict[object, np.ndarray] | None = None) -> Iterator[None]:
    """Let layers and attention of this process choose kernels as MLX does on a chip.

    `known_rows` gets the result of each row of a large layer. It is looked up for a row with the same bits.
    Then the same text takes a fraction of the time in another way. The caller clears it.
    """
    with pytest.MonkeyPatch.context() as patch:
        imitation = _Imitation(chip, known_rows)
        patch.setattr(mx, "quantized_matmul", imitation.quantized_matmul)
        patch.setattr(mx.fast, "scaled_dot_product_attention", imitation.attention)
        patch.setattr(nn.Linear, "__call__", lambda layer, x: imitation.linear(layer, x))
        patch.setattr(nn.Embedding, "as_linear", lambda layer, x: imitation.dense(x, layer.weight))
        yield


class _Imitation:
    """Keeps the weights in float32 while it is in use."""

    def __init__(self, chip: Chip, known_rows: dict[object, np.ndarray] | None) -> None:
        self.chip, self.known_rows = chip, known_rows
        self.quantized, self.attends = mx.quantized_matmul, mx.fast.scaled_dot_product_attention
        self.weights: dict[int, tuple[mx.array, mx.array]] = {}  # by id: the layer's own, [N, K] in float32

    def quantized_matmul(self, x: mx.array, w: mx.array, *others: Any, **options: Any) -> mx.array:
        """Stand in for `mx.quantized_matmul`. K and V in few bits are multiplied as on a CPU."""
        names = ("scales", "biases", "transpose", "group_size", "bits", "mode")
        given = dict(zip(names, others, strict=False)) | options
        if w.ndim > 2 or not given.pop("transpose", True):
            return self.quantized(x, w, *others, **options)
        if id(w) not in self.weights:
            parts = {name: given[name].astype(mx.float32) for name in ("scales", "biases") if name in given}
            parts = parts if given.get("mode", "affine") == "affine" else {}
            self._keep(w, mx.dequantize(w, **given | parts).astype(mx.float32))
        N, K = self.weights[id(w)][1].shape
        M, bits, mode = x.size // K, given.get("bits") or 4, given.get("mode", "affine")
        kernel = self.chip.quantized_kernel(M, N, K, bits, mode)
        parts_of_k = _parts_of_k(M, N, K, given.get("group_size") or 64) if kernel == "matrix" else 1
        return self._product(x, w, kernel, parts_of_k)

    def linear(self, layer: nn.Linear, x: mx.array) -> mx.array:
        """Stand in for `nn.Linear.__call__`."""
        y = self.dense(x, layer.weight)
        return y + layer.bias if "bias" in layer else y

    def dense(self, x: mx.array, w: mx.array) -> mx.array:
        """Return x @ w.T as a dense layer on Metal."""
        if id(w) not in self.weights:
            self._keep(w, w.astype(mx.float32))
        N, K = w.shape
        kernel = self.chip.dense_kernel(x.size // K, N, K, x.dtype)
        return self._product(x.astype(mx.result_type(x, w)), w, kernel)

    def attention(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        *,
        scale: float,
        mask: Any = None,
        sinks: Any = None,
        **_: Any,
    ) -> mx.array:
        """Stand in for `mx.fast.scaled_dot_product_attention`."""
        kernel = self.chip.attention_kernel(q, k)
        if kernel == "whole":
            return self.attends(q, k, v, scale=scale, mask=mask, sinks=sinks)
        rows = q.shape[1] // k.shape[1] * q.shape[2]
        dealt = self.chip.blocks(rows, k.shape[2]) if kernel == "two passes" else DEALT
        rounds = kernel == "two passes"
        if kernel == "unfused":  # products of matrices, each head by itself
            order = self.chip.dense_kernel(q.shape[2], k.shape[2], q.shape[-1], q.dtype)
            dealt, rounds = {"vector": 8, "wide": 16, "wider": 32, "matrix": 64}[order], True
        return _attend(q, k, v, scale, mask, sinks, dealt, rounds)

    def _product(self, x: mx.array, w: mx.array, kernel: str, parts_of_k: int = 1) -> mx.array:
        """Return x times the weights w, with rows that are known where their bits are the same.

        Rows of a small layer are computed sooner than found.
        """
        dense = self.weights[id(w)][1]
        if self.known_rows is None or dense.size < 2**18:
            return _product(x, dense, kernel, parts_of_k)
        rows, kind = x.reshape(-1, x.shape[-1]), mx.uint16 if x.itemsize == 2 else mx.uint32
        keys = [(id(w), kernel, parts_of_k, row.tobytes()) for row in np.array(rows.view(kind))]
        if missing := [i for i, key in enumerate(keys) if key not in self.known_rows]:
            made = np.array(_product(rows[mx.array(missing)], dense, kernel, parts_of_k).view(kind))
            self.known_rows |= {keys[i]: result for i, result in zip(missing, made, strict=True)}
        found = mx.array(np.stack([self.known_rows[key] for key in keys])).view(x.dtype)
        return found.reshape(*x.shape[:-1], -1)

    def _keep(self, w: mx.array, dense: mx.array) -> None:
        mx.eval(dense)
        self.weights[id(w)] = w, dense  # with `w`, so that its id is not given to another array


def _product(x: mx.array, w: mx.array, kernel: str, parts_of_k: int = 1) -> mx.array:
    """Return x [..., K] times w [N, K], in the type of x and in the order of a kernel."""
    N, K = w.shape
    rows = x.astype(mx.float32).reshape(-1, K)
    if kernel == "matrix":
        w = w.astype(x.dtype).astype(mx.float32)  # it is unpacked in threadgroup memory
    strides = {"vector": 0, "quad": 0, "matrix": 16, "wide": 32, "wider": 8}  # of the two sums, in columns
    parts = [rows]
    if parts_of_k > 1:
        part = mx.arange(K) // (K // parts_of_k)
        parts = [mx.where(part == i, rows, 0) for i in range(parts_of_k)]
    elif (stride := strides[kernel]) and stride < K:
        first = mx.arange(K) // stride % 2 == 0
        parts = [mx.where(first, rows, 0), mx.where(first, 0, rows)]
    sums = _by_tile(mx.concatenate(parts), w).reshape(len(parts), -1, N)
    sums = sums.astype(x.dtype).astype(mx.float32) if parts_of_k > 1 else sums
    total = sums[0]
    for other in sums[1:]:
        total = total + other
    return total.astype(x.dtype).reshape(*x.shape[:-1], N)


def _by_tile(rows: mx.array, w: mx.array) -> mx.array:
    """Return rows [M, K] times w [N, K], a fixed number of rows a call: a row's bits are its own."""
    tile, M = _tile(*w.shape), rows.shape[0]
    rows = mx.pad(rows, [(0, -M % tile), (0, 0)])
    return mx.concatenate([(w @ part.T).T for part in mx.split(rows, rows.shape[0] // tile)])[:M]


@cache
def _tile(N: int, K: int) -> int:
    """Return how many equal rows BLAS gives equal bits, wherever they are in a call."""
    row, w = (mx.random.normal((n, K), key=mx.random.key(n)) for n in (1, N))
    for tile in (TILE, TILE // 2):
        result = w @ mx.repeat(row, tile, axis=0).T
        if mx.array_equal(result, mx.repeat(result[:, :1], tile, axis=1)):
            return tile
    return 1


def _parts_of_k(M: int, N: int, K: int, group_size: int) -> int:
    """Return into how many parts MLX splits K in a product of matrices."""
    step = max(group_size, 32)
    parts = min(max(1, 512 // (-(-N // 32) * -(-M // 32))), K // step)
    while parts > 1 and K % (parts * step):
        parts -= 1
    return max(parts, 1)


def _attend(
    q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Any, sinks: Any, dealt: int, rounds: bool
) -> mx.array:
    """Return attention with key i in partial sum i mod `dealt`; with `rounds` partial sums are rounded."""
    (B, H, T, _), (_, G, N, _), R = q.shape, k.shape, q.shape[1] // k.shape[1]
    k, v = (mx.pad(part.astype(mx.float32), [(0, 0), (0, 0), (0, -N % dealt), (0, 0)]) for part in (k, v))
    steps = k.shape[2] // dealt
    rows = (q.astype(mx.float32) * scale).reshape(B, G, R * T, -1)
    rows = mx.pad(rows, [(0, 0), (0, 0), (0, -(R * T) % TILE), (0, 0)])
    tiles = rows.reshape(B, G, 1, -1, TILE, rows.shape[-1])
    dealt_keys = k.reshape(B, G, -1, 1, DEALT if dealt % DEALT == 0 else dealt, k.shape[-1])
    scores = (
        (dealt_keys @ tiles.swapaxes(-1, -2)).transpose(0, 1, 3, 5, 2, 4).reshape(B, G, -1, steps * dealt)
    )
    scores = scores[:, :, : R * T].reshape(B, H, T, -1)
    seen = mx.arange(k.shape[2]) < N
    if isinstance(mask, str):
        seen = seen & (mx.arange(k.shape[2]) <= mx.arange(N - T, N)[:, None])
    elif mask is not None:
        mask = mx.broadcast_to(mask, (B, H, T, N) if mask.ndim == 4 else (T, N))
        mask = mx.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, k.shape[2] - N)])
        if mask.dtype == mx.bool_:
            seen = seen & mask
        else:
            scores = scores + mask.astype(mx.float32)
    scores = mx.where(seen, scores, LEAST).reshape(B, H, T, steps, dealt)
    highest = scores.max(axis=-2)  # of each partial sum
    weights = mx.where(scores <= LEAST, 0, mx.exp(scores - highest[..., None, :]))
    sums = weights.sum(axis=-2)
    rows = weights.reshape(B, G, R * T, steps, dealt)
    rows = mx.pad(rows, [(0, 0), (0, 0), (0, -(R * T) % TILE), (0, 0), (0, 0)])
    tiles = rows.reshape(B, G, -1, TILE, steps, dealt).transpose(0, 1, 2, 5, 4, 3)  # [.., dealt, steps, TILE]
    values = v.reshape(B, G, 1, steps, dealt, -1).transpose(0, 1, 2, 4, 5, 3)  # [.., dealt, V, steps]
    parts = (values @ tiles).transpose(0, 1, 2, 5, 3, 4).reshape(B, G, -1, dealt, v.shape[-1])
    parts = parts[:, :, : R * T].reshape(B, H, T, dealt, -1)
    parts = parts.astype(q.dtype).astype(mx.float32) if rounds else parts
    top = highest.max(axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(mx.float32).reshape(1, H, 1, 1)
        top = mx.maximum(top, sink)
    factors = mx.exp(highest - top)
    total = (sums * factors).sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + mx.exp(sink - top)
    return ((parts * factors[..., None]).sum(axis=-2) / total).astype(q.dtype)
