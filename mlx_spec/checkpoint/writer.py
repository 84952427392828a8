"""Write a safetensors file tensor by tensor. Memory holds one tensor and its inputs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_spec.checkpoint.files import one_line
from mlx_spec.errors import BadCheckpoint

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


def write_safetensors(
    file: Path,
    arrays: dict[str, mx.array],
    metadata: Mapping[str, str] = MLX,
    advance: Callable[[int], object] = int,
) -> None:
    """Write a new file. Empties `arrays`. Raises OSError, and BadCheckpoint for an unreadable tensor."""
    with file.open("xb") as stream:
        stream.write(safetensors_header(arrays, metadata))
        for name in list(arrays):
            try:
                data = _bytes(arrays.pop(name))
            except RuntimeError as error:
                raise BadCheckpoint(f"tensor {name} cannot be read: {one_line(error)}") from error
            block = 1 << 24  # bytes between two steps of the progress that a user sees
            for start in range(0, len(data), block):
                advance(stream.write(data[start : start + block]))
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
    """Compute the array and return its bytes in memory, without a copy."""
    array = mx.contiguous(array)
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)  # numpy has no bfloat16
    return np.asarray(array).reshape(-1).view(np.uint8).data
