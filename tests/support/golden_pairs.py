"""Conversions of the golden pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_spec.errors import BadCheckpoint, SpecError
from support import drafting, refusals
from support.drafting import GOLDEN


def converted(pair: str | Path, out: Path, **changes: Any) -> dict[str, Any]:
    parts = {"target": GOLDEN / pair / "target", "drafter": GOLDEN / pair / "assistant"}
    return drafting.converted(**parts | changes, out=out)


def refusal(pair: str | Path, out: Path, kind: type[SpecError] = BadCheckpoint, **changes: Any) -> str:
    """Return the message that a conversion is refused with; nothing is left of it."""
    message = refusals.refusal(kind, converted, pair, out, **changes)
    assert not list(out.parent.glob(f"*{out.name}*"))
    return message
