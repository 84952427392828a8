"""Conversions of the golden pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlx_spec.errors import BadCheckpoint, SpecError
from support import drafting
from support.drafting import GOLDEN


def converted(pair: str | Path, out: Path, **changes: Any) -> dict[str, Any]:
    parts = {"target": GOLDEN / pair / "target", "drafter": GOLDEN / pair / "assistant"}
    return drafting.converted(**parts | changes, out=out)


def refusal(pair: str | Path, out: Path, kind: type[SpecError] = BadCheckpoint, **changes: Any) -> str:
    """The one line a conversion is refused with; nothing is left of it."""
    with pytest.raises(kind) as caught:
        converted(pair, out, **changes)
    assert not list(out.parent.glob(f"*{out.name}*"))
    text = str(caught.value)
    assert "\n" not in text
    return text
