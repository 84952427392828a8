"""Say who owns a tensor, by its name: the language model, or another part, which it can do without."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Literal, cast

from mlx_spec.checkpoint.headers import Tensors
from mlx_spec.checkpoint.quantizers import ACTIVATION_SCALE
from mlx_spec.checkpoint.targets import Config

Owner = Literal["vision", "audio", "mtp", "config", "training", "scale", "mask"]
MULTI_TOKEN_HEAD = "a multi-token head"
IMAGES_AND_SOUND = "images and sound: the language model alone is converted"


def _words(words: str) -> str:
    """Return a pattern: a part of a name begins with one of `words`, or has it between _ and _."""
    return rf"(?:^|\.)(?:{words})|_(?:{words})(?:[._]|$)"


# Owner -> the names of its tensors, and why a language model is without them.
OWNERS: dict[Owner, tuple[str, str]] = {
    "vision": (_words(r"vision|visual|image|video|multi_?modal|mm(?=[._]|$)"), IMAGES_AND_SOUND),
    "audio": (_words("audio|speech"), IMAGES_AND_SOUND),
    "mtp": (r"(?:^|\.)(?:mtp|nextn)[._]|\.(?:eh_proj|enorm|hnorm|shared_head)\.", MULTI_TOKEN_HEAD),
    "config": (r"rotary_emb|rope\.freqs|inv_freq", "computed from config.json"),
    "training": (r"\.(?:input|output)_(?:max|min)$", "ranges seen in training"),
    "scale": (ACTIVATION_SCALE, "scales of FP8 activations, which are not quantized here"),
    "mask": (r"\.(?:attn|attention)\.(?:masked_)?bias$", "the causal mask"),
}
_OWNER = re.compile("|".join(f"(?P<{owner}>{pattern})" for owner, (pattern, _) in OWNERS.items()))


def owner_of(name: str) -> Owner | None:
    """Return the owner of a tensor in `OWNERS`; None if it belongs to the language model."""
    return _owner_of(re.sub(r"\d+", "0", name))  # layers and experts are alike: a model has a hundred kinds


@lru_cache(4096)
def _owner_of(name: str) -> Owner | None:
    match = _OWNER.search(name)
    return cast(Owner, match.lastgroup) if match else None


def is_of_language(name: str) -> bool:
    """Return True unless a tensor belongs to another modality, or to a head for several tokens."""
    return owner_of(name) not in ("vision", "audio", "mtp")


# --- vision towers

TOWERS = ("gemma3", "gemma4", "gemma4_unified", "qwen3_5", "qwen3_5_moe")  # model types whose towers are read


def tower_names(config: Config, names: Iterable[str]) -> list[str]:
    """Return the tensors of a vision tower of a known family; none if config.json names no tower."""
    if config.get("model_type") not in TOWERS or not config.get("vision_config"):
        return []
    # Tensors that are computed from config.json, or that belong to unused parts.
    unused = re.compile(r"rotary_emb|inv_freq|position_ids$|vision_model\.head\.")
    return [name for name in names if owner_of(name) == "vision" and not unused.search(name)]


def tower_bytes(config: Config, tensors: Tensors) -> int:
    """Return the bytes of a vision tower of a known family, 0 if there is none."""
    return sum(tensors[name].nbytes for name in tower_names(config, tensors))


def missing_tower(config: Config, tensors: Tensors) -> str | None:
    """Return why a checkpoint reads no pictures; None if it holds a tower that is known here."""
    if "gguf" in config:
        return "a GGUF file holds no vision tower; the file beside it (mmproj) is not read"
    if not config.get("vision_config"):
        return "it is a text model: its config.json names no vision tower"
    if (model_type := config.get("model_type")) not in TOWERS:
        return f"the vision tower of {model_type} is not read here; those of {', '.join(TOWERS)} are"
    if not tower_bytes(config, tensors):
        return (
            "its config.json names a vision tower, but the checkpoint holds none: it was converted for text"
        )
    return None
