"""Conventions that checkpoints get wrong, for a self-test whose acceptance is below its floor.

Each is one change of the written config.json. Acceptance is measured again under each; the one that repairs
it is the convention the checkpoint was made with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlx_spec.convert.families.conventions import KEY
from mlx_spec.convert.families.family import Config

Apply = Callable[[Config], dict[str, Any]]


@dataclass(frozen=True)
class Convention:
    """One thing to try."""

    name: str
    apply: Apply  # config.json -> config.json under this convention
    explanation: str  # for the user, should it be the one that repairs


def probes(config: Config) -> tuple[Convention, ...]:
    """What to try with a drafter whose config.json is `config`; none where no convention is recorded."""
    found = config.get(KEY)
    if not isinstance(found, dict):
        return ()
    return tuple(convention for convention in CONVENTIONS if convention.apply(config)[KEY] != found)


def _other_norm(key: str, config: Config) -> dict[str, Any]:
    other = {"post_norm": "pre_norm", "pre_norm": "post_norm"}
    value = config[KEY].get(key)
    return _with(config, key, other.get(value, value))


def _moved(key: str, by: int, config: Config) -> dict[str, Any]:
    value = config[KEY].get(key)
    if isinstance(value, int):
        return _with(config, key, value + by)
    return dict(config)


def _layers_moved(by: int, config: Config) -> dict[str, Any]:
    capture = config[KEY].get("capture") or ()
    last = (config.get("target") or {}).get("num_hidden_layers")
    moved = tuple(index + by for index in capture)
    if any(index < 0 or (last is not None and index >= last) for index in moved):
        return dict(config)
    return _with(config, "capture", moved)


def _swapped(config: Config) -> dict[str, Any]:
    return _with(config, "fc_order", tuple(reversed(config[KEY].get("fc_order") or ())))


def _with(config: Config, key: str, value: object) -> dict[str, Any]:
    """`config` with one convention changed; unchanged where it has no such key."""
    recorded = config[KEY]
    same_kind = list(value) if isinstance(recorded.get(key), list) and isinstance(value, tuple) else value
    return {**config, KEY: {**recorded, key: same_kind} if key in recorded else recorded}


CONVENTIONS = (
    Convention(
        "hidden",
        partial(_other_norm, "hidden"),
        "it reads the target's hidden on the other side of the final norm",
    ),
    Convention(
        "chain",
        partial(_other_norm, "chain"),
        "its own next step reads its output on the other side of its final norm",
    ),
    Convention(
        "capture+1",
        partial(_layers_moved, 1),
        "its layer ids are one too low: they number outputs, not inputs",
    ),
    Convention(
        "capture-1",
        partial(_layers_moved, -1),
        "its layer ids are one too high: they number inputs, not outputs",
    ),
    Convention("position-1", partial(_moved, "position_offset", -1), "its positions start one earlier"),
    Convention("norm+1", partial(_moved, "norm_offset", 1), "the 1 of its norm weights is missing"),
    Convention("norm-1", partial(_moved, "norm_offset", -1), "the 1 of its norm weights is in them twice"),
    Convention("fc_order", _swapped, "its fc reads the hidden first and the embedding second"),
)
