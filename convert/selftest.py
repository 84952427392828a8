"""Prove that a converted pair is right, before it gets its name.

Every check reads the files that were written. A failed check raises SelfTestFailed, and nothing is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_spec.drafters.checkpoint import read_tensors
from mlx_spec.errors import BadCheckpoint
from mlx_spec.hub.checkpoint import read_config
from mlx_spec.hub.files import shortened
from mlx_spec.hub.progress import StageProgress

from .acceptance import check_drafter
from .drafter import convert_drafter
from .measure import SelfTestFailed, TestedConversion, check_logits, difference, measure, texts
from .target import convert_model
from .write import DRAFTER, TARGET

MAX_PERPLEXITY_RATIO = 2.0  # of the converted target to the original
MAX_ERROR = 0.5  # of a quantized tensor; a wrong one has 1.4, 4 bits have 0.1
BLOCK = 1 << 24  # elements compared at a time


@dataclass(frozen=True)
class RoundTrip:
    """How the written files agree with the source."""

    equal: int  # tensors that are the source's, bit by bit
    quantized: int
    error: float  # largest of a quantized tensor: root mean square of the error by that of the weights


def self_test(subject: TestedConversion, progress: StageProgress) -> dict[str, Any]:
    """Run all checks that apply. Return the figures for pair.json. Raises SelfTestFailed."""
    found: dict[str, Any] = {"result": "passed", "tensors": _check_tensors(subject, progress)}
    found |= _check_target(subject, progress)
    if subject.drafter is not None:
        found |= check_drafter(subject, progress)
    return found


def _check_tensors(subject: TestedConversion, progress: StageProgress) -> dict[str, Any]:
    """Compare the files with the source, tensor by tensor."""
    model = convert_model(subject.target, None, subject.target_conversion.dtype)
    result = {TARGET: asdict(compare(subject.target_folder, model.tensors, progress))}
    if subject.drafter is not None:
        dtype = subject.drafter_conversion.dtype
        drafter = convert_drafter(subject.drafter, subject.family, subject.target.config, None, dtype)
        result[DRAFTER] = asdict(compare(subject.drafter_folder, drafter.tensors, progress))
    return result


def _check_target(subject: TestedConversion, progress: StageProgress) -> dict[str, Any]:
    """Compare logits and perplexity with the original's."""
    conversion = subject.target_conversion
    dtype = conversion.reference_dtype(subject.target)
    tokens = texts(subject.target.folder, subject.target.config)
    progress.stage("computing the original on built-in texts")
    original = measure(subject.target.folder, dtype, tokens)
    progress.stage("computing the converted target on the same texts")
    converted = measure(subject.target_folder, None, tokens)
    distance = difference(converted.logits, original.logits)
    tolerance = check_logits("target", distance, subject.target, conversion)
    ratio = converted.perplexity / original.perplexity
    if not (math.isfinite(ratio) and ratio <= MAX_PERPLEXITY_RATIO):
        raise SelfTestFailed(
            f"the perplexity of the converted target is {converted.perplexity:.4g}, the original's is "
            f"{original.perplexity:.4g}: use more bits, smaller groups or another --dtype, or "
            "--no-self-test to have it nevertheless"
        )
    return {
        "logits": {"difference": distance, "tolerance": tolerance},
        "perplexity": {"original": original.perplexity, "converted": converted.perplexity, "ratio": ratio},
    }


def compare(folder: Path, expected: dict[str, mx.array], progress: StageProgress) -> RoundTrip:
    """Compare the files in `folder` with unquantized tensors. Empties `expected`.

    Raises BadCheckpoint, which names the tensors that are missing, left over, different or not finite.
    """
    written, config = read_tensors(folder), read_config(folder)
    progress.stage(f"comparing {folder.name} with its source", tensors=len(expected))
    errors: dict[str, float] = {}
    count, wrong, infinite = len(expected), [], []
    for name in sorted(expected):
        source, stem = expected.pop(name), name.removesuffix("weight")
        found = {part: written.pop(stem + part, None) for part in ("scales", "biases") if name != stem}
        weight = written.pop(name, None)
        if weight is None:
            wrong.append(name)
        elif found.get("scales") is None:
            wrong += [] if _is_same(weight, source) else [name]
            infinite += [] if _is_finite(weight) else [name]
        else:
            errors[name] = _error(source, weight, found, _settings(config, stem.removesuffix(".")))
            wrong += [] if errors[name] < MAX_ERROR else [name]  # nan is not
        progress.advance()
        mx.clear_cache()
    if wrong or written:
        raise BadCheckpoint(
            f"the files written to {folder.name} are not what the source holds, in "
            f"{shortened([*wrong, *sorted(written)])}: the disk or the source is damaged"
        )
    if infinite:
        raise BadCheckpoint(
            f"{shortened(infinite)} in {folder.name} is not finite: the source is damaged, or --dtype holds "
            "less than its values need"
        )
    return RoundTrip(count - len(errors), len(errors), max(errors.values(), default=0.0))


def _is_same(a: mx.array, b: mx.array) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    floating = mx.issubdtype(a.dtype, mx.floating)
    return bool(mx.array_equal(a, b, equal_nan=floating))


def _is_finite(a: mx.array) -> bool:
    return not mx.issubdtype(a.dtype, mx.floating) or bool(mx.isfinite(a).all())


def _error(
    source: mx.array, weight: mx.array, found: Mapping[str, mx.array | None], settings: Mapping[str, Any]
) -> float:
    """Return the relative error of a quantized tensor, computed by blocks of rows."""
    scales = found["scales"]
    assert scales is not None
    mx.eval(source)
    step = max(1, BLOCK * source.shape[0] // source.size)  # rows
    lost, size = 0.0, 0.0
    for start in range(0, source.shape[0], step):
        rows = slice(start, start + step)
        biases = None if found["biases"] is None else found["biases"][rows]
        original = source[rows].astype(mx.float32)
        restored = mx.dequantize(weight[rows], scales[rows], biases, **settings).astype(mx.float32)
        lost += float(mx.square(restored - original).sum())
        size += float(mx.square(original).sum())
    return math.sqrt(lost / size) if size else math.sqrt(lost)


def _settings(config: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return bits, group size and mode of one layer."""
    quantization = config["quantization"]
    own = quantization.get(path)
    chosen = own if isinstance(own, dict) else quantization
    defaults = {"bits": 4, "group_size": 64, "mode": "affine"}
    return {key: chosen.get(key, default) for key, default in defaults.items()}
