"""Medusa (arXiv:2401.10774): K heads on the hidden state that the target's LM head reads.

Head k looks at the position before the pending token and guesses the k-th token after it. The heads do not
see each other's guesses; a draft is the likeliest token of each, or a small tree of their likeliest ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.drafters.chain import largest_probability
from mlx_spec.drafters.recorded import POST, PRE, WHERE, Recorded, check_target
from mlx_spec.drafters.weights import load_weights, read_tensors, required
from mlx_spec.errors import BadCheckpoint
from mlx_spec.model.tree import Tree
from mlx_spec.types import Draft, Features, FeatureSpec, Sampler, TargetParts, no_draft

# The hidden states of a prompt are not worth their memory: the first token comes without a draft.
NEEDS = {
    POST: FeatureSpec(final_hidden=True, prompt=False),
    PRE: FeatureSpec(hidden_layers=(-1,), prompt=False),
}


@dataclass(frozen=True)
class MedusaConfig:
    """Sizes of the heads."""

    num_heads: int
    num_layers: int  # residual blocks a head
    hidden_size: int
    vocab_size: int
    biased: bool  # whether the blocks have biases


class Head(nn.Module):
    """Residual blocks and an LM head."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.layers = [nn.Linear(size, size, bias=config.biased) for _ in range(config.num_layers)]
        self.lm_head = nn.Linear(size, config.vocab_size, bias=False)

    def __call__(self, hidden: mx.array) -> mx.array:
        """[1, D] -> logits [1, V]."""
        for layer in self.layers:
            hidden = hidden + nn.silu(layer(hidden))
        logits: mx.array = self.lm_head(hidden)
        return logits


class MedusaNetwork(nn.Module):
    """All heads."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.heads = [Head(config) for _ in range(config.num_heads)]

    def __call__(self, hidden: mx.array, limit: int) -> mx.array:
        """Hidden [1, D] -> logits [K, V] of the first `limit` heads."""
        return mx.concatenate([head(hidden) for head in self.heads[:limit]])


class Medusa:
    """Drafts one sequence. Remembers the newest hidden state and nothing else."""

    def __init__(self, network: MedusaNetwork, needs: FeatureSpec) -> None:
        self.needs = needs
        self._network = network
        self._hidden: mx.array | None = None  # [1, D], of the position before the pending token
        self._length = 0  # of the history it belongs to

    def observe(self, history: Sequence[int], features: Features) -> None:
        """The newest row of `features` belongs to the position before the last of `history`."""
        hidden = features.hidden[0] if features.hidden else features.final_hidden
        self._hidden = None if hidden is None else hidden[-1:]
        self._length = len(history)

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """As many tokens as there are heads; none where the hidden state is not that of `history`."""
        logits = self.logits(history, limit)
        if logits is None:
            return no_draft()
        return Draft(logits.argmax(axis=-1).astype(mx.int32), confidence=largest_probability(logits))

    def logits(self, history: Sequence[int], limit: int) -> mx.array | None:
        """[K, V] of the first `limit` heads; None where the hidden state is not that of `history`."""
        if limit < 1 or self._hidden is None or self._length != len(history):
            return None
        return self._network(self._hidden, limit)


class MedusaTree:
    """A `Medusa` that drafts a small tree where one is asked for."""

    def __init__(self, medusa: Medusa, asked: Callable[[], Tree | None]) -> None:
        self.needs = medusa.needs
        self._medusa = medusa
        self._asked = asked

    def observe(self, history: Sequence[int], features: Features) -> None:
        """As it does."""
        self._medusa.observe(history, features)

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """The tree, its guesses the likeliest tokens of a head; a chain where none fits the limit."""
        tree = self._asked()
        if tree is None or limit < len(tree.parents):
            return self._medusa.draft(history, limit, sampler)
        logits = self._medusa.logits(history, tree.height)
        if logits is None:
            return no_draft()
        ranked = _likeliest(logits, max(tree.ranks) + 1)
        depths, ranks = mx.array(tree.depths[1:]), mx.array(tree.ranks[1:])
        return Draft(ranked[depths - 1, ranks], parents=tree.parents)


def _likeliest(logits: mx.array, count: int) -> mx.array:
    """The `count` likeliest tokens [K, count] of each row, the likeliest first."""
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

    def make(self, parts: TargetParts) -> Medusa:
        """The drafter of one sequence."""
        return Medusa(self.network, self.needs)

    @property
    def height(self) -> int:
        """Tokens of the longest path of a tree."""
        return len(self.network.heads)


def open_medusa(path: Path, config: Mapping[str, Any], target_config: Mapping[str, Any]) -> MedusaSource:
    """Load converted heads. Raises BadCheckpoint, and Mismatch where they are made for another target."""
    record = Recorded.from_config(config)
    if record.hidden not in NEEDS:
        raise BadCheckpoint(f"{WHERE} records hidden {record.hidden!r}, Medusa heads read {', '.join(NEEDS)}")
    check_target(config, target_config)
    target = config["target"]
    sizes = MedusaConfig(
        num_heads=required(config, "num_heads", int, WHERE),
        num_layers=required(config, "num_layers", int, WHERE),
        hidden_size=target["hidden_size"],
        vocab_size=target["vocab_size"],
        biased="heads.0.layers.0.bias" in read_tensors(path),
    )
    network = MedusaNetwork(sizes)
    load_weights(network, path)
    return MedusaSource(network, NEEDS[record.hidden], sizes.vocab_size)
