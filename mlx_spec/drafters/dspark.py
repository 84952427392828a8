"""DSpark (arXiv:2607.05147): DFlash with a bias of low rank on each slot, computed from the token before.

The first slot drafts as well. The backbone has the layers of Qwen3 or of Gemma 4. The head that estimates
acceptance is not used: the policy measures acceptance.

Source: deepseek-ai/DeepSpec `modeling/dspark`; speculators 0.9 `models/dspark` for reduced vocabularies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.drafters.checkpoint import CONFIG, Size, required, widened
from mlx_spec.drafters.conditioned import DrafterCache
from mlx_spec.drafters.dflash import BlockAttention, DFlashNetwork, View
from mlx_spec.drafters.layers import DrafterLayer, Gemma4Layer, LayerConfig


class MarkovHead(nn.Module):
    """A bias that depends on the token before only ("vanilla")."""

    def __init__(self, config: LayerConfig, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)

    def __call__(
        self, hidden: mx.array, before: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """Return the bias [1, W] of a slot, and the state for the next one."""
        return self.markov_w2(self.markov_w1(before)), None


class GatedMarkovHead(MarkovHead):
    """The hidden state of the slot also gates the bias."""

    def __init__(self, config: LayerConfig, rank: int) -> None:
        super().__init__(config, rank)
        self.gate_proj = nn.Linear(config.hidden_size + rank, rank)

    def __call__(
        self, hidden: mx.array, before: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        embedded = self.markov_w1(before)
        gate = mx.sigmoid(self.gate_proj(mx.concatenate([hidden, embedded], axis=-1)))
        return self.markov_w2(gate * embedded), None


class RecurrentMarkovHead(MarkovHead):
    """A state runs along the slots ("rnn")."""

    def __init__(self, config: LayerConfig, rank: int) -> None:
        super().__init__(config, rank)
        self.joint_proj = nn.Linear(2 * rank + config.hidden_size, 3 * rank)

    def __call__(
        self, hidden: mx.array, before: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        embedded = self.markov_w1(before)
        state = mx.zeros_like(embedded) if state is None else state
        joint = self.joint_proj(mx.concatenate([state, embedded, hidden], axis=-1))
        gate, candidate, out = mx.split(joint, 3, axis=-1)
        gate = mx.sigmoid(gate)
        return self.markov_w2(mx.tanh(out)), gate * state + (1 - gate) * mx.tanh(candidate)


class DSparkNetwork(DFlashNetwork):
    """DSpark with layers of Qwen3. Parameters have the converter's names."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__(config)
        heads = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RecurrentMarkovHead}
        name = required(config.written, "markov_head_type", Literal[*heads], CONFIG)
        self.markov_head = heads[name](config, required(config.written, "markov_rank", Size, CONFIG))
        self._vocab_size = config.vocab_size

    def follow(
        self, hidden: mx.array, logits: mx.array, before: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        bias, state = self.markov_head(hidden, before, state)
        if "draft_ids" in self:
            bias = widened(bias, self.draft_ids, self._vocab_size)
        return logits + bias, state


class Gemma4DSparkNetwork(DSparkNetwork):
    """DSpark with layers of Gemma 4."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__(config)
        # The target's embeddings come scaled; its own table has to be scaled here.
        self._scale = config.hidden_size**0.5 if "embed_tokens" in self else 1.0

    def make_layer(self, config: LayerConfig, index: int, view: View) -> DrafterLayer:
        return Gemma4Layer(config, Gemma4BlockAttention(config, index, view))

    def __call__(self, embedded: mx.array, caches: Sequence[DrafterCache]) -> mx.array:
        return super().__call__(embedded * self._scale, caches)


class Gemma4BlockAttention(BlockAttention):
    """Values are normed without weights; without `v_proj` they are the keys before their norm."""

    def __init__(self, config: LayerConfig, index: int, view: View) -> None:
        super().__init__(config, index, view)
        self._scale, self._eps = 1.0, config.rms_norm_eps
        if f"layers.{index}.self_attn.v_proj.weight" not in config.tensors:
            del self.v_proj

    def append(self, x: mx.array, cache: DrafterCache, position: int) -> tuple[mx.array, mx.array]:
        keys = self.k_proj(x)
        values = self._split(self.v_proj(x) if "v_proj" in self else keys, self._groups)
        turned = self._rope(self.k_norm(self._split(keys, self._groups)), offset=position)
        return cache.update_and_fetch(turned, mx.fast.rms_norm(values, None, self._eps))
