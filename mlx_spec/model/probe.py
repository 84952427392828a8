"""Check at load that one pass of several rows gives the logits of several passes of one row."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_spec.errors import BadCheckpoint, NotRewindable
from mlx_spec.model.target import LMTarget


def rounding_of(model: nn.Module) -> float:
    """Return the largest relative error that rounding explains in a model."""
    weights = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    types = {array.dtype for _, array in weights}
    # Shares of the largest logit or state.
    return 0.05 if types & {mx.bfloat16, mx.float16} else 0.01


def check_rows(model: nn.Module, make: Callable[[], LMTarget]) -> None:
    """Verify rows together, one by one and after a rollback. Raises NotRewindable if they differ.

    Raises BadCheckpoint for logits that are not numbers: all comparisons with them would pass.
    `make` returns new targets of the model. The median error counts. Single rows may have a larger one,
    because another expert is chosen at a near tie; a wrong mask or position spoils most rows.
    """
    prompt, rows = [1, 2, 3], [2, 1, 3, 1]  # tokens that every vocabulary has
    kept = 2  # rows that a rollback keeps
    together, alone = make(), make()
    for target in (together, alone):
        target.prefill(prompt)
    block = together.verify(mx.array(rows))
    single = []
    for row in rows:
        single.append(alone.verify(mx.array([row])))
        alone.commit(1)
    together.commit(kept)
    again = together.verify(mx.array(rows[kept:]))
    together.commit(0)
    right = mx.concatenate([*single, *single[kept:]]).astype(mx.float32)
    found = mx.concatenate([block, again]).astype(mx.float32)
    if mx.isnan(right).any():
        raise BadCheckpoint(
            "the logits of this target are not numbers: its weights are damaged, or its activations exceed "
            "their type; download it again, or get it in bfloat16"
        )
    right, found = (mx.where(mx.isinf(logits), 0, logits) for logits in (right, found))  # of banned tokens
    largest = mx.maximum(mx.abs(right).max(axis=-1), 1e-30)  # of weights that are all zeros, 0
    errors = mx.abs(found - right).max(axis=-1) / largest
    error = float(mx.sort(errors)[errors.size // 2])
    if not error <= rounding_of(model):  # nor where it is not a number
        raise NotRewindable(
            "in this target a token depends on those that are read in the same pass (logits differ by "
            f"{error:.1%}): drafts would change its text; use it with mlx-lm"
        )
