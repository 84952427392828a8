"""Ask a target at load: do several rows of a pass give what single passes give?"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_spec.errors import NotRewindable
from mlx_spec.model.target import LMTarget

PROMPT, ROWS = [1, 2, 3], [2, 1, 3, 1]  # tokens that every vocabulary has
KEPT = 2  # rows that a rollback keeps
# The error of logits or states that rounding explains, as a share of the largest value: with float32 weights,
# and with others.
MAX_EXACT_ERROR, MAX_ROUNDED_ERROR = 0.01, 0.05


def rounding_of(model: nn.Module) -> float:
    """Return the largest error that rounding explains in a model."""
    weights = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    types = {array.dtype for _, array in weights}
    return MAX_ROUNDED_ERROR if types & {mx.bfloat16, mx.float16} else MAX_EXACT_ERROR


def check_rows(model: nn.Module, make: Callable[[], LMTarget]) -> None:
    """Verify rows together, one by one and after a rollback. Raises NotRewindable if they differ.

    `make` returns new targets of the model. The median error counts: single rows may have more, because
    another expert is chosen at a near tie, while a wrong mask or position spoils most rows.
    """
    together, alone = make(), make()
    for target in (together, alone):
        target.prefill(PROMPT)
    block = together.verify(mx.array(ROWS))
    single = []
    for row in ROWS:
        single.append(alone.verify(mx.array([row])))
        alone.commit(1)
    together.commit(KEPT)
    again = together.verify(mx.array(ROWS[KEPT:]))
    together.commit(0)
    right = mx.concatenate([*single, *single[KEPT:]]).astype(mx.float32)
    found = mx.concatenate([block, again]).astype(mx.float32)
    right, found = (mx.where(mx.isinf(logits), 0, logits) for logits in (right, found))  # of banned tokens
    errors = mx.abs(found - right).max(axis=-1) / mx.abs(right).max(axis=-1)
    error = float(mx.sort(errors)[errors.size // 2])
    if error > rounding_of(model):
        raise NotRewindable(
            "in this target a token depends on those that are read in the same pass (logits differ by "
            f"{error:.1%}): drafts would change its text; use it with mlx-lm"
        )
