"""Modules put in the place of a model's own: they do what those do and let something be seen, told, begun."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

LAYERS_A_PART = 8  # of a pass that is begun in parts on a GPU


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


class Gate:
    """Whether the layers of a model are computed early. All its targets share it."""

    def __init__(self) -> None:
        self.open = False

    @contextmanager
    def opened(self) -> Iterator[None]:
        """For one forward pass."""
        self.open = True
        try:
            yield
        finally:
            self.open = False


class Begun(InPlace):
    """A layer that the device begins with while the host is still putting together those behind it."""

    def __init__(self, layer: nn.Module, gate: Gate) -> None:
        super().__init__(layer)
        self.gate = gate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer returns."""
        out = self.layer(*args, **kwargs)
        if self.gate.open:
            mx.async_eval(out[0] if isinstance(out, tuple) else out)
        return out


def tap(owner: Any, key: Any) -> Tap:
    """The tap on `owner[key]`, put there if it is not yet: targets of one model share it."""
    found = _around(owner[key], Tap)
    if not isinstance(found, Tap):
        found = owner[key] = Tap(owner[key])
    return found


def begin_early(layers: list[Any]) -> Gate:
    """Let decoder layers be begun early, where they are not yet. Returns the gate, which is closed.

    A pass whose result is waited for would else begin when all of it has been put together, which takes the
    host 1 to 2 us an operation. On a GPU a part is some layers, since every part ends a command buffer.
    """
    every = LAYERS_A_PART if mx.default_device().type == mx.gpu else 1
    places = range(every - 1, len(layers) - 1, every)
    begun = [_around(layers[i], Begun) for i in places]
    gates = [layer.gate for layer in begun if isinstance(layer, Begun)]
    gate: Gate = gates[0] if gates else Gate()
    for i, found in zip(places, begun, strict=True):
        if found is None:
            layers[i] = Begun(layers[i], gate)
    return gate


def _around(layer: Any, kind: type[InPlace]) -> InPlace | None:
    """The module of this kind among those that stand for a layer."""
    while isinstance(layer, InPlace):
        if isinstance(layer, kind):
            return layer
        layer = layer.layer
    return None
