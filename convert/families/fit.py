"""Whether a drafter's config.json and its target's belong together, key by key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mlx_spec.convert.families.family import Config
from mlx_spec.drafters.checkpoint import required
from mlx_spec.errors import BadCheckpoint, Mismatch

TARGET = "the target's config.json"
OTHER = "use the drafter made for this target"
ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rope_interleave")
FOREIGN = ("quantization", "quantization_config", "vision_config", "audio_config", "auto_map")


def text_config(config: Config) -> dict[str, Any]:
    """The part of a config.json that describes the language model."""
    nested = config.get("text_config")
    return dict(nested if isinstance(nested, Mapping) else config)


def own_config(config: Config) -> dict[str, Any]:
    """What a drafter's layers are built from, without what says how the source was stored."""
    return {key: value for key, value in text_config(config).items() if key not in FOREIGN}


def rope_of(text: Config) -> dict[str, Any]:
    """The rotary parameters of a language model, as its config.json has them."""
    return {key: text[key] for key in ROPE if text.get(key) is not None}


def size(config: Config, key: str, title: str) -> int:
    """`config[key]`. Raises BadCheckpoint where it is absent or no integer."""
    return required(config, key, int, f"config.json of {title}")


def head_size(config: Config, title: str) -> int:
    """Length of an attention head, given or implied."""
    if config.get("head_dim") is not None:
        return size(config, "head_dim", title)
    return size(config, "hidden_size", title) // size(config, "num_attention_heads", title)


def target_size(target: Config, key: str) -> int:
    """A size of the target. Raises BadCheckpoint where its config.json lacks it."""
    return required(text_config(target), key, int, TARGET)


def check_fit(title: str, ours: Mapping[str, int], target: Config) -> None:
    """Compare sizes, by their keys in the target's config.json. Raises Mismatch, naming both sides."""
    for key, value in ours.items():
        theirs = target_size(target, key)
        if value != theirs:
            what = key.replace("_", " ")
            raise Mismatch(f"{title} is made for a target of {what} {value}, this one has {theirs}: {OTHER}")


def check_layers(title: str, capture: Iterable[int], target: Config) -> None:
    """Captured layer outputs must exist. Raises Mismatch, and BadCheckpoint for the embedding as one of them.

    The input of layer 0 counts as output -1 while layer ids are read. It is never recorded: to what reads the
    record, and to Python, -1 is the last.
    """
    layers = target_size(target, "num_hidden_layers")
    for index in capture:
        if index == -1:
            raise BadCheckpoint(
                f"{title} reads the embedding of its target (the input of layer 0), and only outputs of "
                "layers can be captured: use a drafter that reads those"
            )
        if not 0 <= index < layers:
            raise Mismatch(
                f"{title} reads layer {index} of its target, this one has {layers} layers: {OTHER}"
            )
