"""Tiny random models, of an architecture or of a kind of cache.

Deterministic; norms and weights are spread so that errors show.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path
from mlx_lm.models.cache import CacheList, ChunkedKVCache, RotatingKVCache, make_prompt_cache

from mlx_spec.drafters import DrafterSource
from mlx_spec.drafters.gemma4 import AssistantConfig, AssistantNetwork, HeadShape, assistant_source
from support.tiny_configs import EPS as EPS
from support.tiny_configs import SIZES as SIZES
from support.tiny_configs import VOCAB, built


def make(kind: str, seed: int = 0, scale: float = 0.2, *, signs: bool = False, **settings: Any) -> nn.Module:
    """Return a model with random float32 weights: norms around what they begin with, others around 0.

    `kind` is an architecture, a variant of one, or a kind of cache (`tiny_configs.py`). With `signs`, norms
    outside the layers get random signs: a model whose embedding is its head repeats its input otherwise.
    """
    mx.random.seed(seed)
    model = built(kind, settings)
    model.set_dtype(mx.float32)
    randomize(model, scale, signs=signs)
    return model


def randomize(network: nn.Module, scale: float, *, signs: bool = False) -> None:
    def drawn(path: str, x: mx.array) -> mx.array:
        if not mx.issubdtype(x.dtype, mx.floating):
            return x
        is_outside = not any(part.isdigit() for part in path.split("."))
        width = 2.0 if signs and is_outside and x.ndim == 1 else scale
        return mx.random.normal(x.shape) * width + (x if x.ndim == 1 else 0.0)

    network.update(tree_map_with_path(drawn, network.parameters()))
    network.eval()
    mx.eval(network.parameters())


full, qwen = partial(make, "full"), partial(make, "full, normed")
recurrent, recurrent_moe = partial(make, "recurrent"), partial(make, "recurrent_moe")
sliding = partial(make, "sliding", scale=0.25)


def smallest(width: int = 16) -> nn.Module:
    """Return a model of one layer, which is written and read in no time."""
    sizes = {"hidden_size": width, "intermediate_size": width, "head_dim": width // 2}
    return make("full", num_hidden_layers=1, **sizes)


def shared(seed: int = 0, scale: float = 0.2, pattern: str = "sfsf") -> nn.Module:
    """Return a Gemma 4 with these layers, sliding and full ones."""
    layers = [{"s": "sliding_attention", "f": "full_attention"}[kind] for kind in pattern]
    count = {"num_hidden_layers": len(pattern), "num_kv_shared_layers": len(pattern) // 2}
    model = make("shared", seed, scale, layer_types=layers, **count)
    # Embeddings are tied: without random signs here the model echoes its input.
    model.model.norm.weight *= mx.where(mx.random.uniform(shape=(64,)) < 0.5, -1.0, 1.0)
    mx.eval(model.parameters())
    return model


def has_windows(kind: str) -> bool:
    """Return True if some of its layers see the last tokens only."""
    caches = make_prompt_cache(built(kind, {}))
    flat = [part for cache in caches for part in (cache.caches if isinstance(cache, CacheList) else [cache])]
    return any(isinstance(cache, RotatingKVCache | ChunkedKVCache) for cache in flat)


def assistant(seed: int = 5, pattern: str = "sf") -> DrafterSource:
    """A random assistant that fits `shared`."""
    kinds = {"s": ("sliding_attention", HeadShape(1, 32)), "f": ("full_attention", HeadShape(1, 64))}
    config = AssistantConfig(
        backbone_hidden_size=64,
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        layer_types=tuple(kinds[kind][0] for kind in pattern),
        heads=tuple(kinds[kind][1] for kind in pattern),
        sliding_window=16,
        rms_norm_eps=1e-6,
        hidden_act="gelu_pytorch_tanh",
        rope_parameters={
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            "full_attention": {"rope_theta": 1e6, "rope_type": "proportional", "partial_rotary_factor": 0.25},
        },
    )
    mx.random.seed(seed)
    network = AssistantNetwork(config)
    randomize(network, 0.2)
    return assistant_source(network, 16)


@cache
def model_of(kind: str) -> nn.Module:
    """Return the model of a kind of cache, the same one every time.

    That of "quantized" has windows, and two full layers: K/V of the last one are not quantized.
    """
    model: nn.Module = sliding(num_hidden_layers=4) if kind == "quantized" else globals()[kind]()
    return model


@cache
def shallow(kind: str) -> nn.Module:
    """Return a model of as few layers as a kind needs."""
    layers = {"full": 2, "qwen": 2, "sliding": 2, "recurrent": 2}
    if kind not in layers:
        return model_of(kind)
    model: nn.Module = globals()[kind](num_hidden_layers=layers[kind])
    return model


def bits_of(kind: str) -> int | None:
    """Return the bits of its K/V."""
    return 8 if "quantized" in kind else None


def prompt(length: int, seed: int = 3) -> list[int]:
    """`length` tokens with some repetition, so that lookup finds matches."""
    return [(7 * (i % 11) + seed * i // 5) % VOCAB for i in range(length)]
