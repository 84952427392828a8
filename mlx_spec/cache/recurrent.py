"""State of recurrent layers (delta nets, convolutions, Mamba): kept by reference, restored, replayed."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache


class RecurrentCache(ArraysCache):
    """The arrays of one recurrent layer.

    A running state cannot be shortened. Models replace its arrays and never write into them, so a snapshot
    is a list of references; the target restores it and feeds the kept tokens again.
    """

    attention_type = "recurrent"

    def snapshot(self) -> Any:
        """What `restore` needs to come back here: references, no copy."""
        return list(self.cache)

    def restore(self, saved: Any) -> None:
        """Come back to a snapshot."""
        self.cache = list(saved)

    def arrays(self) -> list[mx.array]:
        """The arrays to evaluate after a prefill."""
        arrays: list[mx.array | None] = list(self.cache)
        return [array for array in arrays if array is not None]
