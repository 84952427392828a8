"""The pairs of the programs that measure one, loaded once for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints import float32_copy
from support.drafting import GOLDEN

import mlx_spec
from mlx_spec.pair import Pair


@pytest.fixture(scope="session")
def pair() -> Pair:
    return mlx_spec.load("demo")


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return a target and its drafter, whose passes take a tenth of the demo's."""
    folder = tmp_path_factory.mktemp("parts")
    names = ("target", "assistant")
    return [float32_copy(GOLDEN / "e2b-trained" / name, folder / name) for name in names]


@pytest.fixture(scope="session")
def tiny(parts: list[Path]) -> Pair:
    return mlx_spec.load(*parts)
