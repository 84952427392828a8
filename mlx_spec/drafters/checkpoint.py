"""A drafter's checkpoint into its modules, tensor by tensor: nothing missing, nothing left over."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import infer_quant_config

from mlx_spec.errors import BadCheckpoint

Value = TypeVar("Value")

SHOWN = 3  # tensor names in a message


def required(config: Mapping[str, Any], key: str, kind: type[Value], where: str) -> Value:
    """`config[key]`, which must be there and of type `kind`; `where` names the config in the error."""
    value = config.get(key)
    if value is None:
        raise BadCheckpoint(
            f"{where} has no {key!r}: the checkpoint is incomplete, download or convert it again"
        )
    if kind is float and type(value) is int:
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise BadCheckpoint(f"{where} has {key!r} = {value!r}, which is no {kind.__name__}")
    return value


def load_weights(module: nn.Module, folder: Path, skip: Collection[str] = ()) -> None:
    """Fill the parameters of `module` from the safetensors of `folder`, quantized where they have scales.

    Lazy: the files are read when the parameters are first used. Tensors named in `skip` are ignored.
    """
    tensors = {name: array for name, array in read_tensors(folder).items() if name not in skip}
    _quantize(module, tensors, folder)
    expected = dict(tree_flatten(module.parameters()))
    _refuse(folder, "lacks the tensors", expected.keys() - tensors.keys())
    _refuse(folder, "has tensors that this drafter has no use for:", tensors.keys() - expected.keys())
    wrong = [
        f"{name} {list(array.shape)} instead of {list(expected[name].shape)}"
        for name, array in tensors.items()
        if array.shape != expected[name].shape
    ]
    _refuse(folder, "has tensors of another shape than its config.json says:", wrong)
    module.update(tree_unflatten(list(tensors.items())))
    module.eval()


def read_tensors(folder: Path) -> dict[str, mx.array]:
    """Every tensor of the safetensors in `folder`, unread."""
    tensors: dict[str, mx.array] = {}
    for file in _files(folder):
        _check_complete(file)
        loaded = mx.load(str(file))
        assert isinstance(loaded, dict)
        tensors |= loaded
    return tensors


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
    else:
        shards = json.loads(index.read_text())["weight_map"].values()
        files = [folder / name for name in sorted(set(shards))]
    missing = [file.name for file in files if not file.exists()]
    if missing or not files:
        raise BadCheckpoint(f"{folder} lacks {', '.join(missing) or 'safetensors files'}: download it again")
    return files


def _check_complete(file: Path) -> None:
    """Refuse a safetensors file that ends before its last tensor, or whose header cannot be read."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        try:
            header = json.loads(stream.read(length)) if length <= size else None
        except ValueError:  # UnicodeDecodeError and JSONDecodeError
            header = None
    if not isinstance(header, dict):
        raise BadCheckpoint(f"{file} is no safetensors file or was cut off: download it again")
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    if 8 + length + max(ends, default=0) != size:
        expected = 8 + length + max(ends, default=0)
        raise BadCheckpoint(f"{file} has {size} bytes, its header says {expected}: download it again")


def _quantize(module: nn.Module, tensors: dict[str, mx.array], folder: Path) -> None:
    """Turn the layers whose weight has scales into quantized ones of the same bits and group size."""

    def settings(path: str, layer: nn.Module) -> dict[str, Any] | bool:
        if f"{path}.scales" not in tensors or f"{path}.weight" not in tensors:
            return False
        return dict(infer_quant_config(path, layer, tensors))

    if any(name.endswith(".scales") for name in tensors):
        try:
            nn.quantize(module, class_predicate=settings)
        except ValueError as error:
            raise BadCheckpoint(f"{folder}: {error}") from error


def _refuse(folder: Path, problem: str, names: Collection[str]) -> None:
    if names:
        shown = sorted(names)[:SHOWN]
        rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise BadCheckpoint(f"{folder} {problem} {', '.join(shown)}{rest}: download or convert it again")
