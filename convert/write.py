"""Write the files of a pair. Memory holds one tensor and its inputs at a time."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import make_shards

from mlx_spec import __version__
from mlx_spec.checkpoint.config import Checkpoint
from mlx_spec.checkpoint.files import check_space, sha256, write_json
from mlx_spec.checkpoint.headers import INDEX
from mlx_spec.checkpoint.targets import MANIFEST
from mlx_spec.checkpoint.writer import write_safetensors
from mlx_spec.cli.progress import StageProgress

from .families.common import Converted, total_bytes
from .plan import DRAFTER, TARGET, Conversion, ConversionPlan

PartEntry = dict[str, Any]  # of the target or the drafter, in pair.json


def write_pair(
    plan: ConversionPlan, pair: Mapping[str, Converted], progress: StageProgress, *, is_tested: bool
) -> dict[str, PartEntry]:
    """Write target and drafter. Return their entries in pair.json. Raises NoSpace before it writes.

    The self-test of a pair that `is_tested` may write its drafter once more.
    """
    needed = sum(total_bytes(converted.tensors) for converted in pair.values())
    needed += pair[DRAFTER].dense_size if is_tested and plan.compares_copy else 0
    check_space(plan.target.checkpoint.name, needed, plan.folder.parent, "write to another disk")
    parts = {}
    for role, conversion in plan.conversions.items():
        tokenizer = None if role == DRAFTER and plan.is_embedded else conversion.checkpoint
        parts[role] = _write_part(plan.folder / role, conversion, pair[role], tokenizer, progress)
    return parts


def _write_part(
    folder: Path,
    conversion: Conversion,
    converted: Converted,
    tokenizer: Checkpoint | None,
    progress: StageProgress,
) -> PartEntry:
    """Write the target or the drafter. Return its entry in pair.json."""
    count, source = len(converted.tensors), conversion.checkpoint
    write_folder(folder, converted, tokenizer, progress)
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    facts = {file: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in files}
    is_model = folder.name == DRAFTER and conversion.family is None
    entry = {
        "name": source.name,
        "revision": revision(source),
        "source_sha256": conversion.hashes,
        "family": "draft model" if is_model else converted.config["model_type"],
        "quantization": converted.config.get("quantization"),
        "tensors": count,
        "left_out": dict(Counter(converted.dropped.values())),
        "unquantized": converted.unquantized,
        "notes": converted.notes,
        "files": {file.relative_to(folder).as_posix(): facts[file] for file in files},
    }
    return {key: value for key, value in entry.items() if value not in (None, {}, ())}


def revision(checkpoint: Checkpoint) -> str | None:
    """Return the commit of a checkpoint from the Hub; None for a folder."""
    folder = checkpoint.folder
    return folder.name if folder.parent.name == "snapshots" else None


def write_folder(
    folder: Path, converted: Converted, tokenizer: Checkpoint | None, progress: StageProgress
) -> None:
    """Write one checkpoint, with the tokenizer of another one. Empties `converted.tensors`."""
    tensors = converted.tensors
    folder.mkdir()
    progress.stage(f"writing the {folder.name.strip('.')}", tensors=len(tensors), size=total_bytes(tensors))
    limit = mx.set_cache_limit(0)  # MLX returns freed memory to the system at once
    try:
        write_tensors(folder, tensors, progress)
    finally:
        mx.set_cache_limit(limit)
    write_json(folder / "config.json", converted.config)
    if tokenizer is None:
        return
    for file in _side_files(tokenizer.folder):
        copy = folder / file.relative_to(tokenizer.folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)


def _side_files(folder: Path) -> list[Path]:
    """Return the files to copy: tokenizer, chat template, generation settings."""
    copied = "*.json *.jinja *chat_templates/*.jinja *.txt *.jsonl *.tiktoken tokenizer.model".split()
    left = ("config.json", "*.safetensors.index.json", "*.bin.index.json", "pair.json")
    files = {file for pattern in copied for file in folder.glob(pattern)}
    return sorted(f for f in files if not any(f.match(pattern) for pattern in left))


def write_tensors(
    folder: Path, tensors: dict[str, mx.array], progress: StageProgress, file_gb: int = 5
) -> None:
    """Write `tensors` in files of at most `file_gb` GiB with an index. Empties `tensors`.

    Each tensor is computed when it is written and then freed, if the caller has no other reference to it or
    its inputs. Raises OSError, and BadCheckpoint for a source that cannot be read.
    """
    total = total_bytes(tensors)
    shards = make_shards(tensors, file_gb)
    tensors.clear()
    count = len(shards)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    names = names if count > 1 else ["model.safetensors"]
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, shard, advance=progress.advance)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / INDEX, index)


def write_manifest(
    folder: Path, parts: Mapping[str, PartEntry], dtype: str | None, self_test: Mapping[str, Any]
) -> dict[str, Any]:
    """Write pair.json into `folder` and return it."""
    manifest = {
        "format": 1,
        "target": TARGET,
        "drafter": DRAFTER if DRAFTER in parts else None,
        "dtype": dtype or "as in the sources",
        "versions": {"mlx": version("mlx"), "mlx_lm": version("mlx-lm"), "mlx_spec": __version__},
        "parts": dict(parts),
        "self_test": dict(self_test),
    }
    write_json(folder / MANIFEST, manifest)
    return manifest
