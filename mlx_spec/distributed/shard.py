"""Split a target over ranks: mlx-lm's sharding, after padding with zeros.

mlx-lm gives all ranks equally many attention heads and hidden units. A dense model is padded with heads and
units of zeros until both numbers divide. They add zeros to sums, so the result is the same: nine heads run on
two ranks, and eight K/V heads on three. The numbers of other models must divide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.checkpoint.config import text_config
from mlx_spec.checkpoint.files import one_line
from mlx_spec.errors import BadCheckpoint
from mlx_spec.model.hooks import decoder_of

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def shard(model: nn.Module, config: Mapping[str, Any], group: mx.distributed.Group) -> None:
    """Keep this rank's part of a model with unread weights, and read it. Raises BadCheckpoint."""
    try:
        if _is_dense(model):
            for layer in model.layers:
                _pad(layer, group.size())
        else:
            _check_heads(config, group.size())
        model.shard(group)
    except (AttributeError, AssertionError, ValueError) as error:
        reason = one_line(error)
        raise BadCheckpoint(f"mlx-lm cannot split this target ({reason}): use one machine") from error
    mx.eval(model.parameters())


def _is_dense(model: nn.Module) -> bool:
    """Return True if each layer has one matrix for each projection, and nothing else depends on heads."""

    def fits(layer: nn.Module) -> bool:
        attention, mlp = layer.get("self_attn", nn.Identity()), layer.get("mlp", nn.Identity())
        matrices = [*map(attention.get, ATTENTION), *map(mlp.get, MLP)]
        same = ("rope", "q_norm", "k_norm")  # equal for all heads
        by_heads = "n_kv_heads" in vars(attention) and set(attention.children()) <= {*ATTENTION, *same}
        return by_heads and all(isinstance(matrix, nn.Linear | nn.QuantizedLinear) for matrix in matrices)

    # Other children of a decoder may have heads outside its layers.
    known = {"embed_tokens", "layers", "norm", "layer_types"}
    return set(decoder_of(model).owner.children()) <= known and all(map(fits, model.layers))


def _pad(layer: nn.Module, ranks: int) -> None:
    """Append heads and hidden units of zeros to a dense layer, until both can be divided by `ranks`."""
    attention, mlp = layer.self_attn, layer.mlp
    heads, groups = attention.n_kv_heads, attention.n_heads // attention.n_kv_heads
    more = -heads % ranks
    for name in ATTENTION:
        _append(attention[name], name == "o_proj", heads, more)
    attention.n_kv_heads += more
    attention.n_heads += more * groups
    down = mlp.down_proj
    units = down.get("scales", down.weight).shape[1]  # a rank has whole groups of quantized weights
    for name in MLP:
        _append(mlp[name], name == "down_proj", units, -units % ranks)


def _append(linear: nn.Module, axis: int, units: int, more: int) -> None:
    """Append `more` units of zeros to the `units` units of rows (axis 0) or columns (axis 1) of a layer.

    Raises ValueError if a group of quantized weights belongs to two units.
    """
    for name, array in linear.parameters().items():
        if more and array.ndim > axis:  # a bias has rows only
            if array.shape[axis] % units:
                raise ValueError(f"{units} heads do not divide the groups of its quantized weights")
            widths = [(0, 0)] * array.ndim
            widths[axis] = (0, array.shape[axis] // units * more)
            linear[name] = mx.pad(array, widths)


def _check_heads(config: Mapping[str, Any], ranks: int) -> None:
    """Raise BadCheckpoint if the ranks cannot have equally many attention heads."""
    heads = {name: n for name, n in text_config(config).items() if name.endswith("_heads") and n}
    if odd := [f"{name} {n}" for name, n in heads.items() if n % ranks]:
        common, what = math.gcd(*heads.values()), f"{config['model_type']} with {' and '.join(odd)}"
        way = f"{common} ranks or a divisor of that" if common > 1 else "one machine"
        raise BadCheckpoint(f"{what} cannot be split over {ranks} ranks: use {way}")
