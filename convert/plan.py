"""Open and check what a conversion reads, and say how it converts each. No tensor is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from mlx_spec.checkpoint.config import Checkpoint
from mlx_spec.checkpoint.drafter_families import DrafterFamily
from mlx_spec.checkpoint.files import sha256
from mlx_spec.checkpoint.targets import mlx_lm_module
from mlx_spec.cli.progress import StageProgress
from mlx_spec.errors import BadCheckpoint, InvalidValue
from mlx_spec.hub import find
from mlx_spec.hub.catalog import NONE
from mlx_spec.hub.download import published_hash

from .families import family_of

TARGET, DRAFTER = "target", "drafter"  # the folders of a pair
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
class Conversion:
    """A checkpoint, and how to convert it. A type or a quantization of None keeps the checkpoint's."""

    checkpoint: Checkpoint
    family: DrafterFamily | None = None  # of a drafter; None for a language model
    quantization: Quantization | None = None
    dtype: str | None = None
    hashes: Mapping[str, str] = field(default_factory=dict)  # file of weights -> hash that the Hub publishes

    @property
    def unquantized(self) -> Conversion:
        """Return the same conversion without a quantization."""
        return replace(self, quantization=None)


@dataclass(frozen=True)
class ConversionPlan:
    """The conversions of a target and a drafter to a pair."""

    folder: Path  # of the converted pair
    target: Conversion
    drafter: Conversion | None = None

    @property
    def conversions(self) -> dict[str, Conversion]:
        """Return the conversions by the folders that they write."""
        return {TARGET: self.target, **({DRAFTER: self.drafter} if self.drafter else {})}

    @property
    def compares_copy(self) -> bool:
        """Return True if the self-test compares a quantized drafter with a copy that is not quantized.

        A drafter without a matrix to quantize is not quantized, and needs no copy.
        """
        drafter = self.drafter
        return drafter is not None and drafter.family is not None and drafter.quantization is not None

    @property
    def is_embedded(self) -> bool:
        """Return True if the drafter is a head inside the target's checkpoint."""
        return self.drafter is not None and self.drafter.checkpoint is self.target.checkpoint


def open_source(name: str, q6k_bits: int | None = None) -> Checkpoint:
    """Find a checkpoint, download it if necessary, and check that it is complete.

    `q6k_bits` is for GGUF files. Raises NotFound and BadCheckpoint.
    """
    checkpoint = find(name, q6k_bits)
    checkpoint.check_weights()
    return checkpoint


def parse_quantization(choice: str, group_size: int | None) -> Quantization | None:
    """Return the quantization of an option: bits, a mode or "none". Raises InvalidValue."""
    if choice in FIXED_MODES:
        bits, fixed = FIXED_MODES[choice]
        if group_size not in (None, fixed):
            raise InvalidValue(f"{choice} has groups of {fixed}: leave --group-size out")
        return Quantization(bits, fixed, choice)
    if group_size not in (None, 32, 64, 128):
        raise InvalidValue(f"--group-size is {group_size}, it must be 32, 64 or 128")
    return None if choice == NONE else Quantization(int(choice), group_size or 64)


def family_or_model(drafter: Checkpoint) -> DrafterFamily | None:
    """Return the family of a drafter; None for a language model that mlx-lm knows.

    Raises BadCheckpoint for any other checkpoint.
    """
    try:
        return family_of(drafter.config, drafter.headers.tensors)
    except BadCheckpoint:
        if mlx_lm_module(str(drafter.config.get("model_type"))) is None:
            raise
        return None


def check_hashes(checkpoint: Checkpoint, progress: StageProgress) -> dict[str, str]:
    """Compare cached weights to their published hashes. Raises BadCheckpoint.

    Returns the hashes by file name; {} for a folder, which has no published hashes.
    """
    blobs = {file: file.resolve() for file in checkpoint.headers.files if published_hash(file.resolve())}
    if blobs:
        size = sum(file.stat().st_size for file in blobs)
        progress.stage(f"checking the hashes of {checkpoint.name}", size=size)
    for file, blob in blobs.items():
        if sha256(blob) != blob.name:
            raise BadCheckpoint(
                f"{file.name} of {checkpoint.name} does not have the sha256 it is published under: remove "
                f"{blob} and run this again"
            )
        progress.advance(blob.stat().st_size)
    return {file.name: blob.name for file, blob in blobs.items()}
