"""Gemma 4 assistants: multi-token prediction over the target's own K/V.

A step takes the target's embedding of a token and the hidden state of the position before it. Its four
decoder layers have no K/V: they attend to the target's last cache-owning layer of each attention type. The
output replaces the hidden state in the next step. All steps of a draft run at the position of the pending
token, as in transformers, LiteRT-LM and llama.cpp.

Source: transformers `models/gemma4_assistant`. Parameters have the names of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import initialize_rope

from mlx_spec.checkpoint.config import Checkpoint, text_config
from mlx_spec.checkpoint.targets import Config
from mlx_spec.drafters.checkpoint import (
    CONFIG,
    Size,
    check_tokens,
    load_weights,
    read_fields,
    required,
    widened,
)
from mlx_spec.drafters.drafter import DraftBuilder, DrafterSource
from mlx_spec.drafters.layers import Gemma4Layer, LayerSizes
from mlx_spec.errors import BadCheckpoint, Mismatch
from mlx_spec.types import (
    FULL,
    SLIDING,
    Draft,
    DraftCall,
    Drafter,
    Features,
    FeatureSpec,
    KVRows,
    Sampler,
    TargetParts,
    no_draft,
)

ADVICE = "use the assistant made for this target"

Stage = Callable[..., tuple[mx.array, mx.array]]
Newest = tuple[mx.array, Callable[[], Mapping[str, KVRows]]]


# --- config.json


@dataclass(frozen=True)
class HeadShape:
    """The shape of K and V of one layer."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class AssistantConfig(LayerSizes):
    """The keys of config.json that matter here. Its hidden size is h, the drafter's own."""

    backbone_hidden_size: Size  # D, the target's hidden size
    layer_types: tuple[str, ...]
    heads: tuple[HeadShape, ...]  # one a layer
    sliding_window: int  # 0 if no layer has one
    rope_parameters: Mapping[str, Mapping[str, Any]]  # by attention type
    draft_vocab_size: int | None = None  # W, if the head is W rows of the target's; None for its own head
    num_centroids: int = 0  # 0 for a dense head
    centroid_intermediate_top_k: int = 0

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> AssistantConfig:
        """Read config.json. Raises BadCheckpoint for a missing key and an unsupported value."""
        where, clusters = f"text_config in {CONFIG}", ("num_centroids", "centroid_intermediate_top_k")
        text = required(config, "text_config", dict, CONFIG)
        ordered = required(config, "use_ordered_embeddings", bool, CONFIG)
        layers = range(len(required(text, "layer_types", list, where)))
        assistant = read_fields(
            cls,
            text,
            where,
            hidden_act="gelu_pytorch_tanh",
            backbone_hidden_size=required(config, "backbone_hidden_size", Size, CONFIG),
            heads=tuple(head_shape(text, index, where) for index in layers),
            draft_vocab_size=required(config, "draft_vocab_size", int | None, CONFIG),
            **{key: required(config, key, int, CONFIG) if ordered else 0 for key in clusters},
        )
        _check_supported(assistant, config, text)
        return assistant


def head_shape(text: Mapping[str, Any], layer: int, where: str) -> HeadShape:
    """Return the shape of K and V in one layer of a Gemma 4 text config, or of one without layer types.

    transformers 5.23 writes `per_layer_config`, everything else the `global_` keys.
    """
    heads = text.get("num_attention_heads")
    num_kv_heads = required({"num_key_value_heads": heads, **text}, "num_key_value_heads", int, where)
    if heads and text.get("head_dim") is None:
        text = {**text, "head_dim": required(text, "hidden_size", int, where) // heads}
    head_dim = required(text, "head_dim", int, where)
    if (text.get("layer_types") or [FULL] * (layer + 1))[layer] != FULL:
        return HeadShape(num_kv_heads, head_dim)
    if "per_layer_config" in text:
        sizes = text["per_layer_config"].get(str(layer), {})
        return HeadShape(sizes.get("num_key_value_heads", num_kv_heads), sizes.get("head_dim", head_dim))
    if text.get("attention_k_eq_v"):
        num_kv_heads = text.get("num_global_key_value_heads") or num_kv_heads
    return HeadShape(num_kv_heads, text.get("global_head_dim") or head_dim)


def _check_supported(config: AssistantConfig, raw: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    supported = config.hidden_act
    activation = text.get("hidden_activation", supported)
    if activation != supported:
        raise BadCheckpoint(
            f"the drafter's hidden_activation is {activation!r}, only {supported!r} is supported"
        )
    if not raw.get("tie_word_embeddings", True):
        raise BadCheckpoint("the drafter has its own LM head (tie_word_embeddings is false): not supported")
    unknown = set(config.layer_types) - {SLIDING, FULL}
    if unknown or not config.layer_types:
        raise BadCheckpoint(
            f"the drafter's layer_types hold {sorted(unknown)}, known are {SLIDING!r} and {FULL!r}"
        )
    for layer_type in sorted(set(config.layer_types)):
        required(config.rope_parameters, layer_type, dict, f"rope_parameters in {CONFIG}")
    clusters, vocab = config.num_centroids, config.vocab_size
    if clusters and vocab % clusters:
        raise BadCheckpoint(f"the drafter's num_centroids {clusters} does not divide its vocab_size {vocab}")
    if clusters and not 0 < config.centroid_intermediate_top_k <= clusters:
        top_k = config.centroid_intermediate_top_k
        raise BadCheckpoint(f"the drafter's centroid_intermediate_top_k {top_k} is not in 1..{clusters}")


def check_fit(config: AssistantConfig, target_config: Mapping[str, Any]) -> None:
    """Raise Mismatch unless the assistant was made for a target with this config.json or text_config."""
    target = text_config(target_config)
    _check("hidden size", config.backbone_hidden_size, target.get("hidden_size"))
    _check("vocabulary size", config.vocab_size, target.get("vocab_size"))
    shapes = _owned_shapes(target)
    for layer_type, expected in zip(config.layer_types, config.heads, strict=True):
        if (shape := shapes.get(layer_type)) is None:
            raise Mismatch(
                f"the drafter reads {layer_type} K/V, the target has {sorted(shapes) or 'none'}: {ADVICE}"
            )
        _check(f"{layer_type} K/V heads", expected.num_kv_heads, shape.num_kv_heads)
        _check(f"{layer_type} head dimension", expected.head_dim, shape.head_dim)
    if SLIDING in config.layer_types:
        _check("sliding window", config.sliding_window, target.get("sliding_window"))
    ropes = target.get("rope_parameters") or {}
    for layer_type in (SLIDING, FULL):
        ours, theirs = config.rope_parameters.get(layer_type, {}), ropes.get(layer_type, {})
        rope_keys = ("rope_type", "rope_theta", "partial_rotary_factor")
        for key in rope_keys:
            if key in ours and key in theirs:
                _check(f"{layer_type} {key}", ours[key], theirs[key])


def _owned_shapes(target: Mapping[str, Any]) -> dict[str, HeadShape]:
    """Return the K/V shape of the last layer of each attention type that has its own cache.

    All layers have full attention if none is named.
    """
    types: list[str] = target.get("layer_types") or [FULL] * int(target.get("num_hidden_layers") or 0)
    owners = types[: len(types) - int(target.get("num_kv_shared_layers") or 0)]
    return {name: head_shape(target, i, "config.json of the target") for i, name in enumerate(owners)}


def _check(what: str, expected: object, actual: object) -> None:
    if expected != actual:
        raise Mismatch(f"drafter expects {what} {expected}, target has {actual}: {ADVICE}")


# --- the network


class AssistantNetwork(nn.Module):
    """One step: maps a token and a hidden state of the target to logits and the next hidden state."""

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        width, self.vocab_size = config.hidden_size, config.vocab_size
        self.pre_projection = nn.Linear(2 * config.backbone_hidden_size, width, bias=False)
        self.post_projection = nn.Linear(width, config.backbone_hidden_size, bias=False)
        self.model = _Body(config)
        if config.draft_vocab_size is not None:
            self.draft_ids = mx.zeros((config.draft_vocab_size,), dtype=mx.int32)
        if config.num_centroids:
            self.masked_embedding = Centroids(config)

    def __call__(
        self, embedded: mx.array, hidden: mx.array, position: mx.array, shared: Mapping[str, KVRows]
    ) -> tuple[mx.array, mx.array]:
        """Return the next hidden state [B, D] and the final norm's output [B, h] for two inputs [B, D]."""
        enter, *between, leave = self._stages
        x, queries = enter(embedded, hidden, position)
        *inner, last = [shared[layer.attention_type] for layer in self.model.layers]
        for rows, stage in zip(inner, between, strict=True):
            x, queries = stage(x, _attend(queries, rows), position)
        return leave(x, _attend(queries, last))

    @cached_property
    def _stages(self) -> list[Stage]:
        """Return the step cut at its attentions, whose K and V grow. The stages between are compiled once.

        They are made in the first step, from the weights at that time.
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
        """Return logits [B, V] for the final norm [B, h]. A centroid head leaves most tokens at -inf."""
        table = self.model.embed_tokens
        if "masked_embedding" not in self:
            logits: mx.array = table.as_linear(normed)
            return logits
        candidates, scores = self.masked_embedding(normed, table)
        return widened(scores, candidates, table.weight.shape[0])

    def table_rows(self, ids: mx.array) -> mx.array:
        """Return the rows of the embedding table that belong to token ids."""
        if "masked_embedding" not in self:
            return ids
        return mx.argsort(self.masked_embedding.token_ordering)[ids]

    def sort_table(self, *, by_token: bool = False) -> None:
        """Sort the rows of the embedding table into the order of a centroid head.

        With `by_token`, sort them back by token id, as they are stored.
        """
        if "masked_embedding" in self:
            order = self.masked_embedding.token_ordering.astype(mx.int32)
            self.masked_embedding.token_ordering = order
            rows, table = mx.argsort(order) if by_token else order, self.model.embed_tokens
            table.update({name: array[rows] for name, array in table.parameters().items()})

    @staticmethod
    def open(checkpoint: Checkpoint, config: Config, target_config: Config) -> DrafterSource:
        assistant = AssistantConfig.from_dict(config)
        check_fit(assistant, target_config)
        return assistant_source(load_assistant(checkpoint, assistant), assistant.sliding_window)


class _Body(nn.Module):
    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        if config.draft_vocab_size is None:
            # The LM head, never an input.
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [_Layer(config, index) for index in range(len(config.layer_types))]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class _Layer(Gemma4Layer):
    def __init__(self, config: AssistantConfig, index: int) -> None:
        super().__init__(config, _Attention(config, index))
        self.attention_type = config.layer_types[index]

    def queries(self, x: mx.array, position: mx.array) -> mx.array:
        """Return queries [B, H, 1, Dk] for the residual stream [B, h]."""
        queries: mx.array = self.self_attn.queries(self.input_layernorm(x), position)
        return queries

    def finish(self, residual: mx.array, attended: mx.array) -> mx.array:
        """Return the residual stream [B, h] after this layer; `attended`: [B, H, 1, Dv]."""
        return super().finish(residual, self.self_attn.project(attended, residual.dtype))


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
        queries = self.q_norm(self.q_proj(x).reshape(-1, self._num_heads, 1, self._head_dim))
        turned: mx.array = self._rope(queries, offset=position)
        return turned

    def project(self, attended: mx.array, dtype: mx.Dtype) -> mx.array:
        return self.o_proj(attended.reshape(attended.shape[0], -1).astype(dtype))


def _attend(queries: mx.array, rows: KVRows) -> mx.array:
    """Attend with one query [B, H, 1, Dk] to all rows; [B, H, 1, Dv]."""
    queries = queries.astype(rows.keys.dtype)
    return mx.fast.scaled_dot_product_attention(queries, rows.keys, rows.values, scale=1.0, mask=rows.mask)


class Centroids(nn.Module):
    """The LM head of small assistants: scores only the tokens of the best clusters.

    2048 + 4096 dot products replace 262144. The rows of a cluster are neighbours in the sorted table, so
    their scores are one gathered product, also if it is quantized.
    """

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        self._top_k = config.centroid_intermediate_top_k
        self.centroids = nn.Linear(config.hidden_size, config.num_centroids, bias=False)
        self.token_ordering = mx.zeros((config.vocab_size,), dtype=mx.int32)  # token ids, cluster by cluster

    def __call__(
        self, normed: mx.array, table: nn.Embedding | nn.QuantizedEmbedding
    ) -> tuple[mx.array, mx.array]:
        """Return token ids [B, C] and their scores [B, C] for the final norm [B, h] and the sorted table."""
        similar = self.centroids(normed)
        best = mx.argpartition(similar, kth=-self._top_k, axis=-1)[:, -self._top_k :]
        clusters = {
            name: rows.reshape(similar.shape[1], -1, rows.shape[-1])
            for name, rows in table.parameters().items()
        }
        if isinstance(table, nn.QuantizedEmbedding):
            scores = mx.gather_qmm(
                normed[:, None, None],
                clusters["weight"],
                clusters["scales"],
                clusters.get("biases"),
                rhs_indices=best,
                transpose=True,
                group_size=table.group_size,
                bits=table.bits,
                mode=table.mode,
            )
        else:
            # Not gather_mm, which has no bfloat16 on the CPU.
            scores = normed[:, None, None] @ clusters["weight"][best].swapaxes(-1, -2)
        tokens = self.token_ordering.reshape(similar.shape[1], -1)[best]
        return tokens.reshape(len(normed), -1), scores.reshape(len(normed), -1)


# --- the drafter


class Gemma4Assistant(Drafter):
    """Drafts one sequence. Keeps the newest features of the target and nothing else."""

    # The hidden state before the last prompt token says nothing about the answer. So the first token comes
    # without a draft, and a prefill can skip the layers that only feed its hidden states.
    needs = FeatureSpec(final_hidden=True, shared_kv=True, prompt_hidden=False)

    def __init__(self, network: AssistantNetwork, sliding_window: int, parts: TargetParts) -> None:
        self._network = network
        self._window = sliding_window
        self._parts = parts
        ids = network.get("draft_ids")  # a reduced vocabulary is scored by the target's own head
        self._score = None if ids is None else parts.select(ids)
        self.features: Features | None = None
        self.length = 0  # of the history that the features belong to

    def observe(self, history: Sequence[int], features: Features) -> None:
        self.features, self.length = None, len(history)
        if features.final_hidden is not None:  # None for a prompt
            self.features = Features(final_hidden=features.final_hidden[-1:], shared_kv=features.shared_kv)

    def _logits(self, hidden: mx.array, normed: mx.array) -> mx.array:
        """Return logits [B, V] for the next hidden state [B, D] and the final norm [B, h]."""
        if self._score is None:
            return self._network.logits(normed)
        return widened(self._score(hidden), self._network.draft_ids, self._network.vocab_size)

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """Return `limit` tokens; none if the newest features belong to another history."""
        return self.draft_batch([DraftCall(self, history, limit, sampler)])[0]

    def draft_batch(self, calls: Sequence[DraftCall]) -> list[Draft]:
        """Return the drafts of several sequences with this network, in one pass a token."""
        ready = [(i, call, new) for i, call in enumerate(calls) if call.limit > 0 and (new := _newest(call))]
        drafts = [no_draft()] * len(calls)
        if not ready:
            return drafts
        shared = _side_by_side([visible_rows(shared_kv(), self._window) for _, _, (_, shared_kv) in ready])
        hidden = mx.concatenate([rows for _, _, (rows, _) in ready])
        positions = [len(call.history) - 1 for _, call, _ in ready]
        position = mx.array(positions if len(ready) > 1 else positions[0])
        token = mx.array([call.history[-1] for _, call, _ in ready], dtype=mx.int32)
        builders = [DraftBuilder(call.history, call.sampler) for _, call, _ in ready]
        for step in range(max(call.limit for _, call, _ in ready)):
            hidden, normed = self._network(self._parts.embed(token), hidden, position, shared)
            logits, drawn = self._logits(hidden, normed), list[mx.array]()
            for i, ((_, call, _), builder) in enumerate(zip(ready, builders, strict=True)):
                lane = slice(i, i + 1)
                drawn.append(builder.draw(logits[lane]) if step < call.limit else token[lane])
            token = mx.concatenate(drawn) if len(drawn) > 1 else drawn[0]
        for (i, _, _), builder in zip(ready, builders, strict=True):
            drafts[i] = builder.draft()
        return drafts


def _newest(call: DraftCall) -> Newest | None:
    """Return the hidden state [1, D] and the K/V at the end of a history; None if they are not known."""
    assert isinstance(call.drafter, Gemma4Assistant)
    features = call.drafter.features
    if features is None or call.drafter.length != len(call.history):
        return None
    assert features.final_hidden is not None and features.shared_kv is not None
    return features.final_hidden, features.shared_kv


def _side_by_side(shared: Sequence[Mapping[str, KVRows]]) -> Mapping[str, KVRows]:
    """Return the rows of several sequences in one array; shorter ones are padded at their end and masked."""
    if len(shared) == 1:
        return shared[0]
    result = {}
    for name in shared[0]:
        sizes = [rows[name].keys.shape[2] for rows in shared]
        longest = max(sizes)

        def padded(rows: mx.array, longest: int = longest) -> mx.array:
            return mx.pad(rows, [(0, 0), (0, 0), (0, longest - rows.shape[2]), (0, 0)])

        mask = mx.arange(longest) < mx.array(sizes)[:, None, None, None] if min(sizes) < longest else None
        keys = mx.concatenate([padded(rows[name].keys) for rows in shared])
        result[name] = KVRows(keys, mx.concatenate([padded(rows[name].values) for rows in shared]), mask)
    return result


def visible_rows(shared: Mapping[str, KVRows], sliding_window: int) -> dict[str, KVRows]:
    """Return the rows that the next query may see: all of full attention, W - 1 of sliding attention."""
    result = dict(shared)
    rows = result.get(SLIDING)
    if rows is not None and rows.keys.shape[2] >= sliding_window:
        last = slice(1 - sliding_window, None)
        result[SLIDING] = KVRows(rows.keys[..., last, :], rows.values[..., last, :])
    return result


def assistant_source(network: AssistantNetwork, sliding_window: int) -> DrafterSource:
    """Return the source of drafters with `network`."""
    needs, make = Gemma4Assistant.needs, partial(Gemma4Assistant, network, sliding_window)
    return DrafterSource("gemma4_assistant", needs, make, network, drafts_together=True)


def load_assistant(checkpoint: Checkpoint, config: AssistantConfig) -> AssistantNetwork:
    """Load the weights of an assistant. Raises BadCheckpoint."""
    network = AssistantNetwork(config)
    copied = ("lm_head.weight",)  # from the embedding table
    published = ("masked_embedding.token_ordering",)  # as int64; `sort_table` makes it int32
    load_weights(network, checkpoint, skip=copied, any_integer=published)
    if "draft_ids" in network:
        check_tokens("'draft_ids'", network.draft_ids, config.vocab_size)
    if "masked_embedding" in network:
        check_tokens("'token_ordering'", network.masked_embedding.token_ordering, config.vocab_size)
    network.sort_table()
    return network
