"""Shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest


def pytest_configure(config: pytest.Config) -> None:
    if device := os.environ.get("TEST_DEVICE"):  # cpu or gpu; without it MLX chooses
        mx.set_default_device(mx.Device({"cpu": mx.cpu, "gpu": mx.gpu}[device]))


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same random numbers in every run of a test, whatever ran before it."""
    mx.random.seed(0)


@pytest.fixture(scope="session")
def trained_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """Return what converts the trained pair of a family, once: to its folder and its manifest."""
    from support.drafting import TRAINED, prove

    @cache
    def made(family: str) -> tuple[Path, dict[str, Any]]:
        out = tmp_path_factory.mktemp("trained") / "out"
        return out, prove(*TRAINED[family], out)

    return made


@pytest.fixture(autouse=True, scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Save measured costs in a folder of the tests, not in the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
