"""Dense weights of a quantized model, for a CPU. `load` and the self-test of a conversion call it."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.utils import dequantize_model


def dequantized(model: nn.Module) -> nn.Module:
    """Return a model with dense layers, in the type of their scales. The weights are not computed yet.

    It is `dequantize_model` of mlx-lm with another way to unpack. On a CPU `mx.dequantize` takes the integers
    one by one. That takes twice the time of whole arrays for 4 bits, and four times for 5. Embeddings are
    left to it: the intermediate arrays would be as large as the result.
    """
    dense = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.QuantizedLinear) or module.bits not in UNPACK:
            continue
        # Modes other than affine and LM heads are left to it, too: 2^20 scales in groups of 32 are 128 MB of
        # dense weights.
        if module.biases is None or module.scales.size > 1 << 20:
            continue
        weight = _weight(module.weight, module.scales, module.biases, module.bits)
        rows, columns = weight.shape
        layer = nn.Linear(columns, rows, bias="bias" in module)
        if "bias" in module:
            layer.bias = module.bias
        layer.weight = weight
        dense.append((name, layer))
    model.update_modules(tree_unflatten(dense))
    return dequantize_model(model)


def _weight(packed: mx.array, scales: mx.array, biases: mx.array, bits: int) -> mx.array:
    """Return scales * integers + biases [rows, columns]; `packed` has the lowest bits first."""
    integers = UNPACK[bits](packed.view(mx.uint8)).reshape(*scales.shape, -1)
    values = integers.astype(scales.dtype) * scales[..., None] + biases[..., None]
    return values.reshape(*packed.shape[:-1], -1)


def _four(packed: mx.array) -> mx.array:
    return mx.stack([packed & 15, packed >> 4], axis=-1)


def _five(packed: mx.array) -> mx.array:
    """Return the eight integers in each five bytes, which are first sorted by their place in the five."""
    a, b, c, d, e = mx.contiguous(packed.reshape(-1, 5).T)
    high = (a >> 5 | b << 3, b >> 2, b >> 7 | c << 1, c >> 4 | d << 4, d >> 1, d >> 6 | e << 2, e >> 3)
    return mx.stack([bits & 31 for bits in (a, *high)], axis=-1)


UNPACK = {4: _four, 5: _five}
