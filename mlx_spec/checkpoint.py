"""A checkpoint folder, checked before anything of it is loaded: a damaged one is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlx_spec.errors import BadCheckpoint, NotFound

INDEX = "model.safetensors.index.json"
WEIGHTS = "model*.safetensors"  # as mlx-lm finds them
OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.npz", "*.h5")
MAX_HEADER = 100_000_000  # bytes, the limit of the safetensors format
AGAIN = "download or convert it again"


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a checkpoint, with `model_type`.

    Raises NotFound where there is none, BadCheckpoint where it is malformed or asks for code of its own.
    """
    config = read_published(folder)
    if not isinstance(config.get("model_type"), str):
        raise BadCheckpoint(f"{folder / 'config.json'} has no model_type: {AGAIN}")
    return config


def read_published(folder: Path) -> dict[str, Any]:
    """The config.json of a checkpoint as its authors left it: that of some drafters has no `model_type`.

    Raises NotFound where there is none, BadCheckpoint where it is malformed or asks for code of its own.
    """
    if not (folder / "config.json").is_file():
        raise NotFound(
            f"no config.json in {folder}: give the folder of a model in Hugging Face or MLX format"
        )
    config = read_object(folder / "config.json")
    if config.get("model_file") is not None:
        raise BadCheckpoint(
            f"{folder} needs its own code ({config['model_file']}), which is never run: "
            "use a checkpoint of a model that mlx-lm knows"
        )
    return config


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in `file`. Raises BadCheckpoint for anything else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise BadCheckpoint(f"{file} is not valid JSON ({error}): {AGAIN}") from error
    except OSError as error:
        raise BadCheckpoint(f"{file} cannot be read ({error.strerror})") from error
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{file} holds a {type(value).__name__} where a JSON object belongs: {AGAIN}")
    return value


def check_weights(folder: Path) -> int:
    """Check that the safetensors of `folder` are all there and complete. Returns their size in bytes.

    Raises BadCheckpoint.
    """
    files = sorted(folder.glob(WEIGHTS))
    missing = [name for name in _indexed(folder) if not (folder / name).is_file()]
    if missing:
        raise BadCheckpoint(f"{folder} lacks {shortened(missing)}, which {INDEX} lists: {AGAIN}")
    if not files:
        others = sorted({file.name for pattern in OTHER_WEIGHTS for file in folder.glob(pattern)})
        if others:
            raise BadCheckpoint(
                f"{folder} holds {shortened(others)} but no {WEIGHTS}, and nothing else is "
                "read: get a copy in that format"
            )
        raise BadCheckpoint(f"{folder} holds no weights ({WEIGHTS}): {AGAIN}")
    return sum(_checked_size(file) for file in files)


def has_weights(folder: Path) -> bool:
    """Whether config.json and all weight files are there, however complete."""
    try:
        names = _indexed(folder)
    except BadCheckpoint:
        return False
    present = all((folder / name).is_file() for name in names)
    return (folder / "config.json").is_file() and present and any(folder.glob(WEIGHTS))


def shortened(names: list[str], shown: int = 3) -> str:
    """The first few names, and how many more there are."""
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + rest


def one_line(error: BaseException, limit: int = 300) -> str:
    """The text of an error of someone else's, on one line and cut to `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _indexed(folder: Path) -> list[str]:
    """The names of the weight files that the index lists; none without an index."""
    if not (folder / INDEX).is_file():
        return []
    weight_map = read_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise BadCheckpoint(f"{folder / INDEX} has no weight_map: {AGAIN}")
    return sorted({str(name) for name in weight_map.values()})


def _checked_size(file: Path) -> int:
    """Size in bytes of a safetensors file that ends where its header says."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        if start.startswith(b"version "):
            raise BadCheckpoint(f"{file} is a Git LFS pointer, not the weights: run `git lfs pull`")
        if len(start) < 8 or not 0 < length <= MAX_HEADER:
            raise BadCheckpoint(f"{file} is not a safetensors file: {AGAIN}")
        header = stream.read(length)
    if len(header) < length:
        raise BadCheckpoint(f"{file} ends after {size} bytes, inside its header of {length}: {AGAIN}")
    data = _data_length(header)
    if data is None:
        raise BadCheckpoint(f"{file} has a damaged header: {AGAIN}")
    if size != 8 + length + data:
        raise BadCheckpoint(f"{file} has {size} bytes, its header promises {8 + length + data}: {AGAIN}")
    return size


def _data_length(header: bytes) -> int | None:
    """Bytes of tensor data behind a safetensors header; None if it cannot be read."""
    try:
        tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        return max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None
