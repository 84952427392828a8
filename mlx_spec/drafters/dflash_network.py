"""The network of DFlash (arXiv:2602.06036): layers over K/V made from the target's activations.

A context row is the target's captured layers, projected once and turned into K and V by every layer. Only
the block has queries; its rows see all of the context and each other. Names are those the converter writes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3 import MLP
from mlx_lm.models.rope_utils import initialize_rope

from mlx_spec.drafters.conditioned import Rows
from mlx_spec.drafters.eagle3_network import Rope
from mlx_spec.drafters.recorded import WHERE, layer_config
from mlx_spec.drafters.weights import required
from mlx_spec.errors import BadCheckpoint

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class DFlashConfig:
    """What config.json says; the tensors' names tell which optional parts there are."""

    hidden_size: int  # D, the target's too
    fused_size: int  # of a context row
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    draft_vocab_size: int
    windows: tuple[int | None, ...]  # a layer; None: it sees the whole context
    rope: Rope
    tensors: frozenset[str]

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], captured: int, tensors: Collection[str]) -> DFlashConfig:
        """From config.json, of a drafter that reads `captured` layers. Raises BadCheckpoint."""
        layer = layer_config(config)
        where = f"layer_config in {WHERE}"
        heads = required(layer, "num_attention_heads", int, where)
        hidden = required(layer, "hidden_size", int, where)
        return cls(
            hidden_size=hidden,
            fused_size=captured * hidden,
            intermediate_size=required(layer, "intermediate_size", int, where),
            num_attention_heads=heads,
            num_key_value_heads=layer.get("num_key_value_heads") or heads,
            head_dim=layer.get("head_dim") or hidden // heads,
            rms_norm_eps=required(layer, "rms_norm_eps", float, where),
            vocab_size=required(layer, "vocab_size", int, where),
            draft_vocab_size=required(config, "draft_vocab_size", int, WHERE),
            windows=_windows(layer, where),
            rope=Rope.from_dict(layer, layer.get("max_position_embeddings")),
            tensors=frozenset(tensors),
        )


def _windows(layer: Mapping[str, Any], where: str) -> tuple[int | None, ...]:
    count = required(layer, "num_hidden_layers", int, where)
    kinds = layer.get("layer_types") or [FULL] * count
    if len(kinds) != count or set(kinds) - {SLIDING, FULL}:
        raise BadCheckpoint(
            f"{where} has layer_types {kinds} for {count} layers, known are {SLIDING!r} and {FULL!r}"
        )
    return tuple(required(layer, "sliding_window", int, where) if kind == SLIDING else None for kind in kinds)


class DFlashNetwork(nn.Module):
    """A context that grows, and blocks that come and go."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(config.fused_size, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps=eps)
        self.layers = [_Layer(config, index) for index in range(len(config.windows))]
        self.norm = nn.RMSNorm(width, eps=eps)
        if "embed_tokens.weight" in config.tensors:
            self.embed_tokens = nn.Embedding(config.vocab_size, width)
        if "lm_head.weight" in config.tensors:
            self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        if "draft_ids" in config.tensors:
            self.draft_ids = mx.zeros((config.draft_vocab_size,), dtype=mx.int32)

    def remember(self, rows: mx.array, caches: Sequence[Rows]) -> None:
        """Append K and V of context rows [T, F] to the caches."""
        context = self.hidden_norm(self.fc(rows.astype(self.norm.weight.dtype)))
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.self_attn.remember(context[None], cache)

    def __call__(self, embedded: mx.array, caches: Sequence[Rows], position_offset: int) -> mx.array:
        """A block [B, D] behind the context, to what the head reads, [B, D]. It is left in the caches."""
        x = embedded.astype(self.norm.weight.dtype)[None]
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, position_offset)
        normed: mx.array = self.norm(x)[0]
        return normed


class _Layer(nn.Module):
    def __init__(self, config: DFlashConfig, index: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = _Attention(config, index)
        self.mlp = MLP(width, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)

    def __call__(self, x: mx.array, cache: Rows, position_offset: int) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), cache, position_offset)
        out: mx.array = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Attention(nn.Module):
    def __init__(self, config: DFlashConfig, index: int) -> None:
        super().__init__()
        width, head = config.hidden_size, config.head_dim
        self._window, self._scale = config.windows[index], head**-0.5
        self._heads, self._groups = config.num_attention_heads, config.num_key_value_heads

        def linear(part: str, inputs: int, outputs: int) -> nn.Linear:
            biased = f"layers.{index}.self_attn.{part}.bias" in config.tensors
            return nn.Linear(inputs, outputs, bias=biased)

        self.q_proj = linear("q_proj", width, self._heads * head)
        self.k_proj = linear("k_proj", width, self._groups * head)
        self.v_proj = linear("v_proj", width, self._groups * head)
        self.o_proj = linear("o_proj", self._heads * head, width)
        self.q_norm = nn.RMSNorm(head, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(head, eps=config.rms_norm_eps)
        rope = config.rope
        scaling = None if rope.scaling is None else dict(rope.scaling)
        self._rope = initialize_rope(int(head * rope.share), rope.base, False, scaling, rope.max_positions)

    def remember(self, rows: mx.array, cache: Rows) -> None:
        """Append K and V of [1, T, D]."""
        self._append(rows, cache, cache.offset)

    def __call__(self, x: mx.array, cache: Rows, position_offset: int) -> mx.array:
        """[1, B, D]: every row sees the context in the window of the first one, and the whole block."""
        before, position = cache.size, cache.offset + position_offset
        queries = self._rope(self.q_norm(self._split(self.q_proj(x), self._heads)), offset=position)
        keys, values = self._append(x, cache, position)
        low = 0 if self._window is None else max(before - self._window + 1, 0)
        attended = mx.fast.scaled_dot_product_attention(
            queries, keys[..., low:, :], values[..., low:, :], scale=self._scale
        )
        projected: mx.array = self.o_proj(attended.swapaxes(1, 2).reshape(1, x.shape[1], -1))
        return projected

    def _append(self, x: mx.array, cache: Rows, position: int) -> tuple[mx.array, mx.array]:
        keys = self._rope(self.k_norm(self._split(self.k_proj(x), self._groups)), offset=position)
        return cache.update_and_fetch(keys, self._split(self.v_proj(x), self._groups))

    def _split(self, x: mx.array, heads: int) -> mx.array:
        """[1, T, H * Dk] to [1, H, T, Dk]."""
        return x.reshape(1, x.shape[1], heads, -1).swapaxes(1, 2)
