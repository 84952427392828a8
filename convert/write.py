"""Write the files of a pair. Memory holds one tensor and its inputs at a time."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import make_shards

from mlx_spec import __version__
from mlx_spec.checkpoint.families import MANIFEST
from mlx_spec.checkpoint.files import write_json
from mlx_spec.checkpoint.headers import INDEX
from mlx_spec.checkpoint.writer import write_safetensors
from mlx_spec.cli.progress import StageProgress

TARGET, DRAFTER = "target", "drafter"
PartEntry = dict[str, Any]  # of the target or the drafter, in pair.json


def write_manifest(
    folder: Path,
    target: PartEntry,
    drafter: PartEntry | None,
    dtype: str | None,
    self_test: Mapping[str, Any],
) -> dict[str, Any]:
    """Write pair.json into `folder` and return it."""
    manifest = {
        "format": 1,
        "target": TARGET,
        "drafter": DRAFTER if drafter else None,
        "dtype": dtype or "as in the sources",
        "versions": {"mlx": version("mlx"), "mlx_lm": version("mlx-lm"), "mlx_spec": __version__},
        "parts": {TARGET: target, **({DRAFTER: drafter} if drafter else {})},
        "self_test": dict(self_test),
    }
    write_json(folder / MANIFEST, manifest)
    return manifest


# --- the files


def write_tensors(folder: Path, tensors: dict[str, mx.array], progress: StageProgress) -> None:
    """Write `tensors` in files of at most 5 GiB with an index. Empties `tensors`.

    Each tensor is computed when it is written and then freed, if the caller has no other reference to it or
    its inputs. Raises OSError, and BadCheckpoint for a source that cannot be read.
    """
    total = sum(array.nbytes for array in tensors.values())
    shards = make_shards(tensors)
    tensors.clear()
    count = len(shards)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    names = names if count > 1 else ["model.safetensors"]
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, shard, advance=progress.advance)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / INDEX, index)
