"""The imitation of Metal's kernels: rows of one class have equal bits, classes are as in MLX's code."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn
import pytest
from support.metal import M1, M1_MAX, M2_ULTRA, M3, M3_MAX, M3_ULTRA, M5, Chip, metal

Layer = Callable[[mx.array], mx.array]


def bits(array: mx.array) -> mx.array:
    return array.view(mx.uint16 if array.itemsize == 2 else mx.uint32)


def equal_sets(layer: Layer, x: mx.array, most: int = 18) -> list[list[int]]:
    """The numbers of rows up to `most` in sets: passes of two numbers in one set have equal bits."""
    sets: list[tuple[mx.array, list[int]]] = []
    for T in range(1, most + 1):
        rows = range(0, max(T, 6) - T + 1, T)
        got = bits(mx.concatenate([layer(x[i : i + T]) for i in rows]))
        for other, members in sets:
            common = min(got.shape[0], other.shape[0])
            if mx.array_equal(got[:common], other[:common]):
                members.append(T)
                break
        else:
            sets.append((got, [T]))
    return [members for _, members in sets]


def linear(N: int, K: int, dtype: mx.Dtype, quantized: bool) -> nn.Module:
    layer = nn.Linear(K, N, bias=False)
    layer.weight = mx.random.normal((N, K), key=mx.random.key(N)) / K**0.5
    layer = nn.QuantizedLinear.from_linear(layer, 64, 4) if quantized else layer
    layer.set_dtype(dtype)
    return layer


def span(low: int, high: int) -> list[int]:
    return list(range(low, high + 1))


@pytest.mark.parametrize(
    ("chip", "N", "K", "quantized", "expected"),
    [
        (M1, 1024, 256, True, [span(1, 13), span(14, 18)]),
        (M1, 4224, 256, True, [span(1, 5), span(6, 18)]),
        (M2_ULTRA, 4224, 256, True, [span(1, 11), span(12, 18)]),
        (M3, 1024, 256, True, [[1], span(2, 12), span(13, 18)]),
        (M3, 2304, 256, True, [[1], span(2, 14), span(15, 18)]),
        (M3, 4224, 256, True, [[1], span(2, 12), span(13, 18)]),
        (M3, 2048, 128, True, [span(1, 12), span(13, 18)]),  # one kernel by row
        (M3_ULTRA, 4224, 256, True, [[1], span(2, 11), span(12, 18)]),
        (M5, 1024, 256, True, [[1], span(2, 18)]),
        (M1, 1024, 256, False, [[1], span(2, 18)]),
        (M3, 1024, 256, False, [[1], span(2, 5), span(6, 15), span(16, 18)]),
    ],
)
def test_layers_have_the_classes_of_their_chip(
    chip: Chip, N: int, K: int, quantized: bool, expected: list[list[int]]
) -> None:
    layer = linear(N, K, mx.float16, quantized)  # it rounds less than bfloat16: kernels show sooner
    x = mx.random.normal((18, K), key=mx.random.key(0)).astype(mx.float16)
    plain = layer(x[:1])
    with metal(chip):
        assert equal_sets(layer, x) == expected
        got = layer(x[:1])
    assert mx.abs(got.astype(mx.float32) - plain.astype(mx.float32)).max() < 0.05  # a CPU sums in float16
    assert mx.array_equal(bits(layer(x[:1])), bits(plain))  # after it, all is as before


def attend(q: mx.array, k: mx.array, v: mx.array, **options: object) -> mx.array:
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5, **options)


def heads(N: int, H: int = 4, G: int = 2, D: int = 64, T: int = 8) -> tuple[mx.array, mx.array, mx.array]:
    keys = mx.random.split(mx.random.key(N), 3)
    return tuple(
        mx.random.normal(shape, key=key)
        for shape, key in zip([(1, H, T, D), (1, G, N, D), (1, G, N, D)], keys, strict=True)
    )


def attention_sets(q: mx.array, k: mx.array, v: mx.array, numbers: Sequence[int]) -> list[list[int]]:
    """The numbers of rows in sets, as in `equal_sets`; row j sees all keys but the last ones."""
    last, T = k.shape[2], q.shape[2]
    sets: list[tuple[mx.array, list[int]]] = []
    for rows in numbers:
        parts = []
        for i in range(0, T, rows):
            end = min(i + rows, T)
            held = last - T + end
            mask = "causal" if end > i + 1 else None
            parts.append(attend(q[:, :, i:end], k[:, :, :held], v[:, :, :held], mask=mask))
        got = mx.concatenate(parts, axis=2)
        for other, members in sets:
            if mx.array_equal(got, other):
                members.append(rows)
                break
        else:
            sets.append((got, [rows]))
    return [members for _, members in sets]


@pytest.mark.parametrize(
    ("chip", "N", "D", "blocks", "expected"),
    [
        (M1, 300, 64, None, [[1, 2, 4, 8]]),
        (M3, 1400, 64, None, [[1, 2, 4, 8]]),
        (M1_MAX, 300, 64, None, [[1, 2, 4, 8]]),
        (M3_MAX, 1400, 64, None, [[1, 2], [4, 8]]),  # more than four rows of a K/V head: other blocks
        (M3_MAX, 1400, 64, "128", [[1, 2, 4, 8]]),
        (M3, 4200, 64, None, [[1], [2, 4, 8]]),
        (M3, 4200, 64, "128", [[1, 2, 4, 8]]),
        (M3, 300, 512, None, [[1], [2, 4], [8]]),  # no kernel has heads of 512
    ],
)
def test_attention_has_the_classes_of_its_chip(
    chip: Chip, N: int, D: int, blocks: str | None, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLX_SDPA_BLOCKS", raising=False)  # a Mac sets it
    if blocks is not None:
        monkeypatch.setenv("MLX_SDPA_BLOCKS", blocks)
    q, k, v = (part.astype(mx.float16 if D > 256 else mx.float32) for part in heads(N, D=D))
    plain = attend(q, k, v, mask="causal")
    with metal(chip):
        assert attention_sets(q, k, v, [1, 2, 4, 8]) == expected
        assert mx.abs(attend(q, k, v, mask="causal") - plain).max() < (1e-3 if D > 256 else 2e-5)


def test_a_key_at_another_index_changes_the_sums() -> None:
    """Hidden keys before the others are harmless, if their number is a multiple of the partial sums."""
    q, k, v = heads(700)
    seen = mx.arange(700)[None] >= 300
    with metal(M3):
        expected = attend(q, k, v, mask=seen)
        same = {
            low: mx.array_equal(attend(q, k[:, :, low:], v[:, :, low:], mask=seen[:, low:]), expected)
            for low in (1, 31, 32, 256)
        }
    assert {low: bool(each) for low, each in same.items()} == {1: False, 31: False, 32: True, 256: True}


@pytest.mark.parametrize("sinks", [False, True])
def test_masks_and_sinks_are_those_of_mlx(sinks: bool) -> None:
    q, k, v = heads(70)
    options = {"sinks": mx.array([0.5, -1.0, 2.0, 0.0])} if sinks else {}
    seen = mx.random.uniform(shape=(1, 4, 8, 70), key=mx.random.key(1)) < 0.7
    for mask in (None, "causal", seen, mx.where(seen, 0.25, -1e9)):
        plain = attend(q, k, v, mask=mask, **options)
        with metal(M3):
            assert mx.abs(attend(q, k, v, mask=mask, **options) - plain).max() < 2e-5
