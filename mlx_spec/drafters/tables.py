"""The embedding and the LM head that a drafter works with: its own where it brings them, else the target's.

Tokens outside a reduced vocabulary have logits of -inf: their law is 0, which keeps sampling exact.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.errors import BadCheckpoint
from mlx_spec.types import TargetParts


def own_parts(network: nn.Module, parts: TargetParts, vocab_size: int) -> TargetParts:
    """`parts` with the tables of `network` in their place: embed_tokens, lm_head, draft_ids [W]."""
    embed = network.get("embed_tokens", parts.embed)
    unembed = network.get("lm_head", parts.unembed)
    if "draft_ids" in network:
        unembed = widened(unembed, network["draft_ids"], vocab_size)
    return TargetParts(embed, unembed)


def widened(
    unembed: Callable[[mx.array], mx.array], ids: mx.array, vocab_size: int
) -> Callable[[mx.array], mx.array]:
    """`unembed` to logits [T, W] of the tokens `ids` [W] made one to logits [T, V], -inf for all others."""

    def wide(normed: mx.array) -> mx.array:
        logits = unembed(normed)
        empty = mx.full((logits.shape[0], vocab_size), -mx.inf, dtype=logits.dtype)
        return mx.put_along_axis(empty, mx.broadcast_to(ids, logits.shape), logits, axis=-1)

    return wide


def check_vocabulary(path: Path, draft_vocab_size: int, vocab_size: int, tensors: Collection[str]) -> None:
    """Raise BadCheckpoint where the drafter in `path` has a reduced vocabulary and does not say which."""
    if draft_vocab_size != vocab_size and "draft_ids" not in tensors:
        raise BadCheckpoint(
            f"{path} has a vocabulary of {draft_vocab_size} of the target's {vocab_size} tokens "
            "and no 'draft_ids' that say which: convert it again"
        )
