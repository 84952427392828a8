"""The network of EAGLE-3 (arXiv:2503.01840): a decoder layer that reads an embedding beside its hidden.

Source: SafeAILab/EAGLE `cnets.py`, speculators. Parameter names are those that the converter writes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.rope_utils import initialize_rope

from mlx_spec.drafters.conditioned import Rows
from mlx_spec.drafters.recorded import POST, WHERE, Recorded, joined, layer_config
from mlx_spec.drafters.weights import required
from mlx_spec.errors import BadCheckpoint
from mlx_spec.hub.files import one_line


@dataclass(frozen=True)
class Rope:
    """Rotary parameters."""

    base: float
    scaling: Mapping[str, Any] | None
    share: float  # of a head's dimensions that are rotated
    max_positions: int | None

    @classmethod
    def from_dict(cls, found: Mapping[str, Any], max_positions: int | None) -> Rope:
        """From a config.json, in its old form or its new one."""
        parameters = found.get("rope_parameters") or found.get("rope_scaling")
        both = {**found, **(parameters or {})}
        share = float(both.get("partial_rotary_factor") or 1.0)
        scaling = dict(parameters) if parameters else None
        return cls(float(both.get("rope_theta") or 10000.0), scaling, share, max_positions)

    def build(self, head_dim: int) -> nn.Module:
        """The rotation of heads [.., head_dim]. Raises BadCheckpoint for one that mlx-lm does not know."""
        scaling = None if self.scaling is None else dict(self.scaling)
        try:
            rope: nn.Module = initialize_rope(
                int(head_dim * self.share), self.base, False, scaling, self.max_positions
            )
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            raise BadCheckpoint(f"rotary parameters {scaling} cannot be used: {one_line(error)}") from error
        return rope


@dataclass(frozen=True)
class Eagle3Config:
    """What config.json says, and the names of the tensors where it is silent."""

    hidden_size: int  # D
    target_hidden_size: int
    vocab_size: int  # V, the target's
    draft_vocab_size: int  # W <= V
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    recorded: Recorded
    rope: Rope
    tensors: frozenset[str]

    @classmethod
    def from_dict(
        cls, config: Mapping[str, Any], tensors: Collection[str], max_positions: int | None = None
    ) -> Eagle3Config:
        """From config.json. Raises BadCheckpoint for a missing key and for what this network does not do.

        `tensors` are the names in the checkpoint, `max_positions` is the length of the target's context.
        """
        layer = layer_config(config)
        where = f"layer_config in {WHERE}"
        heads = required(layer, "num_attention_heads", int, where)
        hidden = required(layer, "hidden_size", int, where)
        recorded = Recorded.from_config(config)
        return cls(
            hidden_size=hidden,
            target_hidden_size=required(config, "target_hidden_size", int, WHERE),
            vocab_size=required(layer, "vocab_size", int, where),
            draft_vocab_size=required(config, "draft_vocab_size", int, WHERE),
            intermediate_size=required(layer, "intermediate_size", int, where),
            num_hidden_layers=layer.get("num_hidden_layers") or 1,
            num_attention_heads=heads,
            num_key_value_heads=layer.get("num_key_value_heads") or heads,
            head_dim=layer.get("head_dim") or hidden // heads,
            rms_norm_eps=required(layer, "rms_norm_eps", float, where),
            norm_before_residual=required(config, "norm_before_residual", bool, WHERE),
            norm_before_fc=required(config, "norm_before_fc", bool, WHERE),
            fc_norm=required(config, "fc_norm", bool, WHERE),
            recorded=recorded,
            rope=_rope(config, layer, max_positions, own=recorded.own_rope),
            tensors=frozenset(tensors),
        )


def _rope(
    config: Mapping[str, Any], layer: Mapping[str, Any], max_positions: int | None, *, own: bool
) -> Rope:
    """The target's rotary parameters; the drafter's where the target has one set for each attention type."""
    target: dict[str, Any] = required(config, "target", dict, WHERE)
    theirs: dict[str, Any] = required(target, "rope", dict, f"target in {WHERE}")
    split = any(isinstance(value, Mapping) for value in (theirs.get("rope_parameters") or {}).values())
    if own or split or not theirs:
        return Rope.from_dict(layer, layer.get("max_position_embeddings"))
    return Rope.from_dict(theirs, max_positions)


class Eagle3Network(nn.Module):
    """Fused features or its own hidden, and an embedding, to the next hidden."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        width, eps, names = config.hidden_size, config.rms_norm_eps, config.tensors
        count, theirs = len(config.recorded.capture), config.target_hidden_size
        self._post_norm = config.recorded.chain == POST
        self._target_width = theirs
        self.fc = nn.Linear(count * theirs, width, bias=False)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(count * theirs, eps=eps)
        if config.fc_norm:
            self.fc_norm = [nn.RMSNorm(theirs, eps=eps) for _ in range(count)]
        self.layers = [_Layer(config, first=index == 0) for index in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(width, eps=eps)
        if "lm_head.weight" in names:
            self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        if "embed_tokens.weight" in names:
            self.embed_tokens = nn.Embedding(config.vocab_size, width)
        if "draft_ids" in names:
            self.draft_ids = mx.zeros((config.draft_vocab_size,), dtype=mx.int32)

    @property
    def depth(self) -> int:
        """Layers with K and V."""
        return len(self.layers)

    def fuse(self, features: mx.array) -> mx.array:
        """The captured layers side by side [T, nT] to [T, D]."""
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
        """[T, D] twice to the hidden of the next step and the final norm, [T, D] each."""
        first, *rest = self.layers
        own, *others = caches
        x = first.read(embedded.astype(self.norm.weight.dtype)[None], hidden[None], own)
        for layer, cache in zip(rest, others, strict=True):
            x = layer(x, cache)
        normed: mx.array = self.norm(x)[0]
        return normed if self._post_norm else x[0], normed


class _Layer(nn.Module):
    """A decoder layer; the first reads an embedding, too."""

    def __init__(self, config: Eagle3Config, *, first: bool) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self._normed_residual = config.norm_before_residual
        self._hidden_first = config.recorded.hidden_first
        name = f"layers.{0 if first else 1}."
        self.self_attn = _Attention(config, 2 * width if first else width, name)
        self.mlp = _MLP(width, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)
        if first:
            self.hidden_norm = nn.RMSNorm(width, eps=eps)

    def read(self, embedded: mx.array, hidden: mx.array, cache: Rows) -> mx.array:
        """The first layer: [1, T, D] twice to [1, T, D]."""
        normed = self.hidden_norm(hidden)
        x = joined(self.input_layernorm(embedded), normed, hidden_first=self._hidden_first)
        return self._finish(normed if self._normed_residual else hidden, self.self_attn(x, cache))

    def __call__(self, x: mx.array, cache: Rows) -> mx.array:
        """Any other layer: [1, T, D] to [1, T, D]."""
        return self._finish(x, self.self_attn(self.input_layernorm(x), cache))

    def _finish(self, residual: mx.array, attended: mx.array) -> mx.array:
        x = residual + attended
        out: mx.array = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Attention(nn.Module):
    def __init__(self, config: Eagle3Config, inputs: int, name: str) -> None:
        super().__init__()
        heads, groups, head = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self._heads, self._groups, self._scale = heads, groups, head**-0.5

        def has(part: str) -> bool:
            return f"{name}self_attn.{part}" in config.tensors

        self.q_proj = nn.Linear(inputs, heads * head, bias=has("q_proj.bias"))
        self.k_proj = nn.Linear(inputs, groups * head, bias=has("k_proj.bias"))
        self.v_proj = nn.Linear(inputs, groups * head, bias=has("v_proj.bias"))
        self.o_proj = nn.Linear(heads * head, config.hidden_size, bias=has("o_proj.bias"))
        if has("q_norm.weight"):
            self.q_norm = nn.RMSNorm(head, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(head, eps=config.rms_norm_eps)
        self._rope = config.rope.build(head)

    def __call__(self, x: mx.array, cache: Rows) -> mx.array:
        T, mask, offset = x.shape[1], cache.mask(x.shape[1]), cache.offset
        queries = self.q_proj(x).reshape(1, T, self._heads, -1)
        keys = self.k_proj(x).reshape(1, T, self._groups, -1)
        values = self.v_proj(x).reshape(1, T, self._groups, -1).swapaxes(1, 2)
        if "q_norm" in self:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries = self._rope(queries.swapaxes(1, 2), offset=offset)
        keys, values = cache.update_and_fetch(self._rope(keys.swapaxes(1, 2), offset=offset), values)
        attended = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self._scale, mask=mask)
        projected: mx.array = self.o_proj(attended.swapaxes(1, 2).reshape(1, T, -1))
        return projected


class _MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        projected: mx.array = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
        return projected
