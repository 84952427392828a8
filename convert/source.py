"""Open a checkpoint for a conversion, check that it is complete, and check its hashes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_spec.checkpoint.config import Checkpoint, read_checkpoint
from mlx_spec.checkpoint.files import sha256, typed_path
from mlx_spec.checkpoint.gguf import is_gguf
from mlx_spec.checkpoint.gguf_model import gguf_folder
from mlx_spec.cli.progress import StageProgress
from mlx_spec.errors import BadCheckpoint, InvalidValue
from mlx_spec.hub import find
from mlx_spec.hub.download import published_hash

FIXED_MODES = {"mxfp4": (4, 32), "nvfp4": (4, 16)}  # mode -> (bits, group size), which MLX fixes


@dataclass(frozen=True)
class Quantization:
    """How weights are quantized, with the names of config.json."""

    bits: int
    group_size: int  # weights that share a scale
    mode: str = "affine"

    def __str__(self) -> str:
        name = f"{self.bits}-bit" if self.mode == "affine" else self.mode
        return f"{name}, groups of {self.group_size}"


@dataclass(frozen=True)
class Source:
    """One checkpoint in Hugging Face or MLX format."""

    name: str  # a path or a repository, as given
    checkpoint: Checkpoint = field(repr=False)

    @property
    def folder(self) -> Path:
        """Return the folder of its files."""
        return self.checkpoint.folder

    @property
    def config(self) -> Mapping[str, Any]:
        """Return its config.json, repaired."""
        return self.checkpoint.config

    @property
    def revision(self) -> str | None:
        """Return the commit of a repository; None for a folder."""
        return self.folder.name if self.folder.parent.name == "snapshots" else None

    def side_files(self) -> list[Path]:
        """Return the files to copy: tokenizer, chat template, generation settings."""
        copied = "*.json *.jinja *chat_templates/*.jinja *.txt *.jsonl *.tiktoken tokenizer.model".split()
        left = ("config.json", "*.safetensors.index.json", "*.bin.index.json", "pair.json")
        files = {file for pattern in copied for file in self.folder.glob(pattern)}
        return sorted(f for f in files if not any(f.match(pattern) for pattern in left))


def open_source(name: str, q6k_bits: int | None = None) -> Source:
    """Find a checkpoint, download it if necessary, and check that it is complete.

    `q6k_bits` is for GGUF files. Raises NotFound and BadCheckpoint.
    """
    file = typed_path(name)
    is_file = q6k_bits is not None and file.is_file() and is_gguf(file)
    checkpoint = read_checkpoint(gguf_folder(file, q6k_bits), name) if is_file else find(name)
    checkpoint.check_weights()
    return Source(name, checkpoint)


def check_hashes(source: Source, progress: StageProgress) -> dict[str, str]:
    """Compare cached weights to their published hashes. Raises BadCheckpoint.

    Returns the hashes by file name; {} for a folder, which has no published hashes.
    """
    files = source.checkpoint.headers.files
    blobs = {file: file.resolve() for file in files if published_hash(file.resolve())}
    if blobs:
        size = sum(file.stat().st_size for file in blobs)
        progress.stage(f"checking the hashes of {source.name}", size=size)
    for file, blob in blobs.items():
        if sha256(blob) != blob.name:
            raise BadCheckpoint(
                f"{file.name} of {source.name} does not have the sha256 it is published under: remove "
                f"{blob} and run this again"
            )
        progress.advance(blob.stat().st_size)
    return {file.name: blob.name for file, blob in blobs.items()}


def parse_quantization(choice: str, group_size: int | None) -> Quantization | None:
    """Return the quantization of an option: bits, a mode or "none". Raises InvalidValue."""
    if choice in FIXED_MODES:
        bits, fixed = FIXED_MODES[choice]
        if group_size not in (None, fixed):
            raise InvalidValue(f"{choice} has groups of {fixed}: leave --group-size out")
        return Quantization(bits, fixed, choice)
    if group_size not in (None, 32, 64, 128):
        raise InvalidValue(f"--group-size is {group_size}, it must be 32, 64 or 128")
    return None if choice == "none" else Quantization(int(choice), group_size or 64)


def cast(array: mx.array, dtype: mx.Dtype) -> mx.array:
    """Return `array` in another type if it holds floats."""
    return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array
