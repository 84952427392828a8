"""Write the files of a pair. Memory holds one tensor and what it is computed from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.utils import make_shards

from mlx_spec import __version__
from mlx_spec.errors import BadCheckpoint
from mlx_spec.hub.catalog import MANIFEST
from mlx_spec.hub.checkpoint import INDEX
from mlx_spec.hub.files import one_line, write_json
from mlx_spec.hub.progress import StageProgress

FORMAT = 1  # of pair.json
TARGET, DRAFTER = "target", "drafter"
NOT_RUN: dict[str, Any] = {"result": "not run", "why": "--no-self-test"}
BLOCK = 1 << 24  # bytes written at a time
MLX = {"format": "mlx"}  # the metadata of a file
DTYPE_CODES = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.uint16: "U16",
    mx.int16: "I16",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.float32: "F32",
    mx.uint64: "U64",
    mx.int64: "I64",
}


Part = dict[str, Any]  # an entry of pair.json


def write_manifest(
    folder: Path, target: Part, drafter: Part | None, dtype: str | None, self_test: Mapping[str, Any]
) -> dict[str, Any]:
    """Write pair.json into `folder` and return it."""
    manifest = {
        "format": FORMAT,
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

    Each tensor is computed when its turn comes and dropped at once, if the caller holds no other reference to
    it or to what it is computed from. Raises OSError, and BadCheckpoint for what cannot be read.
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


def write_safetensors(
    file: Path,
    arrays: dict[str, mx.array],
    metadata: Mapping[str, str] = MLX,
    advance: Callable[[int], object] = int,
) -> None:
    """Write a new file. Empties `arrays`. Raises OSError, and BadCheckpoint for what cannot be read."""
    with file.open("xb") as stream:
        stream.write(safetensors_header(arrays, metadata))
        for name in list(arrays):
            try:
                data = _bytes(arrays.pop(name))
            except RuntimeError as error:
                raise BadCheckpoint(f"tensor {name} cannot be read: {one_line(error)}") from error
            for start in range(0, len(data), BLOCK):
                advance(stream.write(data[start : start + BLOCK]))
            del data
            mx.clear_cache()
        stream.flush()
        os.fsync(stream.fileno())


def safetensors_header(arrays: Mapping[str, mx.array], metadata: Mapping[str, str] = MLX) -> bytes:
    """Return the header of a safetensors file: its length and JSON, padded to 8 bytes."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, array in arrays.items():
        end = offset + array.nbytes
        shape = list(array.shape)
        header[name] = {"dtype": DTYPE_CODES[array.dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(array: mx.array) -> memoryview:
    """Compute the array and return its bytes in memory; copy nothing."""
    array = mx.contiguous(array)
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)  # numpy has no bfloat16
    return np.asarray(array).reshape(-1).view(np.uint8).data
