"""EAGLE-3 (arXiv:2503.01840): a layer of its own over three of the target's, and a reduced vocabulary.

Tokens outside the drafter's vocabulary have logits of -inf: their law is 0, which keeps sampling exact. What
the target says is never restricted to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_spec.drafters.conditioned import Conditioned, check_conventions
from mlx_spec.drafters.context import check_capture
from mlx_spec.drafters.eagle3_network import Eagle3Config, Eagle3Network
from mlx_spec.drafters.recorded import LAYERS, check_target, shift_norms
from mlx_spec.drafters.weights import load_weights, read_tensors
from mlx_spec.errors import BadCheckpoint
from mlx_spec.types import FeatureSpec, TargetParts


@dataclass(frozen=True)
class Eagle3Source:
    """One loaded drafter, shared by all sequences."""

    network: Eagle3Network
    needs: FeatureSpec
    vocab_size: int
    position_offset: int = 0
    name: str = "eagle3"

    def make(self, parts: TargetParts) -> Conditioned:
        """The drafter of one sequence."""
        network = self.network
        embed = network.embed_tokens if "embed_tokens" in network else parts.embed
        unembed = network.logits if "lm_head" in network else parts.unembed
        if "draft_ids" in network:
            unembed = widened(unembed, network.draft_ids, self.vocab_size)
        own = TargetParts(embed, unembed)
        return Conditioned(network, own, self.needs, position_offset=self.position_offset)


def widened(
    unembed: Callable[[mx.array], mx.array], ids: mx.array, vocab_size: int
) -> Callable[[mx.array], mx.array]:
    """`unembed` to logits [T, W] of the tokens `ids` [W] made one to logits [T, V], -inf for all others."""

    def wide(normed: mx.array) -> mx.array:
        logits = unembed(normed)
        empty = mx.full((logits.shape[0], vocab_size), -mx.inf, dtype=logits.dtype)
        return mx.put_along_axis(empty, mx.broadcast_to(ids, logits.shape), logits, axis=-1)

    return wide


def open_eagle3(path: Path, config: Mapping[str, Any], target_config: Mapping[str, Any]) -> Eagle3Source:
    """Load the checkpoint in `path`. Raises Mismatch where it is not made for the target, BadCheckpoint."""
    text = target_config.get("text_config") or target_config
    names = read_tensors(path).keys()
    found = Eagle3Config.from_dict(config, names, text.get("max_position_embeddings"))
    check_conventions(found.recorded, (LAYERS,))
    check_target(config, target_config)
    check_capture(found.recorded.capture, config)
    if found.draft_vocab_size != found.vocab_size and "draft_ids" not in found.tensors:
        raise BadCheckpoint(
            f"{path} has a vocabulary of {found.draft_vocab_size} of the target's {found.vocab_size} tokens "
            "and no 'draft_ids' that say which: convert it again"
        )
    network = Eagle3Network(found)
    load_weights(network, path)
    shift_norms(network, found.recorded.norm_offset)
    needs = FeatureSpec(hidden_layers=found.recorded.capture)
    return Eagle3Source(network, needs, found.vocab_size, found.recorded.position_offset)
