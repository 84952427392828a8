"""What is known of published checkpoints: the drafter made for a target, keys that some configs lack."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
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

# Keys that transformers leaves out, where mlx-lm's defaults are those of another size.
UNIFIED_DEFAULTS = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False}


def drafter_of(repository: str) -> str | None:
    """The repository of the drafter made for a target repository; None if there is no known one."""
    owner, _, name = repository.partition("/")
    return DRAFTERS.get(PRECISION.sub("", name.lower())) if owner in OWNERS else None


def mended(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` in the form that mlx-lm reads: the same values under the keys of the published checkpoints."""
    result = copy.deepcopy(dict(config))
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


def _merge_layers(text: dict[str, Any]) -> None:
    """transformers 5.23 writes `per_layer_config`; mlx-lm reads the keys that hold for all full layers."""
    layers = text.pop("per_layer_config") or {}
    full = [i for i, kind in enumerate(text.get("layer_types") or []) if kind == "full_attention"]
    own = layers.get(str(full[0]), {}) if full else {}
    text.setdefault("global_head_dim", own.get("head_dim", text.get("head_dim")))
    if own.get("num_key_value_heads") is not None:
        text.setdefault("num_global_key_value_heads", own["num_key_value_heads"])
