"""The demo pair, loaded once for all tests of the programs that measure it."""

from __future__ import annotations

import pytest

import mlx_spec
from mlx_spec.pair import Pair


@pytest.fixture(scope="session")
def pair() -> Pair:
    return mlx_spec.load("demo")
