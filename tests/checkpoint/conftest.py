"""Checkpoints that this program writes go to a folder of the test."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of converted pairs, for this test only."""
    monkeypatch.setattr("platformdirs.user_data_path", lambda name: tmp_path / "data" / name)
    return tmp_path / "data" / "mlx_spec" / "models"
