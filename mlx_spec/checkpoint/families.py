"""Families of checkpoints: kinds of drafters, the shape that one needs, and the modules of mlx-lm."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Config = Mapping[str, Any]

MANIFEST = "pair.json"  # of a folder with a converted pair


@dataclass(frozen=True)
class TargetShape:
    """The shape that a drafter needs, or that a target has. None if it does not matter."""

    hidden_size: int | None = None
    vocab_size: int | None = None
    layers: int | None = None
    window: int | None = None
    kv_heads: int | None = None  # of sliding layers, or of all
    head_dim: int | None = None
    global_kv_heads: int | None = None  # of full layers
    global_head_dim: int | None = None


# --- kinds of drafters

ASSISTANT, PEAGLE, DFLASH, EAGLE3 = "Gemma 4 assistant", "P-EAGLE", "DFlash", "EAGLE-3"
PARD, MEDUSA, MTP = "PARD", "Medusa", "MTP head"
MTP_PARTS = ("mtp.", ".eh_proj.", ".enorm.", ".hnorm.", ".shared_head.")  # of names of tensors
MEDUSA_TENSOR = re.compile(r"^(medusa_head\.|heads\.)?\d+\.(0\.linear|res\.0)\.weight$")
LAYER = re.compile(r"(.*\.)?layers\.\d+\.")


def drafter_kind(config: Config, tensors: Collection[str]) -> str | None:
    """Return the kind of a drafter by config and names of tensors, None for a target."""
    said = [config.get(key) for key in ("model_type", "speculators_model_type", "architectures")]
    words = " ".join(map(str, said)).lower()
    words = re.sub(r"[^a-z0-9 ]", "", words)
    return next((kind for kind, recognizes in KINDS.items() if recognizes(words, config, tensors)), None)


def is_mtp(name: str) -> bool:
    """Return True if a tensor of this name belongs to a multi-token head."""
    return any(part in name for part in MTP_PARTS)


def _is_mtp_alone(tensors: Collection[str]) -> bool:
    """Return True if there is a multi-token head and nothing else."""
    heads = [name for name in tensors if is_mtp(name)]
    layers = tuple({match[0] for match in map(LAYER.match, heads) if match})
    return bool(heads) and all(is_mtp(name) or name.startswith(layers) for name in tensors)


# In this order: a P-EAGLE is an EAGLE-3 with more in it. The words are those of model_type and architectures.
KINDS: dict[str, Callable[[str, Config, Collection[str]], bool]] = {
    ASSISTANT: lambda words, config, tensors: "gemma4assistant" in words or "gemma4unifiedassistant" in words,
    PEAGLE: lambda words, config, tensors: (
        "peagle" in words or any(name.endswith("mask_hidden") for name in tensors)
    ),
    DFLASH: lambda words, config, tensors: "dflash" in words or "dflash_config" in config,
    EAGLE3: lambda words, config, tensors: (
        "eagle3" in words or "draft_vocab_size" in config or any(name.endswith("d2t") for name in tensors)
    ),
    PARD: lambda words, config, tensors: "pard" in words.split() or "pard_token" in config,
    MEDUSA: lambda words, config, tensors: (
        "medusa" in words or ("medusa_num_heads" in config and "num_hidden_layers" not in config)
    ),
    MTP: lambda words, config, tensors: (
        any(word.endswith("mtp") for word in words.split()) or _is_mtp_alone(tensors)
    ),
}


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
    """Return the module of mlx_lm.models for a model type, None if there is none. Imports nothing of it."""
    module = REMAPPED.get(model_type, model_type)
    package = importlib.util.find_spec("mlx_lm")
    places = (package and package.submodule_search_locations) or ()
    files = [Path(place) / "models" / f"{module}.py" for place in places]
    return module if module.isidentifier() and any(file.is_file() for file in files) else None
