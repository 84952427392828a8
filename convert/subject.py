"""What a self-test is about."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_spec import drafters
from mlx_spec.checkpoint import read_config
from mlx_spec.convert.families import Family
from mlx_spec.convert.families.conventions import KEY
from mlx_spec.convert.manifest import DRAFTER, TARGET
from mlx_spec.convert.quantization import Quantization
from mlx_spec.convert.source import Source
from mlx_spec.convert.target import DTYPES
from mlx_spec.errors import SpecError

# Folders for the time of the test: the drafter in our form but not quantized, and as published but cast.
UNQUANTIZED, PUBLISHED = ".unquantized", ".published"


class SelfTestFailed(SpecError):
    """A converted pair that is not what its source is."""


@dataclass(frozen=True)
class Conversion:
    """What was asked for one part: its type and its quantization; None: as in the source."""

    dtype: str | None
    quantization: Quantization | None

    @property
    def changes(self) -> bool:
        """Whether the result computes something else than the source."""
        return self.dtype is not None or self.quantization is not None

    def reference_dtype(self, source: Source) -> mx.Dtype | None:
        """What to compute `source` in: the wider of its type and the new one; None: as it is stored."""
        if self.dtype is None:
            return None
        sizes: Counter[mx.Dtype] = Counter()
        for array in source.tensors().values():
            if mx.issubdtype(array.dtype, mx.floating):
                sizes[array.dtype] += array.size
        stored = sizes.most_common(1)[0][0]
        return (mx.zeros(1, dtype=stored) + mx.zeros(1, dtype=DTYPES[self.dtype])).dtype

    def narrows(self, source: Source) -> bool:
        """Whether the new type holds less than the source's."""
        return self.dtype is not None and DTYPES[self.dtype] != self.reference_dtype(source)


@dataclass(frozen=True)
class Subject:
    """A conversion to test."""

    folder: Path  # holds the parts as converted
    target: Source
    target_conversion: Conversion
    drafter: Source | None  # where its tensors come from, the target for native heads; None: no drafter
    family: Family | None  # of the drafter; None: a language model, or no drafter
    drafter_conversion: Conversion

    @property
    def target_folder(self) -> Path:
        """The target as converted."""
        return self.folder / TARGET

    @property
    def drafter_folder(self) -> Path:
        """The drafter as converted."""
        return self.folder / DRAFTER

    @property
    def unquantized_folder(self) -> Path:
        """The drafter in our form, not quantized."""
        return self.folder / (UNQUANTIZED if self.drafter_conversion.quantization else DRAFTER)

    @property
    def original_drafter(self) -> Path:
        """The drafter to compare with: as published where the engine can run that, else as converted."""
        assert self.drafter is not None
        known = self.drafter.config.get("model_type") in drafters.FAMILIES
        # Where the conversion records conventions, the drafter does not run without them.
        if self.family is not None and (not known or KEY in read_config(self.drafter_folder)):
            return self.unquantized_folder
        cast = self.folder / PUBLISHED
        return cast if cast.is_dir() else self.drafter.folder
