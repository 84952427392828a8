"""A checkpoint to convert: found, complete, of a format that can be read without running anything."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_spec.checkpoint import (
    AGAIN,
    INDEX,
    OTHER_WEIGHTS,
    WEIGHTS,
    check_weights,
    one_line,
    read_published,
    shortened,
)
from mlx_spec.convert.progress import Progress
from mlx_spec.convert.shards import sha256
from mlx_spec.errors import BadCheckpoint
from mlx_spec.hub import find
from mlx_spec.known import mended

BLOB = re.compile(r"[0-9a-f]{64}")  # name of a weight file in the Hugging Face cache: its sha256
COPIED = ("*.json", "*.jinja", "*.txt", "*.jsonl", "*.tiktoken", "tokenizer.model")
NOT_COPIED = ("config.json", INDEX, "*.safetensors.index.json", "*.bin.index.json", "pair.json")


@dataclass(frozen=True)
class Source:
    """One checkpoint in Hugging Face or MLX format."""

    name: str  # as it was asked for: a path or a repository
    folder: Path
    config: Mapping[str, Any] = field(repr=False)  # mended
    files: tuple[Path, ...] = field(repr=False)  # safetensors
    size: int = 0  # bytes of all of them

    @property
    def revision(self) -> str | None:
        """The commit of the repository; None for a folder."""
        return self.folder.name if self.folder.parent.name == "snapshots" else None

    def tensors(self) -> dict[str, mx.array]:
        """All tensors, unread. Raises BadCheckpoint."""
        found: dict[str, mx.array] = {}
        for file in self.files:
            try:
                loaded = mx.load(str(file))
            except RuntimeError as error:
                raise BadCheckpoint(f"{file} cannot be read ({one_line(error)}): {AGAIN}") from error
            assert isinstance(loaded, dict)
            found |= loaded
        return found

    def side_files(self) -> list[Path]:
        """What a converted checkpoint takes over as it is: tokenizer, chat template, generation settings."""
        found = {file for pattern in COPIED for file in self.folder.glob(pattern)}
        return sorted(f for f in found if not any(f.match(pattern) for pattern in NOT_COPIED))


def open_source(name: str) -> Source:
    """Find a checkpoint, download it if need be, and check that it is complete.

    Raises NotFound and BadCheckpoint.
    """
    folder = find(name)
    if not any(folder.glob(WEIGHTS)) and not (folder / INDEX).is_file():
        _refuse_formats(folder)
    config = mended(read_published(folder))
    size = check_weights(folder)
    return Source(name, folder, config, tuple(sorted(folder.glob(WEIGHTS))), size)


def check_hashes(source: Source, progress: Progress) -> dict[str, str]:
    """Compare the weights in the Hugging Face cache with the hashes they are published under.

    Returns the hashes by file name; nothing for a folder, whose hashes nobody knows. Raises BadCheckpoint.
    """
    published = {file: file.resolve().name for file in source.files if BLOB.fullmatch(file.resolve().name)}
    if published:
        size = sum(file.stat().st_size for file in published)
        progress.stage(f"checking the hashes of {source.name}", size=size)
    for file, expected in published.items():
        if sha256(file, progress) != expected:
            raise BadCheckpoint(
                f"{file.name} of {source.name} does not have the sha256 it is published under: remove "
                f"{file.resolve()} and run this again"
            )
    return {file.name: digest for file, digest in published.items()}


def _refuse_formats(folder: Path) -> None:
    """Raise BadCheckpoint where there are weights, but of another format."""
    others = sorted({file.name for pattern in OTHER_WEIGHTS for file in folder.glob(pattern)})
    if others and not any(name.endswith(".safetensors") for name in others):
        raise BadCheckpoint(
            f"{folder} holds {shortened(others)}, and only safetensors are read, because other formats can "
            "run code: use a checkpoint in safetensors"
        )
