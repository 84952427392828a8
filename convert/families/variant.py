"""A drafter with one mistake undone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlx_spec.types import Drafter, FeatureSpec, TargetParts


@dataclass(frozen=True)
class Variant:
    """Makes drafters that run as if the checkpoint had been meant another way."""

    meaning: str  # what would have to be true of the checkpoint, for the user
    needs: FeatureSpec
    make: Callable[[TargetParts], Drafter]
