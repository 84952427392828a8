"""The pairs of the programs that measure one, loaded once for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import tiny as tiny_model
from support.checkpoints import float32_copy
from support.drafting import GOLDEN
from support.pairs import save

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
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return a target and its draft model, each of one layer, with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("one-layer")
    return [save(tiny_model.full(num_hidden_layers=1), folder / name) for name in ("target", "drafter")]


@pytest.fixture(scope="session")
def tiny(parts: list[Path]) -> Pair:
    return mlx_spec.load(*parts)
