"""What was written, read again and compared with the source tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_spec.checkpoint import read_config, shortened
from mlx_spec.convert.progress import Progress
from mlx_spec.drafters.checkpoint import read_tensors
from mlx_spec.errors import BadCheckpoint

BLOCK = 1 << 24  # elements
MAX_ERROR = 0.5  # of a quantized tensor; a wrong one has 1.4, 4 bits have 0.1


@dataclass(frozen=True)
class RoundTrip:
    """How the files agree with the source."""

    equal: int  # tensors that are the source's, bit by bit
    quantized: int
    error: float  # the largest of a quantized tensor: root mean square of the error by that of the weights


def compare(folder: Path, expected: dict[str, mx.array], progress: Progress) -> RoundTrip:
    """Compare the safetensors in `folder` with the unquantized tensors they were made of. Empties `expected`.

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
            wrong += [] if _same(weight, source) else [name]
            infinite += [] if _finite(weight) else [name]
        else:
            errors[name] = _error(source, weight, found, _settings(config, stem.removesuffix(".")))
            wrong += [] if errors[name] < MAX_ERROR else [name]  # nan is not
        progress.count()
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


def _same(a: mx.array, b: mx.array) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    floating = mx.issubdtype(a.dtype, mx.floating)
    return bool(mx.array_equal(a, b, equal_nan=floating))


def _finite(a: mx.array) -> bool:
    return not mx.issubdtype(a.dtype, mx.floating) or bool(mx.isfinite(a).all())


def _error(
    source: mx.array, weight: mx.array, found: Mapping[str, mx.array | None], settings: Mapping[str, Any]
) -> float:
    scales = found["scales"]
    assert scales is not None
    mx.eval(source)
    step = max(1, BLOCK * source.shape[0] // source.size)  # rows; of large tables no float32 copy is made
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
    """Bits, group size and mode of one layer; mlx-lm's config.json names those that differ from the rest."""
    quantization = config["quantization"]
    own = quantization.get(path)
    chosen = own if isinstance(own, dict) else quantization
    return {
        key: chosen.get(key, default)
        for key, default in (("bits", 4), ("group_size", 64), ("mode", "affine"))
    }
