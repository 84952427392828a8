"""The convention of norm weights, told from their values.

Some families store w and multiply by 1 + w; converters fold the 1 in, forget it, or do it twice. Trained
weights stay close enough to their start (0, folded 1, twice 2) for the median of a group to tell which it is.
Folded weights have the precision of the checkpoint. In bfloat16 that is 1 in 256, to which the output of a
norm is rounded anyway, and what mlx-lm does to the norms of a target; `--dtype float32` folds without loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import mlx.core as mx
import numpy as np

from mlx_spec.checkpoint import shortened
from mlx_spec.errors import BadCheckpoint

FOLDED, TWICE = 0.5, 1.5  # medians from which on the 1 is in the weights, and in them twice


def fold(
    title: str, tensors: Mapping[str, mx.array], groups: Mapping[str, Iterable[str]]
) -> tuple[dict[str, mx.array], tuple[str, ...]]:
    """The norm weights of `groups` with their 1 folded in, and a note for each group.

    A group is what converters treat alike. Raises BadCheckpoint where the 1 was folded in twice.
    """
    folded: dict[str, mx.array] = {}
    notes = []
    for group, names in groups.items():
        present = [name for name in names if name in tensors]
        middle = median([tensors[name] for name in present])
        if middle >= TWICE:
            raise BadCheckpoint(
                f"{title} has norm weights around {middle:.1f} ({shortened(present)}), where 0 or 1 belongs: "
                "the 1 of their (1 + w) was added twice; convert it from the original repository"
            )
        missing = middle < FOLDED
        folded |= {name: tensors[name] + 1 if missing else tensors[name] for name in present}
        precision = str(tensors[present[0]].dtype).removeprefix("mlx.core.")
        done = f"zero-centred, 1 folded in, in {precision}" if missing else "plain, kept"
        notes.append(f"norm weights of the {group}: median {middle:.2f}, {done}")
    return folded, tuple(notes)


def median(weights: Iterable[mx.array]) -> float:
    """The median of the medians of `weights`."""
    return float(np.median([np.median(np.array(weight.astype(mx.float32))) for weight in weights]))
