"""What is known of published checkpoints.

The drafter made for a target, what tells the kind of a drafter, and keys that some configs lack.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

# Base name of a target repository, whatever its owner and quantization -> its drafter.
DRAFTERS = {
    "gemma-4-e2b-it": "google/gemma-4-E2B-it-assistant",
    "gemma-4-e4b-it": "google/gemma-4-E4B-it-assistant",
    "gemma-4-12b-it": "google/gemma-4-12B-it-assistant",
    "gemma-4-26b-a4b-it": "google/gemma-4-26B-A4B-it-assistant",
    "gemma-4-31b-it": "google/gemma-4-31B-it-assistant",
}
OWNERS = ("google", "mlx-community")
PRECISION = re.compile(r"-(\d(\.\d+)?-?bit|bf16|fp16|f16|mxfp4|mxfp8|nvfp4|dwq|qat|optiq|mlx|q\d\w*)(?=-|$)")

MTP = ("mtp.", ".eh_proj.", ".enorm.", ".hnorm.", ".shared_head.")  # in names of tensors
MEDUSA = re.compile(r"^(medusa_head\.|heads\.)?\d+\.(0\.linear|res\.0)\.weight$")
LAYER = re.compile(r"(.*\.)?layers\.\d+\.")
ASSISTANT = "Gemma 4 assistant"

# Keys that transformers leaves out, where mlx-lm's defaults are those of another size.
UNIFIED_DEFAULTS = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False}


def drafter_of(repository: str) -> str | None:
    """The repository of the drafter made for a target repository; None if there is no known one."""
    owner, _, name = repository.partition("/")
    return DRAFTERS.get(PRECISION.sub("", name.lower())) if owner in OWNERS else None


def drafter_kind(config: Mapping[str, Any], tensors: Collection[str]) -> str | None:
    """The kind of drafter, in the words of its authors; None for a model that is a target.

    `tensors` are the names of its tensors.
    """
    said = [config.get("model_type"), config.get("speculators_model_type")]
    words = " ".join(map(str, [*said, *(config.get("architectures") or [])])).lower()
    words = re.sub(r"[^a-z0-9 ]", "", words)
    return next((kind for kind, recognises in KINDS.items() if recognises(words, config, tensors)), None)


def is_mtp(name: str) -> bool:
    """Whether a tensor of this name belongs to a multi-token head."""
    return any(part in name for part in MTP)


def _is_alone(tensors: Collection[str]) -> bool:
    """Whether there is a multi-token head, and nothing else."""
    heads = [name for name in tensors if is_mtp(name)]
    layers = tuple({match[0] for match in map(LAYER.match, heads) if match})
    return bool(heads) and all(is_mtp(name) or name.startswith(layers) for name in tensors)


def mended(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` in the form that mlx-lm reads: the same values under the keys of the published checkpoints."""
    result = copy.deepcopy(dict(config))
    _spread_rope(result)
    text = result.get("text_config")
    if result.get("model_type") not in ("gemma4", "gemma4_unified") or not isinstance(text, dict):
        return result
    if result["model_type"] == "gemma4_unified":
        text.update({key: value for key, value in UNIFIED_DEFAULTS.items() if key not in text})
    if "vocab_size" in text:
        result.setdefault("vocab_size", text["vocab_size"])  # mlx-lm takes the top-level one
    if "per_layer_config" in text:
        _merge_layers(text)
    return result


def _spread_rope(config: dict[str, Any]) -> None:
    """transformers 5 writes `rope_parameters`; some models of mlx-lm look for `rope_theta` beside them."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope or config.get("rope_theta") is not None:
        return
    config["rope_theta"] = rope["rope_theta"]
    if rope.get("rope_type", "default") != "default" and config.get("rope_scaling") is None:
        config["rope_scaling"] = rope


def _merge_layers(text: dict[str, Any]) -> None:
    """transformers 5.23 writes `per_layer_config`; mlx-lm reads the keys that hold for all full layers."""
    layers = text.pop("per_layer_config") or {}
    full = [i for i, kind in enumerate(text.get("layer_types") or []) if kind == "full_attention"]
    own = layers.get(str(full[0]), {}) if full else {}
    text.setdefault("global_head_dim", own.get("head_dim", text.get("head_dim")))
    if own.get("num_key_value_heads") is not None:
        text.setdefault("num_global_key_value_heads", own["num_key_value_heads"])


# In this order: a P-EAGLE is an EAGLE-3 with more in it. The words are of model_type and architectures.
KINDS: dict[str, Callable[[str, Mapping[str, Any], Collection[str]], bool]] = {
    ASSISTANT: lambda words, config, tensors: "gemma4assistant" in words or "gemma4unifiedassistant" in words,
    "P-EAGLE": lambda words, config, tensors: "peagle" in words or "mask_hidden" in tensors,
    "DFlash": lambda words, config, tensors: "dflash" in words or "dflash_config" in config,
    "EAGLE-3": lambda words, config, tensors: (
        "eagle3" in words or "draft_vocab_size" in config or "d2t" in tensors
    ),
    "PARD": lambda words, config, tensors: "pard" in words.split() or "pard_token" in config,
    "Medusa": lambda words, config, tensors: (
        "medusa" in words or ("medusa_num_heads" in config and "num_hidden_layers" not in config)
    ),
    "MTP head": lambda words, config, tensors: (
        any(word.endswith("mtp") for word in words.split()) or _is_alone(tensors)
    ),
}
