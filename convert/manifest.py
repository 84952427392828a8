"""pair.json: what a converted pair is made of, and whether it has proved itself."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlx_spec import __version__
from mlx_spec.convert.shards import WrittenFile, write_text
from mlx_spec.load import MANIFEST

FORMAT = 1
TARGET, DRAFTER = "target", "drafter"
NOT_RUN = {"result": "not run", "why": "--no-self-test"}


@dataclass(frozen=True)
class Part:
    """A target or a drafter, and where it came from."""

    name: str  # of the source, as it was asked for
    revision: str | None
    source_sha256: Mapping[str, str]  # of the source's weights, where they are published
    family: str  # model_type of a target, family of a drafter
    runnable: bool
    quantization: Mapping[str, Any] | None
    tensors: int
    left_out: Mapping[str, str]  # source tensor -> why
    unquantized: tuple[str, ...] = ()  # matrices left as they are although bits were asked for
    notes: tuple[str, ...] = ()
    files: tuple[WrittenFile, ...] = field(default=(), repr=False)

    def described(self) -> dict[str, Any]:
        """As pair.json has it; what is left out is counted by its reason."""
        values = asdict(self)
        values["left_out"] = dict(Counter(self.left_out.values()))
        values["files"] = {file.name: {"bytes": file.size, "sha256": file.sha256} for file in self.files}
        return {key: value for key, value in values.items() if value not in (None, {}, ())}


def write_manifest(
    folder: Path, target: Part, drafter: Part | None, dtype: str | None, self_test: Mapping[str, Any]
) -> dict[str, Any]:
    """Write pair.json into `folder` and return it. `load` reads the relative paths "target" and "drafter"."""
    manifest = {
        "format": FORMAT,
        "target": TARGET,
        "drafter": DRAFTER if drafter else None,
        "dtype": dtype or "as in the sources",
        "versions": {"mlx": version("mlx"), "mlx_lm": version("mlx-lm"), "mlx_spec": __version__},
        "parts": {TARGET: target.described(), **({DRAFTER: drafter.described()} if drafter else {})},
        "self_test": dict(self_test),
    }
    write_text(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    return manifest
