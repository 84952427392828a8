"""The shape of a target, and the module of mlx-lm that runs it."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Config = Mapping[str, Any]

MANIFEST = "pair.json"  # of a folder with a converted pair


@dataclass(frozen=True)
class TargetShape:
    """The shape of a target, or the shape that a drafter needs. None if a size does not matter."""

    hidden_size: int | None = None
    vocab_size: int | None = None
    layers: int | None = None
    window: int | None = None
    kv_heads: int | None = None  # of sliding layers, or of all
    head_dim: int | None = None
    global_kv_heads: int | None = None  # of full-attention layers
    global_head_dim: int | None = None


# --- mlx-lm

# Model types that mlx-lm runs by the module of another: MODEL_REMAPPING of mlx_lm.utils 0.32.2, copied
# because its import takes a second and needs MLX. A test compares them.
REMAPPED = {
    "mistral": "llama",
    "llava": "mistral3",
    "phi-msft": "phixtral",
    "falcon_mamba": "mamba",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "qwen2_5_vl": "qwen2_vl",
    "minimax_m2": "minimax",
    "iquestcoder": "llama",
    "xverse": "llama",
    "gemma4_unified": "gemma4",
    "deepseek_v41_text": "deepseek_v41",
}


def mlx_lm_module(model_type: str) -> str | None:
    """Return the module of mlx_lm.models for a model type; None if there is none. Does not import mlx-lm."""
    module = REMAPPED.get(model_type, model_type)
    if not module.isidentifier() or len(module) > 200:  # no name of a file
        return None
    package = importlib.util.find_spec("mlx_lm")
    folders = (package and package.submodule_search_locations) or ()
    files = [Path(folder) / "models" / f"{module}.py" for folder in folders]
    return module if any(file.is_file() for file in files) else None
