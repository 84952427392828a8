"""Facts about families of checkpoints: the shape of a target, and the modules of mlx-lm."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_spec.checkpoint.headers import Tensors

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
    places = (package and package.submodule_search_locations) or ()
    files = [Path(place) / "models" / f"{module}.py" for place in places]
    return module if any(file.is_file() for file in files) else None


# --- vision towers


def _towers() -> dict[str, tuple[str, ...]]:
    """Return the prefixes of the tower's tensor names by model type, without "model."."""
    return {
        "gemma3": ("vision_tower.", "multi_modal_projector."),
        "gemma4": ("vision_tower.", "embed_vision."),
        "gemma4_unified": ("vision_embedder.", "embed_vision."),
        **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), ("visual.", "vision_tower.")),
    }


def tower_names(config: Config, names: Iterable[str]) -> list[str]:
    """Return the tensors of a vision tower of a known family; none if config.json names no tower."""
    prefixes = _towers().get(str(config.get("model_type"))) if config.get("vision_config") else None
    if prefixes is None:
        return []
    # Tensors that are computed from config.json, or that belong to unused parts.
    unused = r"rotary_emb|inv_freq|position_ids$|vision_model\.head\."
    return [n for n in names if n.removeprefix("model.").startswith(prefixes) and not re.search(unused, n)]


def tower_bytes(config: Config, tensors: Tensors) -> int:
    """Return the bytes of a vision tower of a known family, 0 if there is none."""
    return sum(tensors[name].nbytes for name in tower_names(config, tensors))


def missing_tower(config: Config, tensors: Tensors) -> str | None:
    """Return why a checkpoint reads no pictures; None if it holds a tower that is known here."""
    if "gguf" in config:
        return "a GGUF file holds no vision tower; the file beside it (mmproj) is not read"
    if not config.get("vision_config"):
        return "it is a text model: its config.json names no vision tower"
    if (kind := config.get("model_type")) not in _towers():
        return f"the vision tower of {kind} is not read here; those of {', '.join(_towers())} are"
    if not tower_bytes(config, tensors):
        return (
            "its config.json names a vision tower, but the checkpoint holds none: it was converted for text"
        )
    return None
