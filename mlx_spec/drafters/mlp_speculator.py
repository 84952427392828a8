"""MLP speculator (arXiv:2404.19124) and its LSTM variant: a small network drafts token by token.

Its first state is the hidden state that the target's LM head reads, of the position before the pending token.
A step projects the state, adds the embedding of the newest token, norms the sum, and its head predicts the
next token. Steps that are tied share their weights; only the first projection is always its own.

Source: foundation-model-stack/fms-extras `MLPSpeculator`; ArcticInference `ArcticLSTMSpeculator`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.checkpoint.config import Checkpoint
from mlx_spec.checkpoint.targets import Config
from mlx_spec.drafters.checkpoint import (
    CONFIG,
    POST_NORM,
    Conventions,
    Count,
    Size,
    check_target,
    load_weights,
    read_fields,
    required,
)
from mlx_spec.drafters.drafter import DraftBuilder, DrafterSource
from mlx_spec.errors import BadCheckpoint
from mlx_spec.types import Draft, Drafter, Features, FeatureSpec, Sampler, no_draft

EPS = 1e-6
Memory = tuple[mx.array, mx.array]  # the state that a head reads, and the cell of an LSTM, [1, I] each


@dataclass(frozen=True)
class SpeculatorSizes:
    """The sizes in config.json."""

    hidden_size: Size  # D, the target's
    vocab_size: Size
    inner_size: Size  # I
    steps: Count
    tied: bool
    scaled: bool  # the first state is normed and divided by the root of 2

    @classmethod
    def from_config(cls, config: Config) -> SpeculatorSizes:
        """Read config.json of a converted drafter. Raises BadCheckpoint."""
        return read_fields(cls, {**config, **required(config, "target", dict, CONFIG)}, CONFIG)


class MLPSpeculatorNetwork(nn.Module):
    """All steps. Parameters have the converter's names; tied steps are stored once."""

    gates: ClassVar[int] = 1  # parts of a projection, of the inner size each

    def __init__(self, sizes: SpeculatorSizes) -> None:
        super().__init__()
        inner, vocab, steps = sizes.inner_size, sizes.vocab_size, sizes.steps
        count, projected = (1, min(2, steps)) if sizes.tied else (steps, steps)
        inputs = [sizes.hidden_size, *[inner] * (projected - 1)]
        self.emb = [nn.Embedding(vocab, inner) for _ in range(count)]
        self.proj = [nn.Linear(size, self.gates * inner, bias=False) for size in inputs]
        self.ln = [ShiftedNorm(inner) for _ in range(count)]
        self.head = [nn.Linear(inner, vocab, bias=False) for _ in range(count)]
        self.steps, self._scaled = steps, sizes.scaled
        kept = 0.5 ** (0.5 / steps)  # the first state is half of the last one
        self._weight = math.sqrt((1 - kept**2) * inner / 2) / kept  # of an embedding

    def begin(self, hidden: mx.array) -> Memory:
        """Return the memory before the first step for a hidden state [1, D] of the target."""
        hidden = hidden.astype(self.ln[0].weight.dtype)
        first = mx.fast.rms_norm(hidden, None, EPS) / math.sqrt(2) if self._scaled else hidden
        return first, mx.zeros((1, self.ln[0].weight.size), dtype=first.dtype)

    def __call__(self, step: int, memory: Memory, token: mx.array) -> tuple[mx.array, Memory]:
        """Return logits [1, V] after `token` [1], and the memory for the next step."""
        index = min(step, len(self.emb) - 1)
        embedded = mx.tile(self.emb[index](token), (1, self.gates))
        mixed = self.proj[min(step, len(self.proj) - 1)](memory[0]) + self._weight * embedded
        memory = self.next_memory(mixed, memory[1], index)
        return self.head[index](memory[0]), memory

    def next_memory(self, mixed: mx.array, cell: mx.array, index: int) -> Memory:
        """Return the memory after a step, from the sum of its projected state and its embedded token."""
        return nn.gelu(self.ln[index](mixed)), cell

    @staticmethod
    def open(checkpoint: Checkpoint, config: Config, target_config: Config) -> DrafterSource:
        if (hidden := Conventions.from_config(config).hidden) != POST_NORM:
            raise BadCheckpoint(f"{CONFIG} records hidden {hidden!r}, MLP speculators read {POST_NORM!r}")
        check_target(config, target_config)
        name = config["model_type"]
        network = NETWORKS[name](SpeculatorSizes.from_config(config))
        load_weights(network, checkpoint)
        return DrafterSource(name, MLPSpeculator.needs, lambda parts: MLPSpeculator(network), network)


class LSTMSpeculatorNetwork(MLPSpeculatorNetwork):
    """Steps with a cell: a projection makes the forget, input and output gates and the candidate."""

    gates: ClassVar[int] = 4

    def __init__(self, sizes: SpeculatorSizes) -> None:
        super().__init__(sizes)
        self.cell_ln = [ShiftedNorm(sizes.inner_size) for _ in self.ln]

    def next_memory(self, mixed: mx.array, cell: mx.array, index: int) -> Memory:
        forget, remember, out, candidate = mx.split(mixed, 4, axis=-1)
        cell = cell * mx.sigmoid(forget) + nn.gelu(self.cell_ln[index](candidate)) * mx.sigmoid(remember)
        return nn.gelu(self.ln[index](cell)) * mx.sigmoid(out), cell


class ShiftedNorm(nn.Module):
    """An RMS norm with a bias."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = mx.ones(size), mx.zeros(size)

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weight, EPS) + self.bias


class MLPSpeculator(Drafter):
    """Drafts for one sequence. Keeps the newest hidden state of the target."""

    needs = FeatureSpec(final_hidden=True, prompt_hidden=False)  # the first token comes without a draft

    def __init__(self, network: MLPSpeculatorNetwork) -> None:
        self._network = network
        self._hidden: mx.array | None = None  # [1, D], of the position before the pending token
        self._length = 0  # of the history that it belongs to

    def observe(self, history: Sequence[int], features: Features) -> None:
        hidden = features.final_hidden
        self._hidden = None if hidden is None else hidden[-1:]
        self._length = len(history)

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """Return one token for each step; none if the hidden state belongs to another history."""
        if limit < 1 or self._hidden is None or self._length != len(history):
            return no_draft()
        memory, token = self._network.begin(self._hidden), mx.array([history[-1]], dtype=mx.int32)
        builder = DraftBuilder(history, sampler)
        for step in range(min(limit, self._network.steps)):
            logits, memory = self._network(step, memory, token)
            token = builder.draw(logits)
        return builder.draft()


NETWORKS = {"mlp_speculator": MLPSpeculatorNetwork, "lstm_speculator": LSTMSpeculatorNetwork}
