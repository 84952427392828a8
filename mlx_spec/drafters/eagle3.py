"""EAGLE-3 (arXiv:2503.01840) and P-EAGLE (arXiv:2602.01469): layers over three hidden states of the target.

The first layer reads an embedding beside its hidden state. EAGLE-3 drafts token by token on its own output.
P-EAGLE drafts K tokens in one pass. Rows of tokens that are not drafted yet pair a trained feature with the
mask token. A reduced vocabulary restricts drafts only, never the target's own tokens.

Source: SafeAILab/EAGLE `cnets.py`, speculators. Parameter names are those that the converter writes.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.checkpoint.config import Checkpoint
from mlx_spec.checkpoint.targets import Config
from mlx_spec.drafters.checkpoint import CONFIG, LAYERS, POST_NORM, Count, Size, mask_token, required
from mlx_spec.drafters.conditioned import ConditionedDrafter, DrafterCache, check_conventions, network_source
from mlx_spec.drafters.drafter import DrafterSource, draw_rows
from mlx_spec.drafters.layers import (
    LAYER_CONFIG,
    DrafterAttention,
    DrafterLayer,
    LayerConfig,
    add_tables,
    load_layers,
)
from mlx_spec.types import Draft, FeatureSpec, Sampler, TargetParts


class Eagle3Network(nn.Module):
    """Maps an embedding and fused features, or its own hidden state, to the next hidden state."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        width, eps, written = config.hidden_size, config.rms_norm_eps, config.written
        inputs = len(config.conventions.capture)
        theirs = required(written, "target_hidden_size", Size, CONFIG)
        layer = {"num_hidden_layers": 1, **written["layer_config"]}
        depth = required(layer, "num_hidden_layers", Count, LAYER_CONFIG)
        self._post_norm = config.conventions.chain == POST_NORM
        self.fc = nn.Linear(inputs * theirs, width, bias=False)
        if required(written, "norm_before_fc", bool, CONFIG):
            self.input_norm = nn.RMSNorm(inputs * theirs, eps=eps)
        if required(written, "fc_norm", bool, CONFIG):
            self.fc_norm = [nn.RMSNorm(theirs, eps=eps) for _ in range(inputs)]
        first = _FirstLayer(config, _Attention(config, 2 * width, "layers.0.self_attn"))
        others = (_Attention(config, width, "layers.1.self_attn") for _ in range(1, depth))
        self.layers = [first, *(DrafterLayer(config, attention) for attention in others)]
        self.norm = nn.RMSNorm(width, eps=eps)
        if "mask_token_id" in written:  # P-EAGLE: the feature of rows whose token is not known
            self.mask_hidden = mx.zeros(inputs * theirs)
        add_tables(self, config.tensors, width, config.vocab_size, config.draft_vocab_size)

    def fuse(self, features: mx.array) -> mx.array:
        """Project the captured layers, side by side [T, F], to [T, D]."""
        features = features.astype(self.norm.weight.dtype)
        if "input_norm" in self:
            features = self.input_norm(features)
        if "fc_norm" in self:
            layers = mx.split(features, len(self.fc_norm), axis=-1)
            features = mx.concatenate([n(p) for n, p in zip(self.fc_norm, layers, strict=True)], axis=-1)
        return self.fc(features)

    def __call__(
        self, embedded: mx.array, hidden: mx.array, caches: list[DrafterCache]
    ) -> tuple[mx.array, mx.array]:
        """Return the hidden state for the next step and the final norm's output, [T, D] each."""
        first, *rest = self.layers
        first_cache, *others = caches
        x = first.read(embedded.astype(self.norm.weight.dtype)[None], hidden[None], first_cache)
        for layer, cache in zip(rest, others, strict=True):
            x = layer(x, cache)
        normed: mx.array = self.norm(x)[0]
        return normed if self._post_norm else x[0], normed

    @classmethod
    def open(cls, checkpoint: Checkpoint, config: Config, target_config: Config) -> DrafterSource:
        network, sizes = load_layers(cls, checkpoint, config, target_config)
        name, needs, vocab = config["model_type"], FeatureSpec(sizes.conventions.capture), sizes.vocab_size
        if name == "peagle":
            return network_source(name, network, needs, vocab, PEagle, mask_token(config, vocab))
        check_conventions(sizes.conventions, (LAYERS,))
        return network_source(name, network, needs, vocab)


class _FirstLayer(DrafterLayer):
    """The layer that also reads an embedding."""

    def __init__(self, config: LayerConfig, attention: nn.Module) -> None:
        super().__init__(config, attention)
        self._normed_residual = required(config.written, "norm_before_residual", bool, CONFIG)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def read(self, embedded: mx.array, hidden: mx.array, cache: DrafterCache) -> mx.array:
        """Run it on an embedding and a hidden state, [1, T, D] each."""
        normed = self.hidden_norm(hidden)
        x = mx.concatenate([self.input_layernorm(embedded), normed], axis=-1)
        return self.finish(normed if self._normed_residual else hidden, self.self_attn(x, cache))


class _Attention(DrafterAttention):
    def __init__(self, config: LayerConfig, inputs: int, name: str) -> None:
        super().__init__(config, inputs, name, normed=f"{name}.q_norm.weight" in config.tensors)

    def __call__(self, x: mx.array, cache: DrafterCache) -> mx.array:
        mask, position = cache.mask(x.shape[1]), cache.offset
        return self.attend(self.queries(x, position), *self.append(x, cache, position), mask)


class PEagle(ConditionedDrafter):
    """Drafts for one sequence, K tokens in one pass. Its caches never keep rows of masks."""

    def __init__(self, network: Eagle3Network, parts: TargetParts, needs: FeatureSpec, mask: int) -> None:
        super().__init__(network, parts, needs)
        self._mask = mask  # token of the rows that are not drafted yet

    def process(self, rows: mx.array, tokens: list[int]) -> None:
        self._run(rows, tokens)

    def draft_next(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        rows, tokens = self._next_rows(self._num_waiting)
        masks = mx.broadcast_to(self._network.mask_hidden, (limit - 1, rows.shape[1]))
        normed = self._run(mx.concatenate([rows, masks]), [*tokens, *[self._mask] * (limit - 1)])
        self._mark_written(len(tokens) - 1)  # the next draft runs the newest row again
        return draw_rows(self._parts.unembed(normed[-limit:]), history, sampler)

    def _run(self, rows: mx.array, tokens: list[int]) -> mx.array:
        embedded = self._parts.embed(mx.array(tokens, dtype=mx.int32))
        normed: mx.array = self._network(embedded, self._network.fuse(rows), self._caches)[1]
        return normed
