"""The parts that EAGLE-3, P-EAGLE and DFlash share: sizes in config.json, attention, tables of their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.drafters.checkpoint import CONFIG, Rope, layer_config, required
from mlx_spec.drafters.conditioned import Rows


@dataclass(frozen=True)
class LayerConfig:
    """The sizes in config.json, and the names of the tensors for what it does not say."""

    hidden_size: int  # D
    vocab_size: int  # V, the target's
    draft_vocab_size: int  # W <= V
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    tensors: frozenset[str]
    rope: Rope


def layer_sizes(config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """Return the fields of a `LayerConfig` but `rope`; `tensors` are the names in the checkpoint.

    Raises BadCheckpoint for a missing key and an unsupported value.
    """
    layer, where = layer_config(config), f"layer_config in {CONFIG}"
    integers = ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads")
    sizes: dict[str, Any] = {key: required(layer, key, int, where) for key in integers}
    heads = sizes["num_attention_heads"]
    return sizes | {
        "draft_vocab_size": required(config, "draft_vocab_size", int, CONFIG),
        "num_key_value_heads": layer.get("num_key_value_heads") or heads,
        "head_dim": layer.get("head_dim") or sizes["hidden_size"] // heads,
        "rms_norm_eps": required(layer, "rms_norm_eps", float, where),
        "tensors": frozenset(tensors),
    }


def add_tables(network: nn.Module, config: LayerConfig) -> None:
    """Add the embedding, the LM head and the map of a reduced vocabulary that the checkpoint brings."""
    width, size = config.hidden_size, config.draft_vocab_size
    if "embed_tokens.weight" in config.tensors:
        network.embed_tokens = nn.Embedding(config.vocab_size, width)
    if "lm_head.weight" in config.tensors:
        network.lm_head = nn.Linear(width, size, bias=False)
    if "draft_ids" in config.tensors:
        network.draft_ids = mx.zeros((size,), dtype=mx.int32)


class DrafterAttention(nn.Module):
    """Grouped-query attention over `Rows`; projections have biases if the checkpoint has them."""

    def __init__(self, config: LayerConfig, inputs: int, name: str, *, normed: bool) -> None:
        super().__init__()
        heads, groups, head = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self._heads, self._groups, self._scale = heads, groups, head**-0.5

        def linear(part: str, inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=f"{name}.{part}.bias" in config.tensors)

        self.q_proj = linear("q_proj", inputs, heads * head)
        self.k_proj = linear("k_proj", inputs, groups * head)
        self.v_proj = linear("v_proj", inputs, groups * head)
        self.o_proj = linear("o_proj", heads * head, config.hidden_size)
        if normed:
            self.q_norm = nn.RMSNorm(head, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(head, eps=config.rms_norm_eps)
        self._rope = config.rope.build(head)

    def queries(self, x: mx.array, position: int) -> mx.array:
        """Return the queries [1, H, T, Dk] of rows [1, T, D] from `position` on."""
        queries = self._split(self.q_proj(x), self._heads)
        rotated: mx.array = self._rope(self.q_norm(queries) if "q_norm" in self else queries, offset=position)
        return rotated

    def append(self, x: mx.array, cache: Rows, position: int) -> tuple[mx.array, mx.array]:
        """Append K and V of rows [1, T, D] from `position` on. Return all rows of the cache."""
        keys = self._split(self.k_proj(x), self._groups)
        keys = self._rope(self.k_norm(keys) if "k_norm" in self else keys, offset=position)
        return cache.update_and_fetch(keys, self._split(self.v_proj(x), self._groups))

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None = None
    ) -> mx.array:
        """Return the projected result [1, T, D] of attention."""
        attended = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self._scale, mask=mask)
        projected: mx.array = self.o_proj(attended.swapaxes(1, 2).reshape(1, queries.shape[2], -1))
        return projected

    def _split(self, x: mx.array, heads: int) -> mx.array:
        """Reshape [1, T, H * Dk] to [1, H, T, Dk]."""
        return x.reshape(1, x.shape[1], heads, -1).swapaxes(1, 2)
