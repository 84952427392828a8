"""Who decides how many tokens a pair drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlx_spec.device import device_name
from mlx_spec.tuning import profile
from mlx_spec.tuning.fixed import Fixed
from mlx_spec.tuning.tuner import Tuner
from mlx_spec.types import Drafter, DraftLengthPolicy, Reason, Target


@dataclass(frozen=True)
class Always:
    """The same policy for all sequences: it learns nothing."""

    policy: Fixed

    def make(self, target: Target, drafters: Sequence[Drafter]) -> DraftLengthPolicy:
        """That policy."""
        return self.policy


def always(num_draft_tokens: int | None, *, disabled: bool) -> Always:
    """That many draft tokens; of none, the reason is that the user wants none or that there is no drafter."""
    if num_draft_tokens:
        return Always(Fixed(num_draft_tokens))
    return Always(Fixed(0, Reason.DISABLED if disabled else Reason.NO_DRAFTER))


def tuned(
    target: Path, drafters: Mapping[str, Path | None], config: Mapping[str, Any], kv_bits: int | None
) -> Tuner:
    """What pays, from costs measured on this device or saved there before.

    `drafters` by name, with the folders of those that have one: the others have no weights and copy text.
    `config` is the target's config.json.
    """
    prints = tuple(
        name if folder is None else profile.fingerprint(folder) for name, folder in drafters.items()
    )
    key = profile.Key(
        device_name(), profile.fingerprint(target), prints, _quantization(config), kv_bits, version("mlx")
    )
    copying = [name for name, folder in drafters.items() if folder is None]
    return Tuner(list(drafters), key, profile.folder(), copying)


def _quantization(config: Mapping[str, Any]) -> str:
    match config.get("quantization"):
        case {"bits": bits, "group_size": size}:
            return f"{bits}-bit, groups of {size}"
    return str(config.get("dtype") or config.get("torch_dtype") or "as saved")
