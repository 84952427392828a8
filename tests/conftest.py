"""Shared by all tests."""

from __future__ import annotations

import os

import mlx.core as mx
import pytest


def pytest_configure(config: pytest.Config) -> None:
    if device := os.environ.get("TEST_DEVICE"):  # cpu or gpu; without it MLX chooses
        mx.set_default_device(mx.Device({"cpu": mx.cpu, "gpu": mx.gpu}[device]))


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same random numbers in every run of a test, whatever ran before it."""
    mx.random.seed(0)
