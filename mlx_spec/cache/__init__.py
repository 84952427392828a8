"""KV caches that unmodified mlx-lm models accept, with exact rollback: one rule a kind, or refused."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from mlx_spec.cache.full import FullCache
from mlx_spec.cache.quantized import QuantizedCache
from mlx_spec.cache.recurrent import RecurrentCache
from mlx_spec.cache.sliding import MAX_TRIAL, SlidingCache
from mlx_spec.cache.tree import TreeView, view
from mlx_spec.errors import NotRewindable

AttentionCache = FullCache | SlidingCache | QuantizedCache
LayerCache = AttentionCache | RecurrentCache

__all__ = [
    "MAX_TRIAL",
    "AttentionCache",
    "FullCache",
    "LayerCache",
    "QuantizedCache",
    "RecurrentCache",
    "SlidingCache",
    "TreeView",
    "make_caches",
    "view",
]


def make_caches(model: nn.Module, *, kv_bits: int | None = None) -> list[LayerCache]:
    """One cache per cache-owning layer, in the order of the model's own.

    With `kv_bits` full-attention layers are quantized, except the last one, whether or not a drafter is
    there: KV-shared layers and drafters read it, and the text must not depend on who reads.
    Raises NotRewindable for a cache class without a rollback rule.
    """
    caches = [_rule(cache) for cache in make_prompt_cache(model)]
    full = [i for i, cache in enumerate(caches) if isinstance(cache, FullCache)]
    if kv_bits is not None:
        for i in full[:-1]:
            caches[i] = QuantizedCache(kv_bits)
    return caches


def _rule(cache: Any) -> LayerCache:
    kind = type(cache)
    if kind is KVCache:
        return FullCache()
    if kind is RotatingKVCache and cache.keep == 0:
        return SlidingCache(cache.max_size)
    if kind is ArraysCache:
        return RecurrentCache(len(cache.cache))
    raise NotRewindable(
        f"no exact rollback rule for the cache class {kind.__name__} of this target: "
        "it cannot be decoded speculatively without risk to its text; use it with mlx-lm"
    )
