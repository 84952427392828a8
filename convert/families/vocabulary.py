"""The reduced vocabulary of a drafter: which token of the target each of its ids stands for."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_spec.errors import BadCheckpoint, Mismatch

INVERSE = "the inverse of d2t, checked against it"
Ids = NDArray[np.int64]


def draft_ids(title: str, d2t: mx.array, t2d: mx.array | None, vocab_size: int) -> tuple[mx.array, str]:
    """[draft vocabulary] int32, the target's id of each draft id, and a note. Checked against `t2d`.

    Checkpoints store offsets (id + d2t[id], the reference's way) and rarely ids. Raises BadCheckpoint where
    neither reading gives distinct ids that t2d marks, Mismatch for ids outside the target's vocabulary.
    """
    stored = np.array(d2t, dtype=np.int64)
    marks = None if t2d is None else np.flatnonzero(np.array(t2d))
    for ids, note in ((stored + np.arange(stored.size), "d2t holds offsets"), (stored, "d2t holds ids")):
        if _fits(ids, marks):
            _check_range(title, ids, vocab_size)
            return mx.array(ids.astype(np.int32)), note
    theirs = "" if marks is None else f", or not the {marks.size} that t2d marks"
    raise BadCheckpoint(
        f"{title} has a d2t of {stored.size} entries that names some token twice{theirs}: "
        "download it again, or take another checkpoint"
    )


def _fits(ids: Ids, marks: Ids | None) -> bool:
    """Whether `ids` are distinct and, where they are known, those that t2d marks."""
    distinct = np.unique(ids)
    return distinct.size == ids.size and (marks is None or np.array_equal(distinct, marks))


def _check_range(title: str, ids: Ids, vocab_size: int) -> None:
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= vocab_size:
        raise Mismatch(
            f"{title} drafts the tokens {lowest} to {highest}, the target knows {vocab_size}: "
            "use the drafter made for this target"
        )
