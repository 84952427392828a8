"""Modules put in the place of a model's own: they do what those do and let something be seen or told."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn


class InPlace(nn.Module):
    """Stands for another module, attributes included."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def __getattr__(self, key: str) -> Any:
        # Models ask their layers for attributes of their own, such as `use_sliding`.
        try:
            return super().__getattr__(key)
        except AttributeError:
            return getattr(super().__getattr__("layer"), key)


class Tap(InPlace):
    """A module that remembers its last output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.seen: list[mx.array] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        out = self.layer(*args, **kwargs)
        self.seen[:] = [out[0] if isinstance(out, tuple) else out]
        return out


def tap(owner: Any, key: Any) -> Tap:
    """The tap on `owner[key]`, put there if it is not yet: targets of one model share it."""
    if not isinstance(owner[key], Tap):
        owner[key] = Tap(owner[key])
    found = owner[key]
    assert isinstance(found, Tap)
    return found
