"""Gemma 4 assistants: multi-token prediction over the target's own K/V.

A step takes the target's embedding of a token and the hidden state of the position before it, and attends to
the K/V of the target's last cache-owning layer of each attention type. Its output stands in for the hidden
state of the next step. All steps of a draft run at the position of the pending token, as in transformers,
LiteRT-LM and llama.cpp; the assistant has no cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_spec.drafters.chain import Chain
from mlx_spec.drafters.gemma4_network import (
    FULL,
    SLIDING,
    AssistantConfig,
    AssistantNetwork,
    HeadShape,
    head_shape,
)
from mlx_spec.drafters.weights import load_weights
from mlx_spec.errors import Mismatch
from mlx_spec.types import Draft, Features, FeatureSpec, KVRows, Sampler, TargetParts, no_draft

WAY_OUT = "use the assistant made for this target"
ROPE_KEYS = ("rope_type", "rope_theta", "partial_rotary_factor")


@dataclass(frozen=True)
class _Seen:
    """The newest target features."""

    length: int  # of the history they belong to
    features: Features


class Gemma4Assistant:
    """Drafts one sequence. Remembers the newest target features and nothing else."""

    # The hidden state before the last token of a prompt knows nothing of the answer: the first token comes
    # without a draft, and a prefill can skip the layers that only feed its hidden states.
    needs = FeatureSpec(final_hidden=True, shared_kv=True, prompt=False)

    def __init__(self, network: AssistantNetwork, sliding_window: int, parts: TargetParts) -> None:
        self._network = network
        self._window = sliding_window
        self._parts = parts
        self._seen: _Seen | None = None

    def observe(self, history: Sequence[int], features: Features) -> None:
        """The newest row of `features` belongs to the position before the last of `history`."""
        if features.final_hidden is None:  # of a prompt
            self._seen = None
            return
        if features.final_hidden.shape[0] > 1:
            features = Features(final_hidden=features.final_hidden[-1:], shared_kv=features.shared_kv)
        self._seen = _Seen(len(history), features)

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """`limit` tokens; none where the target's features are not those of `history`."""
        if limit < 1 or self._seen is None or self._seen.length != len(history):
            return no_draft()
        features = self._seen.features
        assert features.final_hidden is not None and features.shared_kv is not None
        shared = visible(features.shared_kv(), self._window)
        position = mx.array(len(history) - 1)
        token, hidden = mx.array([history[-1]], dtype=mx.int32), features.final_hidden
        chain = Chain(history, sampler)
        for _ in range(limit):
            hidden, normed = self._network(self._parts.embed(token), hidden, position, shared)
            token = chain.extend(self._network.logits(normed))
        return chain.draft()


def visible(shared: Mapping[str, KVRows], sliding_window: int) -> dict[str, KVRows]:
    """The rows that a query behind the last one may see: everything, but W - 1 rows of sliding attention."""
    result = dict(shared)
    rows = result.get(SLIDING)
    if rows is not None and rows.keys.shape[2] >= sliding_window:
        last = slice(1 - sliding_window, None)
        result[SLIDING] = KVRows(rows.keys[..., last, :], rows.values[..., last, :])
    return result


@dataclass(frozen=True)
class AssistantSource:
    """One loaded assistant, shared by all sequences."""

    network: AssistantNetwork
    sliding_window: int
    vocab_size: int
    name: str = "gemma4_assistant"
    needs: FeatureSpec = Gemma4Assistant.needs

    def make(self, parts: TargetParts) -> Gemma4Assistant:
        """The drafter of one sequence."""
        return Gemma4Assistant(self.network, self.sliding_window, parts)


def open_assistant(
    path: Path, config: Mapping[str, Any], target_config: Mapping[str, Any]
) -> AssistantSource:
    """Load the checkpoint in `path`. Raises Mismatch where it is not made for the target, BadCheckpoint."""
    assistant = AssistantConfig.from_dict(config)
    check_fit(assistant, target_config)
    network = AssistantNetwork(assistant)
    load_weights(network, path, skip=("lm_head.weight",))  # a copy of the embedding table
    network.sort_table()
    return AssistantSource(network, assistant.sliding_window, assistant.vocab_size)


def check_fit(config: AssistantConfig, target_config: Mapping[str, Any]) -> None:
    """Raise Mismatch unless the assistant was made for a target with this config.json or text_config."""
    target: Mapping[str, Any] = target_config.get("text_config") or target_config
    _check("hidden size", config.backbone_hidden_size, target.get("hidden_size"))
    _check("vocabulary size", config.vocab_size, target.get("vocab_size"))
    shapes = _owned_shapes(target)
    for kind, expected in zip(config.layer_types, config.heads, strict=True):
        found = shapes.get(kind)
        if found is None:
            raise Mismatch(
                f"the drafter reads {kind} K/V, the target has {sorted(shapes) or 'none'}: {WAY_OUT}"
            )
        _check(f"{kind} K/V heads", expected.num_kv_heads, found.num_kv_heads)
        _check(f"{kind} head dimension", expected.head_dim, found.head_dim)
    if SLIDING in config.layer_types:
        _check("sliding window", config.sliding_window, target.get("sliding_window"))
    ropes = target.get("rope_parameters") or {}
    for kind in (SLIDING, FULL):
        _check_rope(kind, config.rope_parameters.get(kind, {}), ropes.get(kind, {}))


def _owned_shapes(target: Mapping[str, Any]) -> dict[str, HeadShape]:
    """K/V shape by attention type, of the last layer of each type that has a cache of its own."""
    layer_types = target.get("layer_types") or []
    owners = len(layer_types) - int(target.get("num_kv_shared_layers") or 0)
    where = "config.json of the target"
    return {layer_types[index]: head_shape(target, index, where) for index in range(owners)}


def _check_rope(kind: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    for key in ROPE_KEYS:
        if key in ours and key in theirs:
            _check(f"{kind} {key}", ours[key], theirs[key])


def _check(what: str, expected: object, found: object) -> None:
    if expected != found:
        raise Mismatch(f"drafter expects {what} {expected}, target has {found}: {WAY_OUT}")
