"""Why is a drafter not accepted? Known mistakes, each undone in turn on the drafter at hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mlx_spec.checkpoint import WEIGHTS, read_config
from mlx_spec.convert.families import gemma4_probe
from mlx_spec.convert.families.probe import probes
from mlx_spec.convert.families.variant import Variant
from mlx_spec.drafters import open_drafter
from mlx_spec.errors import BadCheckpoint, Mismatch

# By family: the variants of the unquantized drafter in a folder. Others run as their config.json says.
VARIANTS: dict[str, Callable[[Path], list[Variant]]] = {"gemma4_assistant": gemma4_probe.variants}


def variants(family: str, folder: Path, target_config: Mapping[str, Any]) -> list[Variant]:
    """The known mistakes of a family, undone on the unquantized drafter in `folder`. It may have none."""
    return VARIANTS[family](folder) if family in VARIANTS else _by_convention(folder, target_config)


def _by_convention(folder: Path, target_config: Mapping[str, Any]) -> list[Variant]:
    """The drafter under other conventions, in folders beside its own that share its weights."""
    result = []
    for number, probe in enumerate(probes(read_config(folder))):
        changed, config = folder.with_name(f".probe-{number}"), probe.apply(read_config(folder))
        changed.mkdir()
        for file in folder.glob(WEIGHTS):
            (changed / file.name).symlink_to(file)
        (changed / "config.json").write_text(json.dumps(config))
        try:
            source = open_drafter(changed, config, target_config)
        except (BadCheckpoint, Mismatch):  # its runtime knows of no such convention
            continue
        result.append(Variant(probe.explanation, source.needs, source.make))
    return result
