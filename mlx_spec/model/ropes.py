"""Give a model the rotary embeddings that config.json states, where mlx-lm's class makes others."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.rope_utils import YarnRoPE

from mlx_spec.checkpoint.config import text_config
from mlx_spec.checkpoint.files import one_line
from mlx_spec.checkpoint.rope_formulas import (
    ALWAYS_LONG,
    SCALED,
    Rotation,
    is_split,
    plain,
    stated_ropes,
    stated_rotation,
)
from mlx_spec.errors import BadCheckpoint
from mlx_spec.model.hooks import decoder_of
from mlx_spec.model.tree import ROPE, rope_owners


class StatedRope(YarnRoPE):
    """A rotary embedding with given angles. It rotates as mlx-lm's YaRN does."""

    def __init__(self, dims: int, traditional: bool, rotation: Rotation) -> None:
        nn.Module.__init__(self)
        self.dims, self.traditional, self.mscale = dims, traditional, rotation.factor
        # MLX takes inverse angles; dimensions that do not turn have infinite ones.
        self._freqs = 1 / mx.array(rotation.angles, dtype=mx.float32)


def apply_stated_ropes(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Replace the rotary embeddings of a model that differ from those that its config.json states.

    Raises BadCheckpoint if a stated scaling cannot be applied. Prints a line about one that holds in part.
    """
    text = text_config(config)
    stated = stated_ropes(text)
    scaled = {layers: rope for layers, rope in stated.items() if rope["rope_type"] in SCALED}
    if not scaled:
        return
    model_type = str(text.get("model_type") or config.get("model_type"))
    try:
        _apply(model, text, stated, model_type)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise BadCheckpoint(
            f"config.json states the rotary parameters {list(scaled.values())}, which cannot be used "
            f"({one_line(error)}): correct them"
        ) from error
    for rope in filter(is_split, scaled.values()):
        original = rope["original_max_position_embeddings"]
        way = "long_factor holds for texts of all lengths, and transformers takes short_factor up to"
        if model_type not in ALWAYS_LONG:
            way = "the context ends where transformers would turn the whole text by long_factor, after"
        print(f"longrope of config.json: {way} {original} tokens", file=sys.stderr)


def _apply(
    model: nn.Module, text: Mapping[str, Any], stated: Mapping[str | None, Any], model_type: str
) -> None:
    layer_types = list(text.get("layer_types") or [])
    layer_of = {id(m): i for i, layer in enumerate(decoder_of(model).layers) for m in layer.modules()}
    owners = [owner for owner in rope_owners(model) if rotation_of(owner[ROPE]) is not None]
    # If a class of mlx-lm scales some embeddings, it means the others to be without.
    is_read = not all(map(_is_plain, (owner[ROPE] for owner in owners)))
    applied = 0
    for owner in owners:
        rope, index = owner[ROPE], layer_of.get(id(owner), len(layer_types))
        params = stated.get(layer_types[index] if index < len(layer_types) else None) or stated.get(None)
        if params is None or params["rope_type"] not in SCALED:
            continue
        made = rotation_of(rope)
        assert made is not None, "filtered above"
        dims = 2 * len(made.angles)
        right = stated_rotation(params, dims, is_long=model_type in ALWAYS_LONG and is_split(params))
        is_near = made.is_near(right)
        if _is_plain(rope) and not is_near:
            base = float(params["rope_theta"] or 10_000.0)
            if (is_read and None in stated) or not made.is_near(plain(dims, base)):
                continue  # without scaling, or with another base
        applied += 1
        if not is_near:
            owner[ROPE] = StatedRope(dims, vars(rope).get("traditional", False), right)
    if not applied:
        raise BadCheckpoint(
            f"config.json states a {'/'.join(sorted({r['rope_type'] for r in stated.values()}))} rope, which "
            f"mlx-lm's class for {model_type} does not read: use another model, or remove it from "
            "config.json and stay within the context of training"
        )


def rotation_of(rope: Any) -> Rotation | None:
    """Return how a rotary embedding of mlx-lm turns a head; None for a class whose angles are not known."""
    if isinstance(rope, nn.RoPE):
        return plain(rope.dims, rope.base, 1 / rope.scale)
    if "_freqs" not in rope:
        return None
    factor = vars(rope).get("mscale", vars(rope).get("_scale", 1.0))
    with np.errstate(divide="ignore", over="ignore"):  # of a config.json that makes no sense
        return Rotation(tuple(float(1 / wavelength) for wavelength in np.array(rope._freqs)), factor)


def _is_plain(rope: Any) -> bool:
    return isinstance(rope, nn.RoPE) and rope.scale == 1.0
