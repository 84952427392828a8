"""Safetensors files written tensor by tensor: memory holds one tensor and what it is made of, no more."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import mlx.core as mx
import numpy as np
from mlx_lm.utils import make_shards

from mlx_spec.checkpoint import INDEX, one_line
from mlx_spec.convert.progress import Progress
from mlx_spec.errors import BadCheckpoint

CODES = {
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
BLOCK = 1 << 24  # bytes written at a time


@dataclass(frozen=True)
class WrittenFile:
    """One file of the output."""

    name: str  # relative to the folder of its checkpoint
    size: int  # bytes
    sha256: str


def write_tensors(folder: Path, tensors: dict[str, mx.array], progress: Progress) -> list[WrittenFile]:
    """Write `tensors` as mlx-lm would, in files of at most 5 GiB with an index. Empties `tensors`.

    Each tensor is computed when its turn comes and dropped at once, provided that the caller holds no other
    reference to it or to what it is made of. Raises OSError, and BadCheckpoint for what cannot be read.
    """
    total = sum(array.nbytes for array in tensors.values())
    shards = make_shards(tensors)
    tensors.clear()
    names = [_file_name(number, len(shards)) for number in range(1, len(shards) + 1)]
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    written = [_write_file(folder / name, shard, progress) for name, shard in zip(names, shards, strict=True)]
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return [*written, write_text(folder / INDEX, json.dumps(index, indent=2))]


def write_text(file: Path, text: str) -> WrittenFile:
    """Write a small file."""
    data = text.encode()
    with file.open("wb") as stream:
        stream.write(data)
        os.fsync(stream.fileno())
    return WrittenFile(file.name, len(data), hashlib.sha256(data).hexdigest())


def sha256(file: Path, progress: Progress) -> str:
    """The hash of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
            progress.advance(len(block))
    return digest.hexdigest()


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


class _Hashing:
    """Writes to a stream and hashes what it writes."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        self._stream.write(data)
        self._digest.update(data)
        self.size += len(data)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def _write_file(file: Path, shard: dict[str, mx.array], progress: Progress) -> WrittenFile:
    with file.open("xb") as stream:
        out = _Hashing(stream)
        out.write(_header(shard))
        for name in list(shard):
            try:
                data = _bytes(shard.pop(name))
            except RuntimeError as error:
                raise BadCheckpoint(f"tensor {name} cannot be read: {one_line(error)}") from error
            for start in range(0, len(data), BLOCK):
                out.write(data[start : start + BLOCK])
                progress.advance(len(data[start : start + BLOCK]))
            del data
            progress.count()
            mx.clear_cache()
        stream.flush()
        os.fsync(stream.fileno())
    return WrittenFile(file.name, out.size, out.hexdigest())


def _header(shard: dict[str, mx.array]) -> bytes:
    """The first bytes of the file. Format: safetensors, 8 bytes of length, JSON, padded to 8 bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for name, array in shard.items():
        end = offset + array.nbytes
        shape = list(array.shape)
        header[name] = {"dtype": CODES[array.dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(array: mx.array) -> memoryview:
    """The array, computed, as its bytes in memory; nothing is copied."""
    array = mx.contiguous(array)
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)  # numpy has no bfloat16
    return np.asarray(array).reshape(-1).view(np.uint8).data
