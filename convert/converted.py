"""Convert a target with mlx-lm, or a drafter with its family. Tensors stay lazy; each is accounted for."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import quantize_model

from mlx_spec.checkpoint.config import Checkpoint, text_config
from mlx_spec.checkpoint.files import one_line, shortened
from mlx_spec.checkpoint.layouts import DTYPES, model_classes
from mlx_spec.checkpoint.left_out import layer_of, reason_left_out, sources_of
from mlx_spec.checkpoint.owners import tower_names
from mlx_spec.checkpoint.quantizers import precision
from mlx_spec.errors import BadCheckpoint, InvalidValue, NoVision
from mlx_spec.model.read import read_model
from mlx_spec.vision.tower import read_tower, tower_tensors

from .families.common import Converted, total_bytes
from .plan import DRAFTER, TARGET, Conversion, ConversionPlan, Quantization


def convert_pair(plan: ConversionPlan, *, allow_unknown: bool) -> dict[str, Converted]:
    """Convert both checkpoints of a plan, by the folders that they will have.

    Each tensor that is left out has a known reason, unless `allow_unknown`. Raises BadCheckpoint,
    InvalidValue and Mismatch.
    """
    pair, config = {TARGET: convert_target(plan.target)}, plan.target.checkpoint.config
    unused = pair[TARGET].unused
    if plan.drafter is not None:
        drafter = convert_drafter(plan.drafter, config)
        if plan.is_embedded:
            unused -= drafter.used
            drafter = replace(drafter, dropped={})  # these tensors belong to the target
        pair[DRAFTER] = drafter
    dropped = explain_left_out(unused, config, allow_unknown=allow_unknown)
    return {**pair, TARGET: replace(pair[TARGET], dropped=dropped)}


def convert_model(conversion: Conversion, option: str = "-q") -> Converted:
    """Load a model with mlx-lm, lazily, cast it and quantize it. `option` is the user's, for errors.

    Raises BadCheckpoint if mlx-lm does not know the model or tensors are missing or left over, InvalidValue
    if the source is quantized already.
    """
    seen: dict[str, mx.array] = {}
    model, config = load_unread(conversion.checkpoint, seen)
    used = sources_of(seen, list(dict(tree_flatten(model.parameters())).values()))
    if conversion.dtype is not None:
        _cast_as_mlx_lm(model, config, DTYPES[conversion.dtype])
    if conversion.quantization is not None:
        config = _quantize(model, config, conversion.checkpoint.name, conversion.quantization, option)
    left = ("_name_or_path", "vision_config", "audio_config")  # mlx-lm leaves these out, too
    config = {key: value for key, value in sorted(config.items()) if key not in left}
    tensors = dict(tree_flatten(model.parameters()))
    result = Converted(config, tensors, used, unused=frozenset(seen) - used)
    seen.clear()  # else the class of the model would keep every tensor in memory
    return result


def convert_target(conversion: Conversion) -> Converted:
    """Convert a target as `convert_model` does, and keep its vision tower.

    The tower is not quantized, only cast to another type if asked; mlx-lm ignores it. A tower of an unknown
    family, or one that config.json does not describe, is left out.
    """
    model, checkpoint = convert_model(conversion), conversion.checkpoint
    names = tower_names(checkpoint.config, checkpoint.headers.tensors)
    if not names:
        return model
    try:
        read_tower(checkpoint)
    except NoVision:
        return model
    config = {**model.config, "vision_config": checkpoint.config["vision_config"]}
    return replace(
        model,
        config=dict(sorted(config.items())),
        tensors={**model.tensors, **_cast_all(tower_tensors(checkpoint), conversion.dtype)},
        used=model.used.union(names),
        unused=model.unused.difference(names),
    )


def explain_left_out(
    names: Collection[str], config: Mapping[str, Any], *, allow_unknown: bool = False
) -> dict[str, str]:
    """Return for each of these source tensors why the target may be without it.

    Raises BadCheckpoint for a tensor that is not known, unless `allow_unknown`.
    """
    reasons = {name: reason_left_out(name, config) for name in sorted(names)}
    unknown = [name for name, reason in reasons.items() if reason is None]
    if unknown and not allow_unknown:
        raise BadCheckpoint(
            f"mlx-lm has no use for {shortened(unknown)}: this checkpoint is not quite of model_type "
            f"{config['model_type']}, or mlx-lm is too old for it; --no-self-test converts it without them"
        )
    return {name: reason or "not known" for name, reason in reasons.items()}


def load_unread(checkpoint: Checkpoint, seen: dict[str, mx.array]) -> tuple[nn.Module, dict[str, Any]]:
    """Return mlx-lm's model of a checkpoint, with lazy weights, and its config. Raises BadCheckpoint.

    `seen` receives the tensors under their names in the checkpoint.
    """

    def classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        model_class, args_class = model_classes(config)
        methods = {"sanitize": _recording_sanitize(model_class, config, seen)}
        return type(model_class.__name__, (model_class,), methods), args_class

    with contextlib.redirect_stdout(io.StringIO()):
        return read_model(checkpoint, lazy=True, classes=classes)


def _recording_sanitize(
    model_class: Any, config: Mapping[str, Any], seen: dict[str, mx.array]
) -> Callable[..., Any]:
    """Return a `sanitize` that records all tensors in `seen`, and passes on those without draft heads."""
    text = text_config(config)
    layers = text["num_hidden_layers"] if text.get("num_nextn_predict_layers") else sys.maxsize

    def sanitize(self: nn.Module, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        seen.update(weights)
        kept = {name: array for name, array in weights.items() if layer_of(name) < layers}
        return dict(model_class.sanitize(self, kept)) if "sanitize" in dir(model_class) else kept

    return sanitize


def _cast_as_mlx_lm(model: nn.Module, config: dict[str, Any], dtype: mx.Dtype) -> None:
    castable: Callable[[str], bool] = (
        model.cast_predicate if "cast_predicate" in dir(type(model)) else lambda name: True
    )

    def changed(name: str, array: mx.array) -> mx.array:
        return _cast(array, dtype) if castable(name) else array

    model.update(tree_map_with_path(changed, model.parameters()))
    name = str(dtype).removeprefix("mlx.core.")
    for part in (config, config.get("text_config") or {}):
        part.update({key: name for key in ("dtype", "torch_dtype") if key in part})


def _quantize(
    model: nn.Module, config: dict[str, Any], name: str, quantization: Quantization, option: str
) -> dict[str, Any]:
    """Quantize a model in place. Return its config. Raises InvalidValue."""
    if "quantization" in config or "quantization_config" in config:
        raise InvalidValue(
            f"{name} is quantized already ({precision({}, config)}): use {option} none to keep it so, "
            "or convert the original"
        )
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            _, config = quantize_model(
                model, config, quantization.group_size, quantization.bits, mode=quantization.mode
            )
    except ValueError as error:
        raise InvalidValue(f"{name} cannot be quantized to {quantization}: {one_line(error)}") from error
    return config


# --- drafters


def convert_drafter(conversion: Conversion, target: Mapping[str, Any]) -> Converted:
    """Convert a drafter for the target with this config.json.

    Raises BadCheckpoint if a tensor is missing, left over, or does not have the shape in config.json. Raises
    Mismatch if the drafter was made for another target.
    """
    checkpoint, dtype, quantization = conversion.checkpoint, conversion.dtype, conversion.quantization
    if conversion.family is None:
        model = convert_model(conversion, "--drafter-bits")
        return replace(model, dropped=explain_left_out(model.unused, checkpoint.config))
    # Cast before a family computes with the weights, such as when it folds norms.
    wide = _cast_all(checkpoint.tensors(), "float32" if dtype == "float32" else None)
    drafter: Converted = conversion.family.convert(wide, checkpoint.config, target)
    unpacked = ("quantization", "quantization_config")  # of the source
    config = {key: value for key, value in drafter.config.items() if key not in unpacked}
    drafter = replace(drafter, config=config, tensors=_cast_all(drafter.tensors, dtype))
    return drafter if quantization is None else _quantized(drafter, quantization)


def _quantized(drafter: Converted, quantization: Quantization) -> Converted:
    """Quantize the tensors that allow it; `unquantized` has the names of the other matrices.

    The config has a quantization only if there is such a tensor.
    """
    tensors: dict[str, mx.array] = {}
    unquantized = []
    for name, array in drafter.tensors.items():
        fits = array.shape[-1] % quantization.group_size == 0 if array.ndim else False
        if array.ndim < 2 or not mx.issubdtype(array.dtype, mx.floating):
            tensors[name] = array
        elif name.endswith(".weight") and drafter.quantizable(name) and fits:
            packed = mx.quantize(array, **vars(quantization))
            names = (name, *(f"{name.removesuffix('weight')}{end}" for end in ("scales", "biases")))
            tensors |= dict(zip(names, packed, strict=False))
        else:
            tensors[name] = array
            unquantized.append(name)
    if tensors.keys() == drafter.tensors.keys():
        return replace(drafter, unquantized=tuple(unquantized))
    config = {**drafter.config, "quantization": vars(quantization)}
    return replace(
        drafter,
        config=config,
        tensors=tensors,
        unquantized=tuple(unquantized),
        dense_size=total_bytes(drafter.tensors),
    )


def _cast_all(tensors: Mapping[str, mx.array], dtype: str | None) -> dict[str, mx.array]:
    """Return the tensors, floats in another type if one is given."""
    return {name: array if dtype is None else _cast(array, DTYPES[dtype]) for name, array in tensors.items()}


def _cast(array: mx.array, dtype: mx.Dtype) -> mx.array:
    """Return `array` in another type if it holds floats."""
    return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array
