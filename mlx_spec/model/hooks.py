"""Modules put in the place of a model's own: they do what those do and let something be seen, told, begun."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.types import TargetParts

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


class Begun(nn.Module):
    """What makes the device begin with a layer while the host is still putting together those behind it."""

    gate: Gate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer returns."""
        out = super().__call__(*args, **kwargs)
        if self.gate.open:
            mx.async_eval(out[0] if isinstance(out, tuple) else out)
        return out


def tap(owner: Any, key: Any) -> Tap:
    """The tap on `owner[key]`, put there if it is not yet: targets of one model share it."""
    if not isinstance(owner[key], Tap):
        owner[key] = Tap(owner[key])
    found = owner[key]
    assert isinstance(found, Tap)
    return found


def begin_early(layers: Sequence[Any]) -> Gate:
    """Let decoder layers be begun early, where they are not yet. Returns the gate, which is closed.

    A pass whose result is waited for would else begin when all of it has been put together, which takes the
    host 1 to 2 us an operation. On a GPU a part is some layers, since every part ends a command buffer.
    """
    every = LAYERS_A_PART if mx.default_device().type == mx.gpu else 1
    inner = [_inner(layer) for layer in layers[every - 1 : -1 : every]]
    gate: Gate = next((layer.gate for layer in inner if isinstance(layer, Begun)), Gate())
    for layer in inner:
        if not isinstance(layer, Begun):
            layer.__class__ = _begun(type(layer))  # in its place, or its weights would have other names
            layer.gate = gate
    return gate


def _begun(kind: type[nn.Module]) -> type[nn.Module]:
    """The same kind of layer, begun early."""
    return type(kind.__name__, (Begun, kind), {"__module__": kind.__module__})


def _inner(layer: Any) -> Any:
    """The layer that others may stand for."""
    while isinstance(layer, InPlace):
        layer = layer.layer
    return layer


def decoder_of(model: nn.Module) -> nn.Module:
    """The module that holds the list of decoder layers."""
    decoder: nn.Module = _outer(model)["model"]
    return decoder


def _outer(model: nn.Module) -> nn.Module:
    """The module that holds the decoder and the LM head."""
    while "model" not in model or "layers" not in model["model"]:
        model = model["language_model"] if "language_model" in model else model["model"]
    return model


def parts_of(model: nn.Module) -> TargetParts:
    """Its embedding, [T] to [T, D], and LM head, [T, D] to logits [T, V], scale and cap included."""
    outer = _outer(model)
    table = outer["model"]["embed_tokens"]
    scale = vars(outer["model"]).get("embed_scale", 1.0)
    softcap = vars(outer).get("final_logit_softcapping")

    def embed(tokens: mx.array) -> mx.array:
        embedded: mx.array = table(tokens)
        return embedded if scale == 1.0 else embedded * scale

    def unembed(hidden: mx.array) -> mx.array:
        logits: mx.array = outer["lm_head"](hidden) if "lm_head" in outer else table.as_linear(hidden)
        return logits if softcap is None else mx.tanh(logits / softcap) * softcap

    return TargetParts(embed, unembed)
