"""Errors that users see: a message of one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mlx_spec.errors import SpecError


def refusal(error: type[SpecError], call: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """Return the message of the error that a call raises."""
    with pytest.raises(error) as caught:
        call(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    return message
