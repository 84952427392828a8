"""What the converter records in a drafter's config.json: the conventions of its weights, and its target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlx_spec.drafters.weights import required
from mlx_spec.errors import BadCheckpoint, Mismatch

KEY = "mlx_spec"
WHERE = "config.json of the drafter"
POST, PRE, LAYERS = "post_norm", "pre_norm", "layers"
ACTIVATION = "silu"
SIZES = ("hidden_size", "num_hidden_layers", "vocab_size")


@dataclass(frozen=True)
class Recorded:
    """Conventions that weights do not show. Row i belongs to the target's token x_i."""

    hidden: str  # what it reads: POST or PRE, after or before the target's final norm; LAYERS of `capture`
    chain: str  # what its own next step reads: its output after (POST) or before (PRE) its final norm
    capture: tuple[int, ...]  # outputs of these layers of the target, from 0 and never negative
    hidden_first: bool  # whether fc reads the hidden before the embedding
    shift: int  # 1: a row predicts the token after its newest input; 0: a slot predicts its own
    position_offset: int  # added to the positions of drafted rows
    norm_offset: int  # added to the norm weights
    own_rope: bool  # whether its rotary parameters are its own and not the target's

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Recorded:
        """From config.json. Raises BadCheckpoint for a drafter that was never converted."""
        found = config.get(KEY)
        if not isinstance(found, Mapping):
            raise BadCheckpoint(
                f"{WHERE} has no {KEY!r}, so its conventions are not known: run `mlx-spec convert` on it"
            )
        where = f"{KEY!r} in {WHERE}"
        return cls(
            hidden=required(found, "hidden", str, where),
            chain=required(found, "chain", str, where),
            capture=_items(found, "capture", where),
            hidden_first=_items(found, "fc_order", where)[:1] == ("hidden",),
            shift=required(found, "shift", int, where),
            position_offset=required(found, "position_offset", int, where),
            norm_offset=required(found, "norm_offset", int, where),
            own_rope=required(found, "rope", str, where) == "own",
        )


def _items(found: Mapping[str, Any], key: str, where: str) -> tuple[Any, ...]:
    """A list; before it is written to a file it is a tuple."""
    items = found.get(key)
    if not isinstance(items, list | tuple):
        raise BadCheckpoint(f"{where} has {key!r} = {items!r}, which is no list")
    return tuple(items)


def check_target(config: Mapping[str, Any], target_config: Mapping[str, Any]) -> None:
    """Raise Mismatch where the target's sizes are not those of the target the drafter was made for."""
    made_for = required(config, "target", dict, WHERE)
    target: Mapping[str, Any] = target_config.get("text_config") or target_config
    for key in SIZES:
        if made_for.get(key) != target.get(key):
            raise Mismatch(
                f"drafter expects {key.replace('_', ' ')} {made_for.get(key)}, target has "
                f"{target.get(key)}: use the drafter made for this target"
            )


def layer_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the layers of a drafter are. Raises BadCheckpoint where that is missing, and for an activation."""
    layer: dict[str, Any] = required(config, "layer_config", dict, WHERE)
    activation = layer.get("hidden_act", ACTIVATION)
    if activation != ACTIVATION:
        raise BadCheckpoint(f"the drafter's hidden_act is {activation!r}, only {ACTIVATION!r} is supported")
    return layer


def joined(embedded: mx.array, hidden: mx.array, *, hidden_first: bool) -> mx.array:
    """An embedding and a hidden side by side, in the order that the columns of fc have."""
    return mx.concatenate([hidden, embedded] if hidden_first else [embedded, hidden], axis=-1)


def shift_norms(network: nn.Module, offset: int) -> None:
    """Add `offset` to every norm weight of a loaded network. Lazy."""
    if offset:
        weights: dict[str, mx.array] = dict(tree_flatten(network.parameters()))
        norms = [(name, w + offset) for name, w in weights.items() if "norm" in name.rpartition(".")[0]]
        network.update(tree_unflatten(norms))
