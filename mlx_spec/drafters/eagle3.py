"""EAGLE-3 (arXiv:2503.01840) and P-EAGLE (arXiv:2602.01469): layers over three hidden states of the target.

The first layer reads an embedding beside its hidden state. EAGLE-3 drafts token by token on its own output.
P-EAGLE drafts K tokens in one pass: rows of tokens that are not drafted yet pair a trained feature with the
mask token. A reduced vocabulary restricts drafts only, never the target's own tokens.

Source: SafeAILab/EAGLE `cnets.py`, speculators. Parameter names are those that the converter writes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3 import MLP

from mlx_spec.drafters.checkpoint import (
    CONFIG,
    LAYERS,
    POST_NORM,
    Conventions,
    Rope,
    check_target,
    layer_config,
    load_converted,
    read_tensors,
    required,
)
from mlx_spec.drafters.conditioned import (
    ChainNetwork,
    ConditionedDrafter,
    Rows,
    chain_source,
    check_conventions,
    network_source,
)
from mlx_spec.drafters.drawing import DrafterSource, draw_rows
from mlx_spec.drafters.layers import DrafterAttention, LayerConfig, add_tables, layer_sizes
from mlx_spec.hub.checkpoint import text_config
from mlx_spec.types import Draft, FeatureSpec, Sampler, TargetParts, no_draft


@dataclass(frozen=True)
class Eagle3Config(LayerConfig):
    """The sizes of a drafter and its switches."""

    target_hidden_size: int
    num_hidden_layers: int
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    conventions: Conventions

    @classmethod
    def from_dict(
        cls, config: Mapping[str, Any], tensors: Collection[str], max_positions: int | None = None
    ) -> Eagle3Config:
        """Read config.json. Raises BadCheckpoint for a missing key and an unsupported value.

        `tensors` are the names in the checkpoint, `max_positions` is the length of the target's context.
        """
        layer, conventions = layer_config(config), Conventions.from_config(config)
        names = ("norm_before_residual", "norm_before_fc", "fc_norm")
        switches: dict[str, Any] = {key: required(config, key, bool, CONFIG) for key in names}
        return cls(
            **layer_sizes(config, tensors),
            **switches,
            rope=_rope(config, layer, max_positions, own=conventions.rope == "own"),
            target_hidden_size=required(config, "target_hidden_size", int, CONFIG),
            num_hidden_layers=layer.get("num_hidden_layers") or 1,
            conventions=conventions,
        )


def _rope(
    config: Mapping[str, Any], layer: Mapping[str, Any], max_positions: int | None, *, own: bool
) -> Rope:
    """Return the target's rotary parameters; the drafter's if the target has one set per attention type."""
    target: dict[str, Any] = required(config, "target", dict, CONFIG)
    theirs: dict[str, Any] = required(target, "rope", dict, f"target in {CONFIG}")
    split = any(isinstance(value, Mapping) for value in (theirs.get("rope_parameters") or {}).values())
    if own or split or not theirs:
        return Rope.from_dict(layer, layer.get("max_position_embeddings"))
    return Rope.from_dict(theirs, max_positions)


# --- the network


class Eagle3Network(ChainNetwork):
    """Fused features, or its own hidden state, and an embedding to the next hidden state."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        count, theirs = len(config.conventions.capture), config.target_hidden_size
        self._post_norm = config.conventions.chain == POST_NORM
        self.fc = nn.Linear(count * theirs, width, bias=False)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(count * theirs, eps=eps)
        if config.fc_norm:
            self.fc_norm = [nn.RMSNorm(theirs, eps=eps) for _ in range(count)]
        self.layers = [_Layer(config, first=index == 0) for index in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(width, eps=eps)
        add_tables(self, config)

    def fuse(self, features: mx.array) -> mx.array:
        """Project the captured layers, side by side [T, F], to [T, D]."""
        features = features.astype(self.norm.weight.dtype)
        if "input_norm" in self:
            features = self.input_norm(features)
        if "fc_norm" in self:
            parts = mx.split(features, len(self.fc_norm), axis=-1)
            features = mx.concatenate([n(p) for n, p in zip(self.fc_norm, parts, strict=True)], axis=-1)
        fused: mx.array = self.fc(features)
        return fused

    def __call__(
        self, embedded: mx.array, hidden: mx.array, caches: Sequence[Rows]
    ) -> tuple[mx.array, mx.array]:
        """Return the hidden state of the next step and the final norm, [T, D] each, for two [T, D]."""
        first, *rest = self.layers
        own, *others = caches
        x = first.read(embedded.astype(self.norm.weight.dtype)[None], hidden[None], own)
        for layer, cache in zip(rest, others, strict=True):
            x = layer(x, cache)
        normed: mx.array = self.norm(x)[0]
        return normed if self._post_norm else x[0], normed


class _Layer(nn.Module):
    """A decoder layer; the first one also reads an embedding."""

    def __init__(self, config: Eagle3Config, *, first: bool) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self._normed_residual = config.norm_before_residual
        name = f"layers.{0 if first else 1}.self_attn"
        self.self_attn = _Attention(config, 2 * width if first else width, name)
        self.mlp = MLP(width, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)
        if first:
            self.hidden_norm = nn.RMSNorm(width, eps=eps)

    def read(self, embedded: mx.array, hidden: mx.array, cache: Rows) -> mx.array:
        """Run the first layer on an embedding and a hidden state, [1, T, D] each."""
        normed = self.hidden_norm(hidden)
        x = mx.concatenate([self.input_layernorm(embedded), normed], axis=-1)
        return self._finish(normed if self._normed_residual else hidden, self.self_attn(x, cache))

    def __call__(self, x: mx.array, cache: Rows) -> mx.array:
        return self._finish(x, self.self_attn(self.input_layernorm(x), cache))

    def _finish(self, residual: mx.array, attended: mx.array) -> mx.array:
        x = residual + attended
        out: mx.array = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Attention(DrafterAttention):
    def __init__(self, config: Eagle3Config, inputs: int, name: str) -> None:
        super().__init__(config, inputs, name, normed=f"{name}.q_norm.weight" in config.tensors)

    def __call__(self, x: mx.array, cache: Rows) -> mx.array:
        mask, position = cache.mask(x.shape[1]), cache.offset
        return self.attend(self.queries(x, position), *self.append(x, cache, position), mask)


class PEagleNetwork(Eagle3Network):
    """The layers of EAGLE-3, and the feature of rows whose token is not known."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        self.mask_hidden = mx.zeros((len(config.conventions.capture) * config.target_hidden_size,))


# --- the drafter


class PEagle(ConditionedDrafter):
    """Drafts one sequence in one pass a draft. Its caches never keep rows of masks."""

    def __init__(
        self, network: PEagleNetwork, parts: TargetParts, needs: FeatureSpec, mask_token: int
    ) -> None:
        super().__init__(needs, len(network.layers))
        self._network = network
        self._parts = parts
        self._mask_token = mask_token

    def process(self, rows: mx.array, tokens: list[int]) -> None:
        self._run(rows, tokens)

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """Return `limit` tokens; none if the newest row is not that of `history`."""
        if limit < 1 or not self._follows(history):
            return no_draft()
        rows, tokens = self._next_rows(self._num_waiting)
        masks = mx.broadcast_to(self._network.mask_hidden, (limit - 1, rows.shape[1]))
        both = mx.concatenate([rows, masks])
        normed = self._run(both, [*tokens, *[self._mask_token] * (limit - 1)])
        self._mark_written(len(tokens) - 1)  # the next draft runs the newest row again
        return draw_rows(self._parts.unembed(normed[-limit:]), history, sampler)

    def _run(self, rows: mx.array, tokens: list[int]) -> mx.array:
        embedded = self._parts.embed(mx.array(tokens, dtype=mx.int32))
        return self._network(embedded, self._network.fuse(rows), self._caches)[1]


def open_eagle3(path: Path, config: Mapping[str, Any], target_config: Mapping[str, Any]) -> DrafterSource:
    """Load a converted drafter. Raises BadCheckpoint, and Mismatch if it is made for another target."""
    max_positions = text_config(target_config).get("max_position_embeddings")
    sizes = Eagle3Config.from_dict(config, read_tensors(path).keys(), max_positions)
    check_conventions(sizes.conventions, (LAYERS,))
    network = Eagle3Network(sizes)
    check_target(config, target_config)
    load_converted(network, path, config, sizes.conventions, sizes.draft_vocab_size, sizes.vocab_size)
    needs = FeatureSpec(sizes.conventions.capture)
    return chain_source("eagle3", network, needs, sizes.vocab_size)


def open_peagle(path: Path, config: Mapping[str, Any], target_config: Mapping[str, Any]) -> DrafterSource:
    """Load a converted drafter. Raises BadCheckpoint, and Mismatch if it is made for another target."""
    sizes = Eagle3Config.from_dict(config, read_tensors(path).keys())
    network = PEagleNetwork(sizes)
    check_target(config, target_config)
    load_converted(network, path, config, sizes.conventions, sizes.draft_vocab_size, sizes.vocab_size)
    needs, mask_token = FeatureSpec(sizes.conventions.capture), required(config, "mask_token_id", int, CONFIG)

    def build(parts: TargetParts) -> PEagle:
        return PEagle(network, parts, needs, mask_token)

    return network_source("peagle", network, needs, sizes.vocab_size, build)
