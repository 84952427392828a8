"""Read and change checkpoints in folders."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

Config = dict[str, Any]
Tensors = dict[str, mx.array]


def read(folder: Path, name: str = "config.json") -> Config:
    config: Config = json.loads((folder / name).read_text())
    return config


def edit_config(folder: Path, edit: Callable[[Config], object], name: str = "config.json") -> None:
    config = read(folder, name)
    edit(config)
    (folder / name).write_text(json.dumps(config))


def stored(file: Path) -> Tensors:
    loaded = mx.load(str(file))
    assert isinstance(loaded, dict)
    return loaded


def edit_tensors(folder: Path, edit: Callable[[Tensors], object], name: str = "model.safetensors") -> None:
    tensors = stored(folder / name)
    mx.eval(tensors)
    edit(tensors)
    mx.save_safetensors(str(folder / name), tensors, {"format": "mlx"})


@contextmanager
def full_disk(largest: int) -> Iterator[None]:
    """Let every file that gets more than `largest` bytes fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def to_float32(folder: Path) -> None:
    """Cast the weights that are bfloat16."""

    def widen(tensors: Tensors) -> None:
        tensors.update({n: a.astype(mx.float32) for n, a in tensors.items() if a.dtype == mx.bfloat16})

    for file in folder.glob("*.safetensors"):
        edit_tensors(folder, widen, file.name)


def float32_copy(source: Path, folder: Path) -> Path:
    """Copy a checkpoint in float32: no row class is measured for it, and its passes are short on a CPU."""
    shutil.copytree(source, folder)
    to_float32(folder)
    return folder


def split(folder: Path, count: int) -> None:
    """Put the tensors in several files, with an index."""
    file = folder / "model.safetensors"
    tensors = stored(file)
    mx.eval(tensors)
    weight_map = {}
    for i in range(count):
        part = {name: tensors[name] for name in sorted(tensors)[i::count]}
        shard = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        mx.save_safetensors(str(folder / shard), part)
        weight_map |= dict.fromkeys(part, shard)
    file.unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def exchanged(folder: Path, first: int = 7, second: int = 9) -> tuple[str, str]:
    """Two tokens of the tokenizer in `folder` exchange their ids. Returns what they were."""
    names = {i: token for token, i in read(folder, "tokenizer.json")["model"]["vocab"].items()}
    swapped = {names[first]: second, names[second]: first}
    edit_config(folder, lambda tokenizer: tokenizer["model"]["vocab"].update(swapped), "tokenizer.json")
    return names[first], names[second]
