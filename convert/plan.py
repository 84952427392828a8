"""Say what a conversion does: the plan that the conversion and its self-test follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_spec.checkpoint.drafter_families import DrafterFamily
from mlx_spec.checkpoint.layouts import DTYPES

from .source import Quantization, Source
from .write import DRAFTER

UNQUANTIZED = ".unquantized"  # folder of the drafter in our form without quantization, during the test


@dataclass(frozen=True)
class ConversionPlan:
    """Both sources, and how to convert them. A type or a quantization of None keeps the source's."""

    folder: Path  # of the converted pair
    target: Source
    drafter: Source | None  # for draft heads inside the target it is `target`; None without a drafter
    family: DrafterFamily | None  # of the drafter; None for a language model, or without a drafter
    dtype: str | None
    quantization: Quantization | None  # of the target
    drafter_quantization: Quantization | None
    hashes: Mapping[str, Mapping[str, str]]  # by part: the published hashes of the weights

    @property
    def is_embedded(self) -> bool:
        """Return True if the drafter is a head inside the target's checkpoint."""
        return self.drafter is self.target

    @property
    def unquantized_folder(self) -> Path:
        """Return the folder of the drafter in our form without quantization."""
        return self.folder / (UNQUANTIZED if self.drafter_quantization else DRAFTER)

    @property
    def original_drafter(self) -> Path:
        """Return the folder of the drafter to compare with: as published for a language model, else ours."""
        assert self.drafter is not None
        return self.drafter.folder if self.family is None else self.unquantized_folder

    def reference_dtype(self) -> mx.Dtype | None:
        """Return the wider type of the target's stored one and `dtype`; None without `dtype`."""
        if self.dtype is None:
            return None
        sizes: Counter[mx.Dtype] = Counter()
        for array in self.target.checkpoint.tensors().values():
            if mx.issubdtype(array.dtype, mx.floating):
                sizes[array.dtype] += array.size
        stored = sizes.most_common(1)[0][0]
        return (mx.zeros(1, dtype=stored) + mx.zeros(1, dtype=DTYPES[self.dtype])).dtype
