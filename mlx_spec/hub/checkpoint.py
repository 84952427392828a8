"""Read config.json and the headers of safetensors, and never tensor data."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from mlx_spec.errors import BadCheckpoint, NotFound
from mlx_spec.hub.catalog import MANIFEST, repair_config
from mlx_spec.hub.files import AGAIN, read_object, shortened

INDEX = "model.safetensors.index.json"
WEIGHTS = "model*.safetensors"  # as mlx-lm finds them
SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")  # five digits bound the list of a model's files
OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.npz", "*.h5")
GGUF = "{} holds GGUF: give the path of the file itself, such as model-Q8_0.gguf, downloaded if need be"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of them is enough
MAX_HEADER = 100_000_000  # bytes, the limit of the safetensors format
# Keys under which configs keep the language model; the second is our own, for drafters.
TEXT_CONFIGS = ("text_config", "layer_config", "transformer_layer_config", "llm_config", "language_config")


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


@dataclass(frozen=True)
class Headers:
    """The headers of all weight files of a folder."""

    tensors: Mapping[str, TensorInfo]  # of the files whose header can be read
    size: int  # bytes of the weight files
    problem: str | None  # the first missing or damaged file, None if the checkpoint is complete


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a checkpoint, which has a `model_type`, repaired for mlx-lm.

    Raises NotFound if there is none, BadCheckpoint if it is malformed or asks for code of its own.
    """
    config = read_published(folder)
    if not isinstance(config.get("model_type"), str):
        raise BadCheckpoint(f"{folder / 'config.json'} has no model_type: {AGAIN}")
    return config


def read_published(folder: Path) -> dict[str, Any]:
    """Return a repaired config.json that may lack `model_type`. Raises as `read_config`."""
    if not (folder / "config.json").is_file():
        if any(folder.glob("*.gguf")) and not any(folder.glob(WEIGHTS)):
            raise NotFound(GGUF.format(folder))
        if (folder / MANIFEST).is_file():
            raise NotFound(f"{folder} is a converted pair: give {folder / 'target'} or {folder / 'drafter'}")
        raise NotFound(
            f"no config.json in {folder}: give the folder of a model in Hugging Face or MLX format"
        )
    try:
        config = repair_config(read_object(folder / "config.json"))
    except (AttributeError, TypeError) as error:
        raise BadCheckpoint(f"{folder / 'config.json'} is malformed ({error}): {AGAIN}") from error
    if config.get("model_file") is not None:
        raise BadCheckpoint(
            f"{folder} needs its own code ({config['model_file']}), which is never run: "
            "use a checkpoint of a model that mlx-lm knows"
        )
    for key in TEXT_CONFIGS:
        if not isinstance(config.get(key), Mapping | None):
            raise BadCheckpoint(f"{folder / 'config.json'} has a {key} that is no object: {AGAIN}")
    context = integer(text_config(config), "max_position_embeddings")
    if context is not None and context < 1:
        raise BadCheckpoint(f"{folder / 'config.json'} has max_position_embeddings {context}: {AGAIN}")
    return config


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the part of a config.json that describes the language model."""
    found = (config[key] for key in TEXT_CONFIGS if isinstance(config.get(key), Mapping) and config[key])
    return dict(next(found, config))


def integer(config: Mapping[str, Any], *keys: str) -> int | None:
    """Return the first integer among the values of `keys`, None if there is none."""
    found = (config.get(key) for key in keys)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), None)


def check_weights(folder: Path) -> int:
    """Return the bytes of the weights. Raises BadCheckpoint unless they are complete."""
    headers = read_headers(folder)
    if headers.problem is not None:
        raise BadCheckpoint(headers.problem)
    return headers.size


def has_weights(folder: Path) -> bool:
    """Return True if config.json and all weight files exist, whole or not."""
    return (folder / "config.json").is_file() and not any(_missing_files(folder))


def other_format(place: object, names: Collection[str]) -> str | None:
    """Return the error for files that hold weights in formats that are not read, None for others."""
    others = sorted(name for name in names if any(fnmatch(name, pattern) for pattern in OTHER_WEIGHTS))
    if not others or any(fnmatch(name, WEIGHTS) for name in others):
        return None
    if all(name.endswith(".gguf") for name in others):
        return GGUF.format(place)
    return (
        f"{place} holds {shortened(others)} but no {WEIGHTS}, and nothing else is read: get a copy in that "
        "format"
    )


def read_headers(folder: Path) -> Headers:
    """Read the headers of all weight files. Damage becomes `problem`, not an error."""
    tensors: dict[str, TensorInfo] = {}
    size = 0
    problems = list(_missing_files(folder))
    for file in sorted(folder.glob(WEIGHTS)):
        try:
            size += (stored := file.stat().st_size)
            header = header_bytes(file)
            found = parse_header(file, header)
        except BadCheckpoint as error:
            problems.append(str(error))
            continue
        except OSError as error:
            problems.append(f"{file} cannot be read ({error.strerror})")
            continue
        tensors |= found
        promised = 8 + len(header) + max((tensor.end for tensor in found.values()), default=0)
        if stored != promised:
            problems.append(f"{file} has {stored} bytes, its header promises {promised}: {AGAIN}")
    return Headers(tensors, size, next(iter(problems), None))


def header_bytes(file: Path) -> bytes:
    """Return the JSON header of a safetensors file. Raises BadCheckpoint and OSError."""
    with file.open("rb") as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        if start.startswith(b"version "):
            raise BadCheckpoint(f"{file} is a Git LFS pointer, not the weights: run `git lfs pull`")
        if len(start) < 8 or not 0 < length <= MAX_HEADER:
            raise BadCheckpoint(f"{file} is not a safetensors file: {AGAIN}")
        header = stream.read(length)
    if len(header) < length:
        raise BadCheckpoint(
            f"{file} ends after {8 + len(header)} bytes, inside its header of {length}: {AGAIN}"
        )
    return header


def fingerprint(folder: Path) -> str:
    """Return 16 digits that change with the config, the tensors' names and shapes, or the files' sizes.

    Weights are not read: fine-tunes of a model look alike, and cost alike. Raises BadCheckpoint and OSError.
    """
    digest = hashlib.sha256()
    config = folder / "config.json"
    digest.update(config.read_bytes() if config.is_file() else b"")
    for file in sorted(folder.glob(WEIGHTS)):
        digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
        digest.update(header_bytes(file))
    return digest.hexdigest()[:16]


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
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise BadCheckpoint(f"{file} has a damaged header: {AGAIN}") from error


def indexed_tensors(folder: Path) -> Mapping[str, Any]:
    """Return tensor -> file of the index, empty without an index. Raises BadCheckpoint."""
    if not (folder / INDEX).is_file():
        return {}
    weight_map = read_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise BadCheckpoint(f"{folder / INDEX} has no weight_map: {AGAIN}")
    return weight_map


def _missing_files(folder: Path) -> Iterator[str]:
    """Yield what is wrong with the list of weight files: by the index, and by the numbers in their names."""
    found = [file.name for file in folder.glob(WEIGHTS)]
    try:
        wanted = {str(name) for name in indexed_tensors(folder).values()}
    except BadCheckpoint as error:
        yield str(error)
        return
    for match in filter(None, map(SHARD.fullmatch, found)):
        stem, number, count = match.groups()
        wanted |= {f"{stem}-{i + 1:0{len(number)}}-of-{count}.safetensors" for i in range(int(count))}
    missing = sorted(name for name in {*wanted, *found} if not os.path.isfile(folder / name))
    if missing:
        yield f"{folder} lacks {shortened(missing)}: {AGAIN}"
    if found:
        return
    if problem := other_format(folder, [file.name for file in folder.iterdir()]):
        yield problem
    yield f"{folder} holds no weights ({WEIGHTS}): {AGAIN}"
