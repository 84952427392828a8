"""A drafter by its family: every source tensor accounted for, the result cast and quantized, lazily."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.utils import MODEL_REMAPPING

from mlx_spec.checkpoint import shortened
from mlx_spec.convert.families import Converted, Family, family_of
from mlx_spec.convert.quantization import Quantization
from mlx_spec.convert.source import Source
from mlx_spec.convert.target import DTYPES, left_out, open_model
from mlx_spec.errors import BadCheckpoint, InvalidValue

DRAFT_MODEL = "draft model"


@dataclass(frozen=True)
class Prepared:
    """A drafter as it is to be written, nothing computed yet."""

    family: str
    runnable: bool  # whether mlx_spec.drafters has its runtime
    config: dict[str, Any]
    tensors: dict[str, mx.array]
    used: frozenset[str]  # source tensors that went in
    dropped: Mapping[str, str]  # source tensors left out, and why
    notes: tuple[str, ...] = ()
    unquantized: tuple[
        str, ...
    ] = ()  # tables and matrices that stay as they are although bits were asked for


def family_or_model(source: Source) -> Family | None:
    """The family of a drafter checkpoint; None for a plain language model that mlx-lm knows.

    Raises BadCheckpoint for anything else.
    """
    try:
        return family_of(source.config, source.tensors().keys())
    except BadCheckpoint:
        kind = str(source.config.get("model_type"))
        module = MODEL_REMAPPING.get(kind, kind)
        if module.isidentifier() and importlib.util.find_spec(f"mlx_lm.models.{module}") is not None:
            return None
        raise


def embedded_family(source: Source) -> Family | None:
    """The family of the draft heads inside a target's own checkpoint; None if there are none."""
    try:
        return family_of(source.config, source.tensors().keys())
    except BadCheckpoint:
        return None


def prepare(
    source: Source,
    family: Family | None,
    target_config: Mapping[str, Any],
    quantization: Quantization | None,
    dtype: str | None,
) -> Prepared:
    """The drafter in `source` for a target. `family` None: a language model of its own.

    Raises BadCheckpoint where a tensor is missing, left over or of another shape than the configs say,
    Mismatch where the drafter was made for another target.
    """
    tensors = source.tensors()
    if family is None:
        model = open_model(source, quantization, dtype)
        unused = left_out(model.names - model.used, source.config)
        return Prepared(DRAFT_MODEL, True, model.config, model.tensors, model.used, unused)
    if any(name.endswith(".scales") for name in tensors):
        raise InvalidValue(
            f"{source.name} is quantized already: it is loaded as it is, or give the original to convert"
        )
    if dtype == "float32":  # before anything is computed of the weights, such as folded norms
        tensors = {name: cast(array, mx.float32) for name, array in tensors.items()}
    converted = family.convert(tensors, source.config, target_config)
    _account(source.name, family.name, tensors.keys(), converted)
    ours, config = dict(converted.tensors), dict(converted.config)
    unquantized: tuple[str, ...] = ()
    if dtype is not None:
        ours = {name: cast(array, DTYPES[dtype]) for name, array in ours.items()}
    if quantization is not None:
        ours, unquantized = _quantized(ours, converted, quantization)
        config["quantization"] = quantization.settings()
    used, dropped, notes = converted.used, converted.dropped, converted.notes
    return Prepared(family.name, family.runnable, config, ours, used, dropped, notes, unquantized)


def _account(name: str, family: str, found: Collection[str], converted: Converted) -> None:
    """Every tensor of the source is used or rightly dropped, none is both. Raises BadCheckpoint."""
    known = converted.used | converted.dropped.keys()
    left_over = sorted(set(found) - known)
    if left_over:
        raise BadCheckpoint(
            f"{name} holds tensors that a {family} drafter has no use for: {shortened(left_over)}; this "
            "version does not know that variant"
        )
    missing = sorted(known - set(found))
    assert not missing and not converted.used & converted.dropped.keys(), (family, missing)


def cast(array: mx.array, dtype: mx.Dtype) -> mx.array:
    """`array` in another type, if it holds floats."""
    return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array


def _quantized(
    tensors: Mapping[str, mx.array], converted: Converted, quantization: Quantization
) -> tuple[dict[str, mx.array], tuple[str, ...]]:
    """`tensors` with weights, scales and biases for those that can be quantized; the names of the others."""
    result: dict[str, mx.array] = {}
    unquantized = []
    for name, array in tensors.items():
        if array.ndim < 2 or not mx.issubdtype(array.dtype, mx.floating):
            result[name] = array
        elif not _fits(name, array, converted, quantization):
            result[name] = array
            unquantized.append(name)
        else:
            settings = quantization.settings()
            parts = mx.quantize(array, **settings)
            names = (name, *(f"{name.removesuffix('weight')}{part}" for part in ("scales", "biases")))
            result |= dict(zip(names, parts, strict=False))
    return result, tuple(unquantized)


def _fits(name: str, array: mx.array, converted: Converted, quantization: Quantization) -> bool:
    rows = array.shape[-1] % quantization.group_size == 0
    return name.endswith(".weight") and converted.quantizable(name) and rows
