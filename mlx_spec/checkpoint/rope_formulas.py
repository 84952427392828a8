"""The rotary embedding that config.json states: its frequencies by the formulas of transformers.

Source: `modeling_rope_utils.py` of transformers 5.24. Angles are in radians for each position, by pair of
dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_spec.checkpoint.repairs import TEXT_CONFIGS
from mlx_spec.checkpoint.targets import Config

# Kinds for which frequencies are known here. Others are as the class of the model computes them.
SCALED = ("linear", "llama3", "yarn", "deepseek_yarn", "longrope", "su", "proportional")
# Model types whose classes in mlx-lm take long factors for texts of every length, as vLLM does.
ALWAYS_LONG = ("phi3", "phi3small", "phimoe", "minicpm3")


@dataclass(frozen=True)
class Rotation:
    """How a rotary embedding turns a head: one angle for each pair of dimensions, and a factor."""

    angles: tuple[float, ...]
    factor: float = 1.0  # of queries and keys

    def is_near(self, other: Rotation) -> bool:
        """Return True if two rotations differ by rounding alone."""
        close = (math.isclose(a, b, rel_tol=1e-4) for a, b in zip(self.angles, other.angles, strict=False))
        same = len(self.angles) == len(other.angles) and math.isclose(self.factor, other.factor, rel_tol=1e-4)
        return same and all(close)


def rope_kind(rope: Config) -> str:
    """Return the kind of a rope in config.json."""
    return str(rope.get("rope_type") or rope.get("type") or "default")


def is_longrope(rope: Config) -> bool:
    """Return True for a rope with factors for short texts and for long ones."""
    return rope_kind(rope) in ("longrope", "su")


def stretch_of(rope: Config) -> float:
    """Return how many times the context of training a rope reaches with the same angles at every length."""
    factor = rope.get("factor")
    stretches = rope_kind(rope) in ("linear", "yarn", "deepseek_yarn", "telechat3-yarn")
    return max(1.0, factor) if stretches and isinstance(factor, int | float) else 1.0


def stated_ropes(text: Config) -> dict[str | None, dict[str, Any]]:
    """Return the rotary parameters of a language model by kind of layer; under None for all layers.

    They are completed by values beside them, as transformers does.
    """
    parameters = _mapping(text.get("rope_parameters"))
    is_nested = any(isinstance(each, Mapping) for each in parameters.values())
    flat = _mapping(text.get("rope_scaling")) or parameters
    stated: Mapping[Any, Any] = parameters if is_nested else {None: flat}
    longest = text.get("max_position_embeddings")
    ropes: dict[str | None, dict[str, Any]] = {}
    for layers, each in stated.items():
        if not isinstance(each, Mapping):
            continue
        rope = {"rope_theta": text.get("rope_theta"), **each}
        rope["rope_type"] = rope_kind(each)
        rope["max_position_embeddings"] = longest
        if layers is not None:
            rope.pop("truncate", None)  # transformers looks for it beside the kinds of layers
        original = None if is_nested else text.get("original_max_position_embeddings")
        rope["original_max_position_embeddings"] = (
            original or each.get("original_max_position_embeddings") or longest
        )
        ropes[layers] = rope
    return ropes


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def is_split(rope: Config) -> bool:
    """Return True if transformers turns texts beyond the context of training by other angles."""
    longest, original = rope["max_position_embeddings"] or 0, rope["original_max_position_embeddings"] or 0
    differs = rope.get("short_factor") != rope.get("long_factor")
    return is_longrope(rope) and longest > original and differs


def without_longrope(config: Config) -> dict[str, Any]:
    """Return the keys of a config.json that change so that mlx-lm's class makes embeddings without longrope.

    Its embedding for longrope knows one set of factors, and one order of the dimensions of a head.
    """
    key = next((key for key in TEXT_CONFIGS if isinstance(config.get(key), Mapping)), None)
    text = config if key is None else config[key]
    if str(text.get("model_type", config.get("model_type"))) in ALWAYS_LONG:
        return {}
    ropes = {
        name: text[name]
        for name in ("rope_scaling", "rope_parameters")
        if isinstance(text.get(name), Mapping)
    }
    unscaled = {
        name: {**rope, "type": "default", "rope_type": "default"}
        for name, rope in ropes.items()
        if is_longrope(rope)
    }
    return unscaled if key is None or not unscaled else {key: {**text, **unscaled}}


def plain(dims: int, base: float, divisors: float | list[float] = 1.0, of: int | None = None) -> Rotation:
    """Return the rotation of `dims` dimensions without scaling. `divisors` divide the angles."""
    each = divisors if isinstance(divisors, list) else [divisors] * (dims // 2)
    angles = (base ** (-i / (of or dims)) / d for i, d in zip(range(0, dims, 2), each, strict=True))
    return Rotation(tuple(angles))


def stated_rotation(rope: Config, dims: int, *, is_long: bool = False) -> Rotation:
    """Return how `rope`, an entry of `stated_ropes`, turns `dims` dimensions. `is_long` chooses long factors.

    Raises KeyError, TypeError and ValueError for parameters that are missing or malformed.
    """
    kind, base = rope["rope_type"], float(rope["rope_theta"] or 10_000.0)
    match kind:
        case "linear":
            return plain(dims, base, float(rope["factor"]))
        case "proportional":
            turned = 2 * int(float(rope.get("partial_rotary_factor", 1.0)) * dims // 2)
            angles = plain(turned, base, float(rope.get("factor", 1.0)), of=dims).angles
            return Rotation((*angles, *[0.0] * (dims // 2 - turned // 2)))
        case "llama3":
            return _llama3(rope, plain(dims, base))
        case "yarn" | "deepseek_yarn":
            return _yarn(rope, dims, base)
        case "longrope" | "su":
            divisors = rope["long_factor" if is_long else "short_factor"]
            original, factor = float(rope["original_max_position_embeddings"]), rope.get("factor")
            ratio = float(factor or rope["max_position_embeddings"] / original)
            scale = 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original))
            return Rotation(plain(dims, base, divisors).angles, _or(rope.get("attention_factor"), scale))
    return plain(dims, base)


def _llama3(rope: Config, unscaled: Rotation) -> Rotation:
    factor, original = float(rope["factor"]), float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])

    def scaled(angle: float) -> float:
        turns = original * angle / (2 * math.pi)  # in the context of training
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        return (1 - share) * angle / factor + share * angle

    return Rotation(tuple(map(scaled, unscaled.angles)))


def _yarn(rope: Config, dims: int, base: float) -> Rotation:
    original = float(rope["original_max_position_embeddings"])
    factor = float(rope.get("factor") or rope["max_position_embeddings"] / original)

    def dimension(turns: float) -> float:
        """Return the pair of dimensions that turns so often in the context of training."""
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    high += 0.001 if low == high else 0
    shares = (min(max((i - low) / (high - low), 0.0), 1.0) for i in range(dims // 2))
    angles = plain(dims, base).angles
    mixed = tuple(a / factor * s + a * (1 - s) for a, s in zip(angles, shares, strict=True))

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    weight, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    both = magnitude(weight) / magnitude(of_all) if weight and of_all else magnitude(1.0)
    return Rotation(mixed, _or(rope.get("attention_factor"), both))


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else float(value)
