"""The drafter families that the converter knows: the only list of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mlx_spec.checkpoint.families import drafter_kind
from mlx_spec.checkpoint.files import shortened
from mlx_spec.errors import BadCheckpoint

from .common import Converted, Family
from .dflash import DFLASH
from .eagle3 import EAGLE3, PEAGLE
from .gemma4 import GEMMA4
from .medusa import MEDUSA
from .mtp import DEEPSEEK_MTP, GLM_MTP, QWEN_MTP
from .pard import PARD

__all__ = ["FAMILIES", "Converted", "Family", "family_of"]

FAMILIES: tuple[Family, ...] = (
    GEMMA4,
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
    """Return the family of a drafter by its config.json and the names of its tensors.

    Raises BadCheckpoint, which names what was found and what is known.
    """
    kind = drafter_kind(config, names)
    for family in FAMILIES:
        if family.kind is not None and family.kind == kind:
            return family
        if family.recognizes is not None and family.recognizes(config, names):
            return family
    found = f"model_type {config.get('model_type')!r} and tensors such as {shortened(sorted(names))}"
    known = ", ".join(family.name for family in FAMILIES)
    raise BadCheckpoint(f"no drafter family has {found}: known are {known}")
