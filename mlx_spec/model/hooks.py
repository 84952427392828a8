"""Find the modules of an mlx-lm model; wrappers that capture outputs or start layers early."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.errors import Mismatch
from mlx_spec.prompt import RotaryPositions
from mlx_spec.types import Features, FeatureSpec, KVRows, TargetParts

SharedKV = Callable[[], Mapping[str, KVRows]]


class ModuleWrapper(nn.Module):
    """Replaces a module and hands its attributes on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def __getattr__(self, key: str) -> Any:
        # Models read attributes of their layers, such as `use_sliding`.
        try:
            return super().__getattr__(key)
        except AttributeError:
            return getattr(super().__getattr__("layer"), key)


class Capture(nn.Module):
    """Makes a module keep its last output."""

    outputs: list[mx.array]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **kwargs)
        self.outputs[:] = [out[0] if isinstance(out, tuple) else out]
        return out


def take_outputs(captures: Sequence[Capture]) -> list[mx.array]:
    """Return the last outputs of captures and clear them. A capture may be listed several times.

    Raises Mismatch if the model does not call a captured module.
    """
    if any(not capture.outputs for capture in captures):
        raise Mismatch(
            "this drafter reads hidden states inside its target, whose class in mlx-lm does not call its "
            "layers one by one: use a draft model or lookup"
        )
    outputs = [capture.outputs[0] for capture in captures]
    for capture in captures:
        capture.outputs.clear()
    return outputs


class EagerSwitch:
    """Turns the early start of layers on and off. All targets of a model share it."""

    def __init__(self, is_gpu: bool) -> None:
        self.is_on = False
        self._is_gpu = is_gpu

    @contextmanager
    def on(self, is_on: bool = True) -> Iterator[None]:
        """Start layers early for one forward pass.

        A CPU always does: a pass takes a tenth less time if buffers of a layer are free for the next one.
        """
        self.is_on = is_on or not self._is_gpu
        try:
            yield
        finally:
            self.is_on = False


class EagerLayer(nn.Module):
    """Makes the device start a layer while the host still builds the graph of the layers after it."""

    switch: EagerSwitch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **kwargs)
        if self.switch.is_on:
            mx.async_eval(out[0] if isinstance(out, tuple) else out)
        return out


def capture(module: nn.Module) -> Capture:
    """Return a module as a capture, which it becomes on the first call: targets of one model share it."""
    if not isinstance(module, Capture):
        _extend(module, Capture)
        object.__setattr__(module, "outputs", [])  # else they would be weights of the module
    assert isinstance(module, Capture)
    return module


def _extend(module: nn.Module, mixin: type[nn.Module]) -> None:
    """Make the class of a module a subclass of itself and `mixin`.

    A wrapper would rename the weights, and some models ask for the class of a layer.
    """
    base = type(module)
    module.__class__ = type(base.__name__, (mixin, base), {"__module__": base.__module__})


def start_layers_early(layers: Sequence[Any]) -> EagerSwitch:
    """Prepare decoder layers for an early start. Return the switch, which is off.

    The host needs 1 to 2 us to build an operation of the graph. Without an early start the device is idle
    until the graph of the whole pass is built.
    """
    # Each start ends a command buffer, so a GPU starts several layers at once; at first it has nothing to do.
    is_gpu = mx.default_device().type == mx.gpu
    first, every = (2, 8) if is_gpu else (1, 1)
    inner = layers[first - 1 : -1 : every]
    switch: EagerSwitch = next(
        (layer.switch for layer in inner if isinstance(layer, EagerLayer)), EagerSwitch(is_gpu)
    )
    for layer in inner:
        if not isinstance(layer, EagerLayer):
            _extend(layer, EagerLayer)
            layer.switch = switch
    return switch


@dataclass(frozen=True)
class Decoder:
    """The modules of a language model."""

    layers: list[Any]  # the decoder layers, as the model calls them
    owner: nn.Module  # holds them
    outer: nn.Module  # holds the owner, and the LM head

    @property
    def table(self) -> Any:
        """Return the embedding. Raises Mismatch if it is not found under its usual name."""
        if "embed_tokens" not in self.owner:
            name = type(self.outer).__module__.rpartition(".")[2]
            raise Mismatch(f"this drafter reads the embedding of its target, which is not known for {name}")
        return self.owner["embed_tokens"]


def decoder_of(model: Any) -> Decoder:
    """Find the list of decoder layers, whatever its name, nearest to the model."""
    first, level = model.layers[0], [(model, model)]
    while True:
        for outer, owner in level:
            for value in owner.values():
                if isinstance(value, list) and value and value[0] is first:
                    return Decoder(value, owner, outer)
        pairs = ((owner, value) for _, owner in level for value in owner.values())
        level = [(owner, value) for owner, value in pairs if isinstance(value, nn.Module)]
        if not level:
            raise TypeError(f"the layers of {type(model).__module__} are in no list")


def parts_of(model: nn.Module) -> TargetParts:
    """Return the embedding and the LM head of a model, with their scale and softcap."""
    decoder = decoder_of(model)
    scale = vars(decoder.owner).get("embed_scale", 1.0)
    softcap = vars(decoder.outer).get("final_logit_softcapping")
    head = decoder.outer.get("lm_head")  # whole, also if the model is sharded later

    def embed(tokens: mx.array) -> mx.array:
        embedded: mx.array = decoder.table(tokens)
        return embedded if scale == 1.0 else embedded * scale

    def capped(logits: mx.array) -> mx.array:
        return logits if softcap is None else mx.tanh(logits / softcap) * softcap

    def unembed(hidden: mx.array) -> mx.array:
        return capped(decoder.table.as_linear(hidden) if head is None else head(hidden))

    def select(ids: mx.array) -> Callable[[mx.array], mx.array]:
        linear = decoder.table if head is None else head
        rows = {name: array[ids] for name, array in linear.parameters().items()}

        def score(hidden: mx.array) -> mx.array:
            if "scales" not in rows:
                logits = hidden @ rows["weight"].T
            else:
                quantized = rows["weight"], rows["scales"], rows.get("biases")
                logits = mx.quantized_matmul(
                    hidden, *quantized, group_size=linear.group_size, bits=linear.bits, mode=linear.mode
                )
            return capped(logits + rows["bias"] if "bias" in rows else logits)

        return score

    return TargetParts(embed, unembed, select)


def captures_of(model: nn.Module, needs: FeatureSpec) -> list[Capture]:
    """Return the captures of the hidden states that a drafter reads, the final one last."""
    owner = decoder_of(model).owner
    if needs.final_hidden and "norm" not in owner:
        name = type(model).__module__.rpartition(".")[2]
        raise Mismatch(
            f"this drafter reads the last hidden state of its target, which is not known for {name}"
        )
    final = [capture(owner["norm"])] if needs.final_hidden else []
    layers = model.layers  # of some models, they are in several lists
    return [*(capture(layers[i]) for i in needs.hidden_layers), *final]


def features_of(
    needs: FeatureSpec, hidden: Sequence[mx.array], shared_kv: SharedKV, rotary: RotaryPositions
) -> Features:
    """Return the features that a drafter needs, of hidden states [T, D] in the order of `captures_of`."""
    layers = len(needs.hidden_layers)
    return Features(
        tuple(hidden[:layers]),
        hidden[layers] if needs.final_hidden and hidden else None,
        shared_kv if needs.shared_kv else None,
        rotary,
    )
