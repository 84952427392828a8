"""Convert drafters: a file for each family, or for several similar ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mlx_spec.checkpoint.drafter_families import FAMILIES, DrafterFamily, drafter_family, refuse_unsupported
from mlx_spec.checkpoint.files import shortened
from mlx_spec.errors import BadCheckpoint


def family_of(config: Mapping[str, Any], names: Collection[str]) -> DrafterFamily:
    """Return the family of a drafter by its config.json and the names of its tensors.

    Raises BadCheckpoint for an unknown drafter.
    """
    refuse_unsupported(config, names)
    family = drafter_family(config, names)
    family = family or next((each for each in FAMILIES if each.is_inside(config, names)), None)
    if family is not None:
        return family
    stated = f"model_type {config.get('model_type')!r} and tensors such as {shortened(sorted(names))}"
    known = ", ".join(each.kind for each in FAMILIES)
    raise BadCheckpoint(f"no drafter family has {stated}: known are {known}")
