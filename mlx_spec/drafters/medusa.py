"""Medusa (arXiv:2401.10774): K heads on the hidden state that the target's LM head reads.

Head k looks at the position before the pending token and guesses the k-th token after it. The heads do not
see each other's guesses. A draft is the likeliest token of each head, or a small tree of likely ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.drafters.checkpoint import (
    CONFIG,
    POST_NORM,
    PRE_NORM,
    Conventions,
    check_target,
    load_weights,
    read_tensors,
    required,
)
from mlx_spec.drafters.drawing import SequenceDrafter
from mlx_spec.errors import BadCheckpoint
from mlx_spec.model.tree import Tree
from mlx_spec.types import Draft, Features, FeatureSpec, Sampler, TargetParts, no_draft

# The hidden states of a prompt are not worth their memory: the first token comes without a draft.
NEEDS = {
    POST_NORM: FeatureSpec(final_hidden=True, prompt=False),
    PRE_NORM: FeatureSpec(hidden_layers=(-1,), prompt=False),
}


@dataclass(frozen=True)
class MedusaConfig:
    """The sizes of the heads."""

    num_heads: int
    num_layers: int  # residual blocks a head
    hidden_size: int
    vocab_size: int
    biased: bool  # True if the blocks have biases


class MedusaNetwork(nn.Module):
    """All heads."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.heads = [_Head(config) for _ in range(config.num_heads)]

    def __call__(self, hidden: mx.array, limit: int) -> mx.array:
        """Return logits [K, V] of the first `limit` heads for a hidden state [1, D]."""
        return mx.concatenate([head(hidden) for head in self.heads[:limit]])


class _Head(nn.Module):
    """Residual blocks and an LM head."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.layers = [nn.Linear(size, size, bias=config.biased) for _ in range(config.num_layers)]
        self.lm_head = nn.Linear(size, config.vocab_size, bias=False)

    def __call__(self, hidden: mx.array) -> mx.array:
        for layer in self.layers:
            hidden = hidden + nn.silu(layer(hidden))
        logits: mx.array = self.lm_head(hidden)
        return logits


class Medusa(SequenceDrafter):
    """Drafts one sequence: a chain, or the tree that `tree` returns if it fits the limit.

    Keeps the newest hidden state of the target and nothing else.
    """

    def __init__(
        self, network: MedusaNetwork, needs: FeatureSpec, tree: Callable[[], Tree | None] = lambda: None
    ) -> None:
        self.needs = needs
        self._network = network
        self._tree = tree
        self._hidden: mx.array | None = None  # [1, D], of the position before the pending token
        self._length = 0  # of the history that it belongs to

    def with_trees(self, tree: Callable[[], Tree | None]) -> Medusa:
        """Return a drafter with the same heads that asks `tree` for the shape of every draft."""
        return Medusa(self._network, self.needs, tree)

    def observe(self, history: Sequence[int], features: Features) -> None:
        """Keep the newest row of `features`, of the position before the last token of `history`."""
        hidden = features.hidden[0] if features.hidden else features.final_hidden
        self._hidden = None if hidden is None else hidden[-1:]
        self._length = len(history)

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """Return the likeliest tokens of the heads; none if the hidden state is not that of `history`."""
        if limit < 1 or self._hidden is None or self._length != len(history):
            return no_draft()
        tree = self._tree()
        if tree is None or limit < len(tree.parents):
            return Draft(self._network(self._hidden, limit).argmax(axis=-1).astype(mx.int32))
        ranked = _likeliest(self._network(self._hidden, tree.height), max(tree.ranks) + 1)
        depths, ranks = mx.array(tree.depths[1:]), mx.array(tree.ranks[1:])
        return Draft(ranked[depths - 1, ranks], parents=tree.parents)


def _likeliest(logits: mx.array, count: int) -> mx.array:
    """Return the `count` likeliest tokens [K, count] of each row, the likeliest first."""
    tokens = mx.argpartition(-logits, count - 1, axis=-1)[:, :count]
    order = mx.argsort(-mx.take_along_axis(logits, tokens, axis=-1), axis=-1)
    return mx.take_along_axis(tokens, order, axis=-1).astype(mx.int32)


@dataclass(frozen=True)
class MedusaSource:
    """Loaded heads, shared by all sequences."""

    network: MedusaNetwork
    needs: FeatureSpec
    vocab_size: int
    name: str = "medusa"

    @property
    def height(self) -> int:
        """Return the number of tokens on the longest path of a tree."""
        return len(self.network.heads)

    def make(self, parts: TargetParts) -> Medusa:
        """Return the drafter of one sequence."""
        return Medusa(self.network, self.needs)


def open_medusa(path: Path, config: Mapping[str, Any], target_config: Mapping[str, Any]) -> MedusaSource:
    """Load converted heads. Raises BadCheckpoint, and Mismatch if they are made for another target."""
    conventions = Conventions.from_config(config)
    if conventions.hidden not in NEEDS:
        raise BadCheckpoint(
            f"{CONFIG} records hidden {conventions.hidden!r}, Medusa heads read {', '.join(NEEDS)}"
        )
    check_target(config, target_config)
    target = config["target"]
    sizes = MedusaConfig(
        num_heads=required(config, "num_heads", int, CONFIG),
        num_layers=required(config, "num_layers", int, CONFIG),
        hidden_size=target["hidden_size"],
        vocab_size=target["vocab_size"],
        biased="heads.0.layers.0.bias" in read_tensors(path),
    )
    network = MedusaNetwork(sizes)
    load_weights(network, path)
    return MedusaSource(network, NEEDS[conventions.hidden], sizes.vocab_size)
