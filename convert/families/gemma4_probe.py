"""Gemma 4 assistants that are never accepted: the ways in which one can be meant or damaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from mlx_spec.checkpoint import read_config
from mlx_spec.convert.families.variant import Variant
from mlx_spec.drafters.checkpoint import load_weights
from mlx_spec.drafters.gemma4 import AssistantConfig, AssistantNetwork, Gemma4Assistant
from mlx_spec.types import Draft, Features, FeatureSpec, KVRows, Sampler, TargetParts

Weights = dict[str, mx.array]
Edit = Callable[[Weights], Weights]
NEEDS = FeatureSpec(hidden_layers=(-1, -2), final_hidden=True, shared_kv=True)
NORMS = ("norm.weight",)  # the ends of their names
PRE, ORDER = "pre_projection.weight", "masked_embedding.token_ordering"


def variants(folder: Path) -> list[Variant]:
    """The unquantized assistant in `folder` with one mistake undone at a time."""
    config = AssistantConfig.from_dict(read_config(folder))
    edits: dict[str, Edit] = {
        "its norm weights lack the 1 that belongs to them": partial(_norms, by=1.0),
        "its norm weights have a 1 too many": partial(_norms, by=-1.0),
        "the two halves of its pre_projection are swapped": _swap_inputs,
        "its gate_proj and up_proj are swapped": _swap_gates,
    }
    if config.num_centroids:
        edits["its token_ordering is inverted"] = _invert_order
    changed = [_variant(meaning, _network(folder, config, edit), config) for meaning, edit in edits.items()]
    network = _network(folder, config, dict)
    moved = {"one earlier": -1, "one later": 1}
    shifted = [
        _variant(f"it is meant to stand {where}", _Moved(config, network, by), config)
        for where, by in moved.items()
    ]
    return changed + shifted + _readings(network, config)


def _readings(network: AssistantNetwork, config: AssistantConfig) -> list[Variant]:
    """Other hidden states of the target, and its embedding without the scale."""
    scale = config.backbone_hidden_size**-0.5
    normal = _variant("", network, config)

    def unscaled(parts: TargetParts) -> Gemma4Assistant:
        plain = replace(parts, embed=lambda tokens: parts.embed(tokens) * scale)
        return Gemma4Assistant(network, config.sliding_window, plain)

    def reading(layer: int, parts: TargetParts) -> _Reading:
        return _Reading(Gemma4Assistant(network, config.sliding_window, parts), layer)

    return [
        replace(
            normal,
            meaning="it reads the target's hidden state before the final norm",
            make=partial(reading, 0),
        ),
        replace(normal, meaning="it reads the target's layer before the last", make=partial(reading, 1)),
        replace(normal, meaning="it reads the target's embedding without its scale", make=unscaled),
    ]


def _variant(meaning: str, network: AssistantNetwork, config: AssistantConfig) -> Variant:
    return Variant(meaning, NEEDS, partial(Gemma4Assistant, network, config.sliding_window))


def _network(folder: Path, config: AssistantConfig, edit: Edit) -> AssistantNetwork:
    network = AssistantNetwork(config)
    load_weights(network, folder)
    edited = edit(dict(tree_flatten(network.parameters())))
    network.update(tree_unflatten(list(edited.items())))
    network.sort_table()
    return network


def _norms(weights: Weights, by: float) -> Weights:
    return {name: array + by if name.endswith(NORMS) else array for name, array in weights.items()}


def _swap_inputs(weights: Weights) -> Weights:
    left, right = mx.split(weights[PRE], 2, axis=-1)
    return {**weights, PRE: mx.concatenate([right, left], axis=-1)}


def _swap_gates(weights: Weights) -> Weights:
    gates = {name: name.replace("gate_proj", "up_proj") for name in weights if "gate_proj" in name}
    pairs = {**gates, **{up: gate for gate, up in gates.items()}}
    return {name: weights[pairs.get(name, name)] for name in weights}


def _invert_order(weights: Weights) -> Weights:
    return {**weights, ORDER: mx.argsort(weights[ORDER]).astype(mx.int32)}


class _Moved(AssistantNetwork):
    """Stands some positions from where it should."""

    def __init__(self, config: AssistantConfig, network: AssistantNetwork, by: int) -> None:
        super().__init__(config)
        self.update(network.parameters())
        self._by = by

    def __call__(
        self, embedded: mx.array, hidden: mx.array, position: mx.array, shared: Mapping[str, KVRows]
    ) -> tuple[mx.array, mx.array]:
        """As AssistantNetwork."""
        return super().__call__(embedded, hidden, position + self._by, shared)


@dataclass
class _Reading:
    """Reads the output of a decoder layer in place of the final norm's."""

    inner: Gemma4Assistant
    layer: int  # of NEEDS.hidden_layers
    needs: FeatureSpec = NEEDS

    def observe(self, history: Sequence[int], features: Features) -> None:
        """Tokens became final."""
        self.inner.observe(history, replace(features, final_hidden=features.hidden[self.layer]))

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """At most `limit` tokens."""
        return self.inner.draft(history, limit, sampler)
