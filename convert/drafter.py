"""Convert a drafter by its family, lazily, then cast and quantize it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_spec.errors import BadCheckpoint, InvalidValue
from mlx_spec.hub.catalog import mlx_lm_module

from .families import Converted, Family, family_of
from .source import DTYPES, Quantization, Source, cast
from .target import ConvertedPart, convert_model, explain_left_out

DRAFT_MODEL = "draft model"


def family_or_model(source: Source) -> Family | None:
    """Return the family of a drafter, None for a plain language model that mlx-lm knows.

    Raises BadCheckpoint for anything else.
    """
    try:
        return family_of(source.config, source.tensors().keys())
    except BadCheckpoint:
        if mlx_lm_module(str(source.config.get("model_type"))) is None:
            raise
        return None


def embedded_family(source: Source) -> Family | None:
    """Return the family of the draft heads inside a target, None if it has none."""
    try:
        return family_of(source.config, source.tensors().keys())
    except BadCheckpoint:
        return None


def convert_drafter(
    source: Source,
    family: Family | None,
    target_config: Mapping[str, Any],
    quantization: Quantization | None,
    dtype: str | None,
) -> ConvertedPart:
    """Convert the drafter in `source` for a target. `family` is None for a language model.

    Raises BadCheckpoint if a tensor is missing, left over or of another shape than the configs say, Mismatch
    if the drafter was made for another target.
    """
    tensors = source.tensors()
    if family is None:
        model = convert_model(source, quantization, dtype)
        unused = explain_left_out(model.names - model.used, source.config)
        return replace(model, family=DRAFT_MODEL, dropped=unused)
    if any(name.endswith(".scales") for name in tensors):
        raise InvalidValue(
            f"{source.name} is quantized already: it is loaded as it is, or give the original to convert"
        )
    if dtype == "float32":  # before anything is computed of the weights, such as folded norms
        tensors = {name: cast(array, mx.float32) for name, array in tensors.items()}
    converted = family.convert(tensors, source.config, target_config)
    ours, config = dict(converted.tensors), dict(converted.config)
    unquantized: tuple[str, ...] = ()
    if dtype is not None:
        ours = {name: cast(array, DTYPES[dtype]) for name, array in ours.items()}
    if quantization is not None:
        ours, unquantized = _quantize(ours, converted, quantization)
        config["quantization"] = quantization.settings()
    return ConvertedPart(
        family.name,
        config,
        ours,
        frozenset(tensors),
        converted.used,
        converted.dropped,
        converted.notes,
        unquantized,
    )


def _quantize(
    tensors: Mapping[str, mx.array], converted: Converted, quantization: Quantization
) -> tuple[dict[str, mx.array], tuple[str, ...]]:
    """Quantize what can be quantized. Return the names of the other matrices, too."""
    result: dict[str, mx.array] = {}
    unquantized = []
    for name, array in tensors.items():
        fits = array.shape[-1] % quantization.group_size == 0 if array.ndim else False
        if array.ndim < 2 or not mx.issubdtype(array.dtype, mx.floating):
            result[name] = array
        elif name.endswith(".weight") and converted.quantizable(name) and fits:
            parts = mx.quantize(array, **quantization.settings())
            names = (name, *(f"{name.removesuffix('weight')}{part}" for part in ("scales", "biases")))
            result |= dict(zip(names, parts, strict=False))
        else:
            result[name] = array
            unquantized.append(name)
    return result, tuple(unquantized)
