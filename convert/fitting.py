"""What kind of drafter a checkpoint is, and which targets it fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mlx_spec.convert.catalogue import MADE_FOR, SHAPES, Shape
from mlx_spec.convert.contents import Tensor
from mlx_spec.known import ASSISTANT, DRAFTERS, MEDUSA, drafter_of, is_mtp

Config = Mapping[str, Any]
Tensors = Mapping[str, Tensor]

DECLARED = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
WORDS = {
    "hidden_size": "hidden size",
    "vocab_size": "vocabulary",
    "layers": "layers",
    "window": "sliding window",
    "kv_heads": "K/V heads",
    "head_dim": "head dimension",
    "global_kv_heads": "K/V heads of full attention",
    "global_head_dim": "head dimension of full attention",
}


def text_config(config: Config) -> Config:
    """The part of a config.json that describes the language model."""
    for key in ("text_config", "layer_config", "transformer_layer_config", "llm_config", "language_config"):
        if isinstance(config.get(key), Mapping):
            return config[key]  # type: ignore[no-any-return]
    return config


def number(config: Config, *keys: str) -> int | None:
    """The first of `keys` that holds an integer."""
    found = (config.get(key) for key in keys)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), None)


def target_shape(config: Config) -> Shape:
    """What a target with this config.json offers to a drafter."""
    text = text_config(config)
    heads, kv_heads = number(text, "num_attention_heads"), number(text, "num_key_value_heads")
    hidden, head_dim = number(text, "hidden_size"), number(text, "head_dim")
    if head_dim is None and hidden and heads:
        head_dim = hidden // heads
    return Shape(
        hidden,
        number(text, "vocab_size") or number(config, "vocab_size"),
        number(text, "num_hidden_layers"),
        number(text, "sliding_window") if text.get("use_sliding_window") is not False else None,
        kv_heads or heads,
        head_dim,
        number(text, "num_global_key_value_heads") or kv_heads or heads,
        number(text, "global_head_dim") or head_dim,
    )


def needed_shape(kind: str, config: Config, tensors: Tensors) -> Shape:
    """What a drafter of this kind asks of its target."""
    converted = config.get("target")  # our converter writes down what it was made for
    if kind != ASSISTANT and isinstance(converted, Mapping):
        keys = ("hidden_size", "vocab_size", "num_hidden_layers")
        return Shape(*(number(converted, key) for key in keys))
    own = target_shape(config)
    vocab = _rows(tensors, "t2d") or own.vocab_size
    if kind == ASSISTANT:
        return dataclasses.replace(own, hidden_size=number(config, "backbone_hidden_size"), layers=None)
    if kind in ("EAGLE-3", "P-EAGLE"):
        fused = (_columns(tensors, "fc.weight") or 0) // 3  # [D, 3 D of the target]
        return Shape(number(config, "target_hidden_size") or fused or own.hidden_size, vocab)
    if kind == "DFlash":
        return Shape(own.hidden_size, vocab, number(config, "num_target_layers"))
    if kind == "Medusa":
        head = next((name for name in tensors if MEDUSA.match(name)), "")
        return Shape(_columns(tensors, head) or own.hidden_size, own.vocab_size)
    return Shape() if kind == "PARD" else Shape(own.hidden_size, vocab)  # PARD needs the same tokenizer


def misfits(needs: Shape, has: Shape) -> list[str]:
    """Where a target is not what a drafter needs; nothing if it fits."""
    pairs = zip(dataclasses.asdict(needs).items(), dataclasses.asdict(has).values(), strict=True)
    return [
        f"{WORDS[key]} {need} instead of {found}" for (key, need), found in pairs if need not in (None, found)
    ]


def targets_of(name: str, kind: str, config: Config, tensors: Tensors) -> tuple[str, ...]:
    """The published targets that a drafter fits: by its name, by its own word, and by the shapes it needs."""
    found = [MADE_FOR[name]] if name in MADE_FOR else []
    found += [target for target in (_says(config),) if target]
    if kind in (ASSISTANT, "DFlash", "EAGLE-3", "P-EAGLE"):
        needs = needed_shape(kind, config, tensors)
        found += [
            f"google/{DRAFTERS[base].partition('/')[2].removesuffix('-assistant')}"
            for base, shape in SHAPES.items()
            if needs.hidden_size and not misfits(needs, shape)
        ]
    return tuple(dict.fromkeys(found))


def drafters_of(name: str, config: Config) -> tuple[str, ...]:
    """The published drafters for a target: by its name, or by its shape if that is a known one."""
    own = drafter_of(name)
    made = [drafter for drafter, target in MADE_FOR.items() if target == name]
    shape = target_shape(config)
    same = [DRAFTERS[base] for base, known in SHAPES.items() if known == shape]
    return tuple(dict.fromkeys([*([own] if own else []), *made, *same]))


def declared_heads(config: Config) -> int:
    """How many prediction layers config.json promises beside the model itself."""
    return max(number(text_config(config), *DECLARED) or 0, number(config, *DECLARED) or 0)


def head_tensors(tensors: Tensors) -> int:
    """How many tensors belong to prediction heads inside a target."""
    return sum(is_mtp(name) or MEDUSA.match(name) is not None for name in tensors)


def _says(config: Config) -> str | None:
    """The target that a drafter's config.json names."""
    speculators = config.get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, Mapping) else None
    named = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    named = named or config.get("base_model_name_or_path")
    return named if isinstance(named, str) and named else None


def _columns(tensors: Tensors, name: str) -> int | None:
    found = tensors.get(name)
    return found.shape[1] if found and len(found.shape) == 2 else None


def _rows(tensors: Tensors, name: str) -> int | None:
    found = tensors.get(name)
    return found.shape[0] if found and found.shape else None
