"""Read the headers of safetensors files, never tensor data, and choose the files that make up a model."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from mlx_spec.checkpoint.files import AGAIN, read_object, shortened
from mlx_spec.errors import BadCheckpoint

INDEX = "model.safetensors.index.json"
WEIGHTS = "model*.safetensors"  # as mlx-lm finds them
SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")  # five digits limit the number of shards
MAIN = re.compile(r"model(-\d+-of-\d+)?\.safetensors")  # files that transformers reads; others are variants
HOLDS_GGUF = "{} holds GGUF: give the path of the file itself, such as model-Q8_0.gguf, downloaded if need be"


class TensorInfo(NamedTuple):
    """A tensor as the header of its file describes it."""

    dtype: str  # as safetensors writes it: "BF16"
    shape: tuple[int, ...]
    begin: int  # bytes from the end of the header
    end: int

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the bytes that it takes in its file."""
        return self.end - self.begin


Tensors = Mapping[str, TensorInfo]


@dataclass(frozen=True)
class Headers:
    """The headers of the weight files that make up a model."""

    tensors: Tensors  # of the files whose header can be read
    size: int  # bytes of the weight files
    problem: str | None  # the first missing or damaged file, None if the checkpoint is complete
    files: tuple[Path, ...] = ()  # the files that are read
    contents: tuple[bytes, ...] = field(default=(), repr=False)  # their headers as they are, empty if damaged
    indexed: Collection[str] = ()  # tensors of the index; empty if it names missing files
    missing: tuple[str, ...] = ()  # names of missing files


def read_headers(folder: Path) -> Headers:
    """Read the headers of the weight files of a model. Damage becomes `problem`, not an error."""
    try:
        index = indexed_tensors(folder)
    except BadCheckpoint as error:
        return Headers({}, 0, str(error), missing=(INDEX,))
    named = {str(name) for name in index.values() if Path(str(name)).name == name}
    listed = sorted({file.name for file in folder.glob(WEIGHTS)} | named)
    tensors: dict[str, Tensors] = {}  # by file
    contents: dict[str, bytes] = {}
    damage: dict[str, str] = {}
    for name in listed:
        path = folder / name  # `exists` is False for a name that no disk can hold; a pipe may hold weights
        if os.path.exists(path) and not os.path.isdir(path):
            tensors[name], contents[name], problem = _read_header(path)
            damage |= {name: problem} if problem else {}
    chosen, missing, problem = choose_files(str(folder), tensors, index)
    links = {file.name for file in folder.glob(WEIGHTS) if not file.exists()}  # to blobs that are gone
    if problem is None and (missing := sorted({*missing, *(links if not chosen else ())})):
        problem = f"{folder} lacks {shortened(missing)}: {AGAIN}"
    if problem is None and not chosen:
        others = [file.name for file in folder.iterdir()] if folder.is_dir() else []
        problem = other_format(folder, others) or f"{folder} holds no weights ({WEIGHTS}): {AGAIN}"
        missing = [WEIGHTS]
    problem = problem or next((damage[name] for name in chosen if name in damage), None)
    return Headers(
        tensors={key: tensor for name in chosen for key, tensor in tensors[name].items()},
        size=sum((folder / name).stat().st_size for name in chosen),
        problem=problem,
        files=tuple(folder / name for name in chosen),
        contents=tuple(contents[name] for name in chosen),
        indexed=index.keys() if {str(name) for name in index.values()} <= tensors.keys() else (),
        missing=tuple(missing),
    )


def choose_files(
    source: str, tensors: Mapping[str, Collection[str]], index: Mapping[str, Any]
) -> tuple[list[str], list[str], str | None]:
    """Return the files of a model to read, the missing files, and the reason if none can be chosen.

    `tensors` has the tensors of each file, `index` the file of each tensor. An index whose files all exist
    decides. An index that names other files is left over from another checkpoint, and ignored: then files
    without common tensors are read. A variant such as model.fp16.safetensors is not read beside the main one.
    """
    named = {str(name) for name in index.values()}
    groups = _groups(tensors)
    if named and named <= tensors.keys():
        groups = {"": sorted(named), **{key: files for key, files in groups.items() if not named & {*files}}}
    chosen: list[str] = []
    missing: list[str] = []
    owner: dict[str, str] = {}
    for key, files in groups.items():
        shared = next((name for file in files for name in tensors[file] if name in owner), None)
        lacking = _lacking(files) if key else []
        if shared is None:
            missing += lacking
            chosen += files
            owner |= {name: file for file in files for name in tensors[file]}
        elif not (lacking or "" in groups) and all(map(MAIN.fullmatch, files)):
            return (
                [],
                [],
                (
                    f"{source} holds {shared} in {owner[shared]} and in {files[0]}, and no {INDEX} names "
                    "one of them: remove the file that does not belong there"
                ),
            )
    return sorted(chosen), sorted(missing if chosen else named), None


def other_format(source: object, names: Collection[str]) -> str | None:
    """Return the error if the only weights are in formats that are not read; else None."""
    other_weights = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.npz", "*.h5")
    others = sorted(name for name in names if any(fnmatch(name, pattern) for pattern in other_weights))
    if not others or any(fnmatch(name, WEIGHTS) for name in others):
        return None
    if all(name.endswith(".gguf") for name in others):
        return HOLDS_GGUF.format(source)
    return (
        f"{source} holds {shortened(others)} but no {WEIGHTS}, and nothing else is read: get a copy in that "
        "format"
    )


def header_bytes(file: Path) -> bytes:
    """Return the JSON header of a safetensors file. Raises BadCheckpoint and OSError."""
    with file.open("rb") as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        if start.startswith(b"version "):
            raise BadCheckpoint(f"{file} is a Git LFS pointer, not the weights: run `git lfs pull`")
        max_header = 100_000_000  # bytes, the limit of the safetensors format
        if len(start) < 8 or not 0 < length <= max_header:
            raise BadCheckpoint(f"{file} is not a safetensors file: {AGAIN}")
        header = stream.read(length)
    if len(header) < length:
        raise BadCheckpoint(
            f"{file} ends after {8 + len(header)} bytes, inside its header of {length}: {AGAIN}"
        )
    return header


def parse_header(file: Path, header: bytes) -> dict[str, TensorInfo]:
    """Return the tensors that the header of `file` lists. Raises BadCheckpoint."""
    try:
        return {
            name: TensorInfo(
                str(entry["dtype"]),
                tuple(map(int, entry["shape"])),
                *map(int, entry["data_offsets"]),
            )
            for name, entry in json.loads(header).items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise BadCheckpoint(f"{file} has a damaged header: {AGAIN}") from error


def indexed_tensors(folder: Path) -> Mapping[str, Any]:
    """Return tensor -> file of the index, empty without an index. Raises BadCheckpoint."""
    if not (folder / INDEX).is_file():
        return {}
    weight_map = read_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise BadCheckpoint(f"{folder / INDEX} has no weight_map: {AGAIN}")
    return weight_map


def _read_header(file: Path) -> tuple[Tensors, bytes, str | None]:
    """Return the tensors of a file, its header, and its problem or None."""
    try:
        stored, header = file.stat().st_size, header_bytes(file)
        tensors = parse_header(file, header)
    except BadCheckpoint as error:
        return {}, b"", str(error)
    except OSError as error:
        return {}, b"", f"{file} cannot be read ({error.strerror})"
    promised = 8 + len(header) + max((tensor.end for tensor in tensors.values()), default=0)
    problem = f"{file} has {stored} bytes, its header promises {promised}: {AGAIN}"
    return tensors, header, problem if stored != promised else None


def _groups(names: Iterable[str]) -> dict[str, list[str]]:
    """Group files by name into sets of shards: complete sets first, main files before variants."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        match = SHARD.fullmatch(name)
        groups.setdefault(f"{match[1]}-of-{match[3]}" if match else name, []).append(name)
    order = sorted(
        groups.items(), key=lambda group: (bool(_lacking(group[1])), not MAIN.fullmatch(group[1][0]))
    )
    return dict(order)


def _lacking(files: list[str]) -> list[str]:
    """Return the files that a set of shards lacks by the numbers in their names."""
    match = SHARD.fullmatch(files[0])
    if match is None:
        return []
    stem, _, count = match.groups()
    names = (f"{stem}-{i + 1:05}-of-{count}.safetensors" for i in range(int(count)))
    return [name for name in names if name not in files]
