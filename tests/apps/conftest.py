"""The pairs of the programs that measure one, loaded once for all tests."""

from __future__ import annotations

import pytest
from support.drafting import GOLDEN

import mlx_spec
from mlx_spec.pair import Pair


@pytest.fixture(scope="session")
def pair() -> Pair:
    return mlx_spec.load("demo")


@pytest.fixture(scope="session")
def tiny() -> Pair:
    """Load a pair whose passes take a tenth of the demo's."""
    return mlx_spec.load(GOLDEN / "e2b-trained" / "target", GOLDEN / "e2b-trained" / "assistant")
