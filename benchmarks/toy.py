"""A model with the caches of a large one and next to no weights, for contexts of any length.

Prompts are written into the caches without attention, so 64k tokens take a second; blocks of up to 64 tokens
attend as usual.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from mlx_spec.drafters.gemma4 import (
    FULL,
    SLIDING,
    AssistantConfig,
    AssistantNetwork,
    Gemma4Assistant,
    HeadShape,
)
from mlx_spec.types import TargetParts

VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 256, 64, 4, 2, 64
WINDOW = 1024
LONGEST_BLOCK = 64  # tokens; longer ones are prompts


class Toy(nn.Module):
    """Layers of the given kinds: "full", "sliding", "recurrent"."""

    def __init__(self, kinds: tuple[str, ...], window: int = WINDOW) -> None:
        super().__init__()
        self.model = _Decoder(kinds)
        self._kinds, self._window = kinds, window
        self.last = _Last()

    @property
    def layers(self) -> list[nn.Module]:
        layers: list[nn.Module] = self.model.layers
        return layers

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        self.last.caches = cache
        x = self.model(tokens, cache)
        logits: mx.array = self.model.embed_tokens.as_linear(x)
        return logits

    def make_cache(self) -> list[Any]:
        make = {
            "full": KVCache,
            "sliding": lambda: RotatingKVCache(self._window),
            "recurrent": lambda: ArraysCache(1),
        }
        return [make[kind]() for kind in self._kinds]


class _Last:
    """The caches of the last forward pass, kept where `parameters()` does not look."""

    caches: list[Any]


class _Decoder(nn.Module):
    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = [_State() if kind == "recurrent" else _Attention() for kind in kinds]
        self.norm = nn.RMSNorm(WIDTH)

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        x = self.embed_tokens(tokens)
        for layer, kept in zip(self.layers, cache, strict=True):
            x = x + layer(x, kept)
        return self.norm(x)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        T = x.shape[1]
        rows = self.project(x).reshape(1, T, -1, HEAD_DIM).transpose(0, 2, 1, 3)
        queries, keys, values = mx.split(rows, [HEADS, HEADS + KV_HEADS], axis=1)
        mask = create_attention_mask(x, cache)
        keys, values = cache.update_and_fetch(keys, values)
        if T > LONGEST_BLOCK:
            return mx.zeros_like(x)
        scale = HEAD_DIM**-0.5
        attended = scaled_dot_product_attention(queries, keys, values, cache=cache, scale=scale, mask=mask)
        return self.out(attended.transpose(0, 2, 1, 3).reshape(1, T, -1))


class _State(nn.Module):
    """A decaying sum of what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        state = mx.zeros((1, WIDTH, WIDTH)) if cache[0] is None else cache[0]
        projected = self.project(x)
        if x.shape[1] > LONGEST_BLOCK:
            cache[0] = state * 0.5 + mx.swapaxes(projected, 1, 2) @ x / x.shape[1]
            return mx.zeros_like(x)
        outputs = []
        for t in range(x.shape[1]):
            state = state * 0.5 + mx.swapaxes(projected[:, t : t + 1], 1, 2) @ x[:, t : t + 1]
            outputs.append(x[:, t : t + 1] @ state)
        cache[0] = state
        return mx.concatenate(outputs, axis=1)


def assistant(parts: TargetParts, window: int = WINDOW) -> Gemma4Assistant:
    """A random Gemma 4 assistant that reads the K/V of a Toy."""
    config = AssistantConfig(
        backbone_hidden_size=WIDTH,
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_attention_heads=HEADS,
        layer_types=(SLIDING, FULL),
        heads=(HeadShape(KV_HEADS, HEAD_DIM),) * 2,
        sliding_window=window,
        rms_norm_eps=1e-6,
        rope_parameters={kind: {"rope_type": "default", "rope_theta": 1e4} for kind in (SLIDING, FULL)},
    )
    return Gemma4Assistant(AssistantNetwork(config), window, parts)
