"""Open drafters. Their families are in `checkpoint/drafter_families.py`; README.md says how to add one."""

from __future__ import annotations

from mlx_spec.checkpoint.config import Checkpoint
from mlx_spec.checkpoint.drafter_families import OPENED_AS
from mlx_spec.checkpoint.files import LOADING_ERRORS, one_line
from mlx_spec.checkpoint.targets import Config, mlx_lm_module
from mlx_spec.drafters.draft_model import DraftModel
from mlx_spec.drafters.drafter import DrafterSource
from mlx_spec.drafters.retokenized import open_retokenized
from mlx_spec.errors import BadCheckpoint

__all__ = ["DrafterSource", "open_drafter", "open_retokenized"]


def open_drafter(checkpoint: Checkpoint, config: Config, target_config: Config) -> DrafterSource:
    """Load a drafter, whose config.json is `config`, for a target with `target_config`.

    Raises BadCheckpoint for an unknown family and a damaged checkpoint, Mismatch if the two do not fit.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise BadCheckpoint(
            f"config.json in {checkpoint.folder} has no 'model_type': this is not a drafter checkpoint"
        )
    family = OPENED_AS.get(model_type)
    if family is None and mlx_lm_module(model_type) is None:
        known = ", ".join(sorted(OPENED_AS))
        raise BadCheckpoint(
            f"no drafter family for model_type {model_type!r}: known are {known} and the models of mlx-lm"
        )
    try:
        open_family = family.open if family else DraftModel.open
        source: DrafterSource = open_family(checkpoint, config, target_config)
        return source
    except LOADING_ERRORS as error:  # a number in config.json that no network can have
        raise BadCheckpoint(
            f"{checkpoint.folder} cannot be loaded as {model_type}: {one_line(error)}"
        ) from error
