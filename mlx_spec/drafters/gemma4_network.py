"""The network of a Gemma 4 assistant: four decoder layers without K and V of their own.

Source: transformers `models/gemma4_assistant`. Parameter names are those of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import initialize_rope

from mlx_spec.drafters.gemma4_centroids import Centroids
from mlx_spec.drafters.weights import required
from mlx_spec.errors import BadCheckpoint
from mlx_spec.types import KVRows

SLIDING, FULL = "sliding_attention", "full_attention"
ACTIVATION = "gelu_pytorch_tanh"
Stage = Callable[..., tuple[mx.array, mx.array]]


@dataclass(frozen=True)
class HeadShape:
    """Shape of the K and V of one layer."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class AssistantConfig:
    """What the checkpoint's config.json says; keys that are not listed here do not matter."""

    backbone_hidden_size: int  # D, the target's hidden size
    vocab_size: int
    hidden_size: int  # h, the drafter's own
    intermediate_size: int
    num_attention_heads: int
    layer_types: tuple[str, ...]
    heads: tuple[HeadShape, ...]  # a layer
    sliding_window: int
    rms_norm_eps: float
    rope_parameters: Mapping[str, Mapping[str, Any]]  # by attention type
    num_centroids: int = 0  # 0: dense head
    centroid_intermediate_top_k: int = 0

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> AssistantConfig:
        """From config.json. Raises BadCheckpoint for a missing key and for what this network does not do."""
        where = "config.json of the drafter"
        text: dict[str, Any] = required(config, "text_config", dict, where)
        where_text = f"text_config in {where}"
        ordered = required(config, "use_ordered_embeddings", bool, where)
        layer_types = tuple(required(text, "layer_types", list, where_text))
        result = cls(
            backbone_hidden_size=required(config, "backbone_hidden_size", int, where),
            vocab_size=required(text, "vocab_size", int, where_text),
            hidden_size=required(text, "hidden_size", int, where_text),
            intermediate_size=required(text, "intermediate_size", int, where_text),
            num_attention_heads=required(text, "num_attention_heads", int, where_text),
            layer_types=layer_types,
            heads=tuple(head_shape(text, index, where_text) for index in range(len(layer_types))),
            sliding_window=required(text, "sliding_window", int, where_text),
            rms_norm_eps=required(text, "rms_norm_eps", float, where_text),
            rope_parameters=required(text, "rope_parameters", dict, where_text),
            num_centroids=required(config, "num_centroids", int, where) if ordered else 0,
            centroid_intermediate_top_k=(
                required(config, "centroid_intermediate_top_k", int, where) if ordered else 0
            ),
        )
        _check_supported(result, config, text)
        return result


def head_shape(text: Mapping[str, Any], layer: int, where: str) -> HeadShape:
    """Shape of K and V in one layer of any Gemma 4 text config.

    transformers 5.23 writes `per_layer_config`, everything else the `global_` keys.
    """
    num_kv_heads = required(text, "num_key_value_heads", int, where)
    head_dim = required(text, "head_dim", int, where)
    if text["layer_types"][layer] != FULL:
        return HeadShape(num_kv_heads, head_dim)
    if "per_layer_config" in text:
        own = text["per_layer_config"].get(str(layer), {})
        return HeadShape(own.get("num_key_value_heads", num_kv_heads), own.get("head_dim", head_dim))
    if text.get("attention_k_eq_v"):
        num_kv_heads = text.get("num_global_key_value_heads") or num_kv_heads
    return HeadShape(num_kv_heads, required(text, "global_head_dim", int, where))


def _check_supported(config: AssistantConfig, raw: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    activation = text.get("hidden_activation", ACTIVATION)
    if activation != ACTIVATION:
        raise BadCheckpoint(
            f"the drafter's hidden_activation is {activation!r}, only {ACTIVATION!r} is supported"
        )
    if not raw.get("tie_word_embeddings", True):
        raise BadCheckpoint(
            "the drafter has an LM head of its own (tie_word_embeddings is false): not supported"
        )
    unknown = set(config.layer_types) - {SLIDING, FULL}
    if unknown or not config.layer_types:
        raise BadCheckpoint(
            f"the drafter's layer_types hold {sorted(unknown)}, known are {SLIDING!r} and {FULL!r}"
        )
    for kind in sorted(set(config.layer_types)):
        required(config.rope_parameters, kind, dict, "rope_parameters in config.json of the drafter")
    clusters, vocab = config.num_centroids, config.vocab_size
    if clusters and vocab % clusters:
        raise BadCheckpoint(f"the drafter's num_centroids {clusters} does not divide its vocab_size {vocab}")
    if clusters and not 0 < config.centroid_intermediate_top_k <= clusters:
        top_k = config.centroid_intermediate_top_k
        raise BadCheckpoint(f"the drafter's centroid_intermediate_top_k {top_k} is not in 1..{clusters}")


class AssistantNetwork(nn.Module):
    """One step: a token and a hidden state of the target in, logits and the next hidden state out."""

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.pre_projection = nn.Linear(2 * config.backbone_hidden_size, width, bias=False)
        self.post_projection = nn.Linear(width, config.backbone_hidden_size, bias=False)
        self.model = _Body(config)
        if config.num_centroids:
            self.masked_embedding = Centroids(
                config.hidden_size,
                config.vocab_size,
                config.num_centroids,
                config.centroid_intermediate_top_k,
            )

    def __call__(
        self, embedded: mx.array, hidden: mx.array, position: mx.array, shared: Mapping[str, KVRows]
    ) -> tuple[mx.array, mx.array]:
        """Embedding and hidden state of the target [1, D] to next hidden state [1, D], final norm [1, h]."""
        enter, *between, leave = self._stages
        x, queries = enter(embedded, hidden, position)
        *inner, last = [shared[layer.attention_type] for layer in self.model.layers]
        for rows, stage in zip(inner, between, strict=True):
            x, queries = stage(x, _attend(queries, rows), position)
        hidden, normed = leave(x, _attend(queries, last))
        return hidden, normed

    @cached_property
    def _stages(self) -> list[Stage]:
        """The step cut at its attentions, whose K and V grow: what lies between them is compiled once.

        Made at the first step, from the weights as they are then.
        """
        layers, norm = self.model.layers, self.model.norm

        def enter(embedded: mx.array, hidden: mx.array, position: mx.array) -> tuple[mx.array, mx.array]:
            x = mx.concatenate([embedded, hidden], axis=-1)
            x = self.pre_projection(x.astype(norm.weight.dtype))
            return x, layers[0].queries(x, position)

        def between(before: _Layer, after: _Layer) -> Stage:
            def stage(x: mx.array, attended: mx.array, position: mx.array) -> tuple[mx.array, mx.array]:
                x = before.finish(x, attended)
                return x, after.queries(x, position)

            return stage

        def leave(x: mx.array, attended: mx.array) -> tuple[mx.array, mx.array]:
            x = norm(layers[-1].finish(x, attended))
            return self.post_projection(x), x

        stages: list[Stage] = [enter, *(between(a, b) for a, b in pairwise(layers)), leave]
        return [mx.compile(stage) for stage in stages]

    def logits(self, normed: mx.array) -> mx.array:
        """Final norm [1, h] to logits [1, V]; a centroid head leaves all but its best clusters at -inf."""
        table = self.model.embed_tokens
        if "masked_embedding" not in self:
            logits: mx.array = table.as_linear(normed)
            return logits
        candidates, scores = self.masked_embedding(normed, table)
        empty = mx.full((1, table.weight.shape[0]), -mx.inf, dtype=scores.dtype)
        return mx.put_along_axis(empty, candidates, scores, axis=-1)

    def sort_table(self) -> None:
        """Bring the rows of the embedding table, stored by token id, into the order of a centroid head."""
        if "masked_embedding" in self:
            order = self.masked_embedding.token_ordering.astype(mx.int32)
            self.masked_embedding.token_ordering = order
            table = self.model.embed_tokens
            table.update({name: rows[order] for name, rows in table.parameters().items()})


class _Body(nn.Module):
    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(
            config.vocab_size, config.hidden_size
        )  # the tied head, never an input
        self.layers = [_Layer(config, index) for index in range(len(config.layer_types))]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class _Layer(nn.Module):
    def __init__(self, config: AssistantConfig, index: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.attention_type = config.layer_types[index]
        self.self_attn = _Attention(config, index)
        self.mlp = _MLP(config)
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)
        self.pre_feedforward_layernorm = nn.RMSNorm(width, eps=eps)
        self.post_feedforward_layernorm = nn.RMSNorm(width, eps=eps)
        self.layer_scalar = mx.ones((1,))

    def queries(self, x: mx.array, position: mx.array) -> mx.array:
        """Residual stream [1, h] to queries [1, H, 1, Dk]."""
        return self.self_attn.queries(self.input_layernorm(x), position)

    def finish(self, x: mx.array, attended: mx.array) -> mx.array:
        """Residual stream [1, h] and attention [1, H, 1, Dv] to the residual stream behind this layer."""
        x = x + self.post_attention_layernorm(self.self_attn.project(attended, x.dtype))
        forwarded = self.mlp(self.pre_feedforward_layernorm(x))
        scaled: mx.array = (x + self.post_feedforward_layernorm(forwarded)) * self.layer_scalar
        return scaled


class _Attention(nn.Module):
    """Queries only; K and V are the target's."""

    def __init__(self, config: AssistantConfig, index: int) -> None:
        super().__init__()
        self._num_heads, self._head_dim = config.num_attention_heads, config.heads[index].head_dim
        width = self._num_heads * self._head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(self._head_dim, eps=config.rms_norm_eps)
        rope = config.rope_parameters[config.layer_types[index]]
        base = required(rope, "rope_theta", float, "rope_parameters")
        self._rope = initialize_rope(self._head_dim, base, traditional=False, scaling_config=dict(rope))

    def queries(self, x: mx.array, position: mx.array) -> mx.array:
        queries = self.q_norm(self.q_proj(x).reshape(1, self._num_heads, 1, self._head_dim))
        rotated: mx.array = self._rope(queries, offset=position)
        return rotated

    def project(self, attended: mx.array, dtype: mx.Dtype) -> mx.array:
        projected: mx.array = self.o_proj(attended.reshape(1, -1).astype(dtype))
        return projected


class _MLP(nn.Module):
    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        activated = nn.gelu_approx(self.gate_proj(x)) * self.up_proj(x)
        projected: mx.array = self.down_proj(activated)
        return projected


def _attend(queries: mx.array, rows: KVRows) -> mx.array:
    """One query [1, H, 1, Dk] sees all rows it is given, so there is no mask; [1, H, 1, Dv]."""
    queries = queries.astype(rows.keys.dtype)
    attended: mx.array = mx.fast.scaled_dot_product_attention(queries, rows.keys, rows.values, scale=1.0)
    return attended
