"""Architectures with special caches, masks or positions: equal to mlx-lm's loop, or refused."""

from __future__ import annotations

import pytest
from support.architectures import QUICK, outcome


@pytest.mark.parametrize("name", QUICK)
def test_a_special_architecture_decodes_as_in_mlx_lm(name: str) -> None:
    expected, settings = QUICK[name]
    result, details = outcome(name, lengths=(30, 5), **settings)
    assert result == expected, details
