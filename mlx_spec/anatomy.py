"""Where an mlx-lm model keeps the modules that speculation needs."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.types import TargetParts


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
