"""Write a pair into a hidden folder, which gets its name when it is complete.

A run that is killed leaves a hidden folder that the next run for the same place removes. Memory holds one
tensor and what it is computed from.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from glob import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.utils import make_shards

from mlx_spec import __version__
from mlx_spec.errors import BadCheckpoint, InvalidValue, NotFound
from mlx_spec.hub import NoSpace
from mlx_spec.hub.catalog import MANIFEST
from mlx_spec.hub.checkpoint import INDEX
from mlx_spec.hub.files import human_bytes, one_line
from mlx_spec.hub.progress import StageProgress

FORMAT = 1  # of pair.json
TARGET, DRAFTER = "target", "drafter"
NOT_RUN = {"result": "not run", "why": "--no-self-test"}
MARGIN, SPARE_BYTES = 1.02, 1 << 26  # of the space needed: small files and those of the file system
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


Files = dict[str, dict[str, Any]]  # name -> its bytes and sha256
Part = dict[str, Any]  # an entry of pair.json


def write_manifest(
    folder: Path,
    target: Part,
    drafter: Part | None,
    dtype: str | None,
    self_test: Mapping[str, Any],
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
    write_text(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    return manifest


# --- the folder


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a hidden folder that becomes `out` at the end, or goes on failure.

    Raises InvalidValue if `out` exists and is not empty, or another run is writing it, NotFound if its parent
    does not exist.
    """
    out = out.expanduser().absolute()
    refuse_existing(out)
    if not out.parent.is_dir():
        raise NotFound(f"there is no folder {out.parent}: create it, or give another place for the pair")
    with _locked(out):
        for stale in out.parent.glob(f".{escape(out.name)}.partial-*"):
            shutil.rmtree(stale)
        partial = out.parent / f".{out.name}.partial-{os.getpid()}"
        partial.mkdir()
        try:
            yield partial
            for folder in (partial, *(path for path in partial.rglob("*") if path.is_dir())):
                _sync(folder)
            refuse_existing(out)
            partial.rename(out)
            _sync(out.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def refuse_existing(out: Path) -> None:
    """Raise InvalidValue unless `out` does not exist or is an empty folder."""
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise InvalidValue(f"{out} exists already: give another place for the pair, or remove it")


def check_space(folder: Path, needed: int) -> None:
    """Raise NoSpace unless `needed` bytes fit on the disk of `folder` and some stay free."""
    free, needed = shutil.disk_usage(folder).free, int(MARGIN * needed) + SPARE_BYTES
    if free < needed:
        raise NoSpace(
            f"the disk of {folder.parent} has {human_bytes(free)} free and {human_bytes(needed)} are needed: "
            "make room there, or write to another disk"
        )


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Hold the lock of `out`. The kernel frees it when a run dies, however it dies."""
    file = out.parent / f".{out.name}.lock"
    handle = _open_locked(file, out)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        os.close(handle)


def _open_locked(file: Path, out: Path) -> int:
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise InvalidValue(
                f"another conversion is writing {out}: wait for it, or give another place"
            ) from error
        # A run that just ended may have removed the file between the two calls.
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(handle).st_ino == file.stat().st_ino:
                return handle
        os.close(handle)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- the files


def write_text(file: Path, text: str) -> Files:
    """Write a small file."""
    data = text.encode()
    with file.open("wb") as stream:
        stream.write(data)
        os.fsync(stream.fileno())
    return {file.name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}}


def write_tensors(folder: Path, tensors: dict[str, mx.array], progress: StageProgress) -> Files:
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
    written: Files = {}
    for name, shard in zip(names, shards, strict=True):
        written |= _write_shard(folder / name, shard, progress)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return written | write_text(folder / INDEX, json.dumps(index, indent=2))


def _write_shard(file: Path, shard: dict[str, mx.array], progress: StageProgress) -> Files:
    digest = hashlib.sha256()
    size = 0
    with file.open("xb") as stream:

        def write(data: bytes | memoryview) -> None:
            nonlocal size
            stream.write(data)
            digest.update(data)
            size += len(data)

        write(safetensors_header(shard))
        for name in list(shard):
            try:
                data = _bytes(shard.pop(name))
            except RuntimeError as error:
                raise BadCheckpoint(f"tensor {name} cannot be read: {one_line(error)}") from error
            for start in range(0, len(data), BLOCK):
                write(data[start : start + BLOCK])
                progress.advance(len(data[start : start + BLOCK]))
            del data
            mx.clear_cache()
        stream.flush()
        os.fsync(stream.fileno())
    return {file.name: {"bytes": size, "sha256": digest.hexdigest()}}


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
