"""The drafter families that the converter knows: the only list of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mlx_spec.checkpoint import shortened
from mlx_spec.convert.families.deepseek_mtp import DEEPSEEK_MTP
from mlx_spec.convert.families.dflash import DFLASH
from mlx_spec.convert.families.eagle3 import EAGLE3
from mlx_spec.convert.families.family import Config, Converted, Family, Tensors
from mlx_spec.convert.families.gemma4_assistant import GEMMA4_ASSISTANT
from mlx_spec.convert.families.glm_mtp import GLM_MTP
from mlx_spec.convert.families.medusa import MEDUSA
from mlx_spec.convert.families.pard import PARD
from mlx_spec.convert.families.peagle import PEAGLE
from mlx_spec.convert.families.qwen_mtp import QWEN_MTP
from mlx_spec.errors import BadCheckpoint

__all__ = ["FAMILIES", "Config", "Converted", "Family", "Tensors", "family_of"]

# The first that recognises a checkpoint has it: what is built on another family comes before it.
FAMILIES: tuple[Family, ...] = (
    GEMMA4_ASSISTANT,
    PEAGLE,
    EAGLE3,
    DFLASH,
    MEDUSA,
    PARD,
    QWEN_MTP,
    DEEPSEEK_MTP,
    GLM_MTP,
)


def family_of(config: Mapping[str, Any], names: Collection[str]) -> Family:
    """The family of a drafter checkpoint, by its config.json and the names of its tensors.

    Raises BadCheckpoint, which names what was found and what is known.
    """
    for family in FAMILIES:
        if family.recognises(config, names):
            return family
    found = f"model_type {config.get('model_type')!r} and tensors such as {shortened(sorted(names))}"
    known = ", ".join(family.name for family in FAMILIES)
    raise BadCheckpoint(f"no drafter family has {found}: known are {known}")
