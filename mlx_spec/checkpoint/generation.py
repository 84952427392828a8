"""Read generation_config.json: tokens that a model must not say, and its own sampling settings.

transformers applies this file by itself. Here tokens that it forbids are never generated, programs for people
take its sampling settings as defaults, and settings that have no effect are named.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_spec.checkpoint.config import Checkpoint

# Keys that change a text in transformers and have no effect here -> values that have none there either.
NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "max_length": (20,),
    "max_new_tokens": (),
    "max_time": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "sequence_bias": ({}, []),
    "exponential_decay_length_penalty": (),
    "stop_strings": ([],),
    "typical_p": (1,),
    "top_h": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "guidance_scale": (1,),
    "watermarking_config": (),
    "dola_layers": (),
}


@dataclass(frozen=True)
class GenerationConfig:
    """The settings in generation_config.json, except for the tokens that end an answer."""

    suppressed: frozenset[int] = frozenset()  # tokens that are never generated
    suppressed_first: frozenset[int] = frozenset()  # tokens that do not begin an answer
    sampling: Mapping[str, float] = field(default_factory=dict)  # defaults of `Sampling`, where it has others
    without_effect: tuple[str, ...] = ()  # keys with their values


def read_generation_config(checkpoint: Checkpoint, eos: Collection[int] = ()) -> GenerationConfig:
    """Return the settings of a checkpoint. As in transformers, no token in `eos` is a bad word alone."""
    config = checkpoint.json("generation_config.json")
    words = config.get("bad_words_ids") or []
    words = [word for word in words if isinstance(word, list)] if isinstance(words, list) else []
    bad = [word[0] for word in words if len(word) == 1 and word[0] not in list(eos)]
    names = [key for key, neutral in NO_EFFECT.items() if _is_set(config, key, neutral)]
    if any(len(word) > 1 for word in words):
        names.append("bad_words_ids")
    return GenerationConfig(
        _tokens([*_listed(config.get("suppress_tokens")), *bad]),
        _tokens(_listed(config.get("begin_suppress_tokens"))),
        _sampling(config),
        tuple(f"{name} {str(config[name])[:40]}" for name in names),
    )


def _sampling(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the sampling settings that are stated and not neutral. Without sampling, the text is greedy."""
    neutral = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    bounds = {
        "temperature": (1e-4, 1e4),
        "top_p": (1e-6, 1),
        "min_p": (0, 1),
        "repetition_penalty": (0.01, 100),
    }
    stated = {key: config[key] for key in neutral if _is_number(config.get(key))}
    if config.get("do_sample") is False:
        stated = {key: value for key, value in stated.items() if key == "repetition_penalty"}
    elif config.get("do_sample") or stated.keys() - {"repetition_penalty"}:
        stated = {"temperature": 1.0, **stated}
    if "top_k" in stated:
        stated["top_k"] = max(int(stated["top_k"]), 0)
    within = {k: v for k, v in stated.items() if k not in bounds or bounds[k][0] <= v <= bounds[k][1]}
    return {key: value for key, value in within.items() if value != neutral[key]}


def _is_set(config: Mapping[str, Any], key: str, neutral: tuple[Any, ...]) -> bool:
    return config.get(key) is not None and config[key] is not False and config[key] not in neutral


def _is_number(value: Any) -> bool:
    # No text of an integer is too long, but no float holds one of 400 digits.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _tokens(values: Collection[Any]) -> frozenset[int]:
    return frozenset(v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0)
