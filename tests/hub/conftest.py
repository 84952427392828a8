"""A Hub with three repositories, and an empty cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import sparse
from support.hub_stand_in import ASSISTANT, E2B, Hub, serving


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Hub]:
    """A hub with a target, its drafter and a drafter of another target; other names do not exist."""
    folder = tmp_path / "served"
    norm = {"norm.weight": ("BF16", (9,))}
    table = {"model.embed_tokens.weight": ("BF16", (1000, 100))}
    target = sparse.checkpoint(folder / "target", sparse.gemma4("E2B"), table)
    (target / "pytorch_model.bin").write_bytes(b"x")
    (target / "own.py").touch()
    repositories = {
        E2B: target,
        ASSISTANT: sparse.checkpoint(folder / "drafter", sparse.gemma4_assistant("E2B"), norm),
        "owner/other": sparse.checkpoint(folder / "other", sparse.gemma4_assistant("31B"), norm),
        "owner/copy": target,
    }
    with serving(repositories) as found:
        yield found


@pytest.fixture
def cache(served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache and an empty folder of pairs."""
    folder = tmp_path / "home" / "hub"
    served.take_place(monkeypatch, folder)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return folder
