"""Drafter families: the only registry. README.md says how to add one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mlx_spec.checkpoint.families import mlx_lm_module
from mlx_spec.checkpoint.files import LOADING_ERRORS, one_line
from mlx_spec.drafters.dflash import open_dflash
from mlx_spec.drafters.draft_model import open_draft_model, open_pard
from mlx_spec.drafters.drawing import DrafterSource
from mlx_spec.drafters.eagle3 import open_eagle3, open_peagle
from mlx_spec.drafters.gemma4 import open_assistant
from mlx_spec.drafters.medusa import open_medusa
from mlx_spec.drafters.mtp import open_mtp
from mlx_spec.drafters.retokenized import open_retokenized
from mlx_spec.errors import BadCheckpoint

__all__ = ["FAMILIES", "DrafterSource", "Opener", "open_drafter", "open_retokenized"]


Opener = Callable[[Path, Mapping[str, Any], Mapping[str, Any]], DrafterSource]


# By `model_type` of the checkpoint. Other models that mlx-lm knows become draft models.
FAMILIES: dict[str, Opener] = {
    "deepseek_mtp": open_mtp,
    "dflash": open_dflash,
    "eagle3": open_eagle3,
    "gemma4_assistant": open_assistant,
    "gemma4_unified_assistant": open_assistant,
    "glm_mtp": open_mtp,
    "medusa": open_medusa,
    "pard": open_pard,
    "peagle": open_peagle,
    "qwen_mtp": open_mtp,
}


def open_drafter(path: Path, config: Mapping[str, Any], target_config: Mapping[str, Any]) -> DrafterSource:
    """Load the drafter in `path`, whose config.json is `config`, for a target with `target_config`.

    Raises BadCheckpoint for an unknown family and a damaged checkpoint, Mismatch if the two do not fit.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise BadCheckpoint(f"config.json in {path} has no 'model_type': this is not a drafter checkpoint")
    opener = FAMILIES.get(model_type)
    if opener is None and mlx_lm_module(model_type) is not None:
        opener = open_draft_model
    if opener is None:
        known = ", ".join(sorted(FAMILIES))
        raise BadCheckpoint(
            f"no drafter family for model_type {model_type!r}: known are {known} and the models of mlx-lm"
        )
    try:
        return opener(path, config, target_config)
    except LOADING_ERRORS as error:  # a number in config.json that no network can have
        raise BadCheckpoint(f"{path} cannot be loaded as {model_type}: {one_line(error)}") from error
