"""Tiny random models of each cache kind. Deterministic; norms and weights spread so that errors show."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models import gemma3_text, gemma4_text, llama, qwen3, qwen3_5, qwen3_next

from mlx_spec.drafters import DrafterSource
from mlx_spec.drafters.gemma4 import AssistantConfig, AssistantNetwork, HeadShape, assistant_source

VOCAB = 256
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
}
EPS: dict[str, Any] = {"rms_norm_eps": 1e-5}
DELTA: dict[str, Any] = {
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}


def _random(build: Callable[[], nn.Module], seed: int, scale: float) -> nn.Module:
    mx.random.seed(seed)
    model = build()

    def spread(x: mx.array) -> mx.array:
        noise = mx.random.normal(x.shape) * scale
        return noise if x.ndim > 1 else x + noise

    model.update(tree_map(spread, model.parameters()))
    mx.eval(model.parameters())
    model.eval()
    return model


def full(seed: int = 0, scale: float = 0.2, vocab: int = VOCAB, **changes: Any) -> nn.Module:
    """A Llama: full attention in every layer, of which there are three."""
    sizes = SIZES | EPS | {"vocab_size": vocab, "num_hidden_layers": 3} | changes
    args = llama.ModelArgs(model_type="llama", **sizes)
    return _random(lambda: llama.Model(args), seed, scale)


def qwen(seed: int = 0, scale: float = 0.2) -> nn.Module:
    """A Qwen3: full attention with query and key norms."""
    args = qwen3.ModelArgs(
        model_type="qwen3",
        num_hidden_layers=3,
        max_position_embeddings=4096,
        rope_theta=1e4,
        tie_word_embeddings=True,
        **SIZES,
        **EPS,
    )
    return _random(lambda: qwen3.Model(args), seed, scale)


def sliding(
    seed: int = 0, scale: float = 0.25, window: int = 16, vocab: int = VOCAB, **changes: Any
) -> nn.Module:
    """A Gemma 3: sliding and full attention in turn."""
    args = gemma3_text.ModelArgs(
        model_type="gemma3_text",
        rope_theta=1e4,
        rope_local_base_freq=1e4,
        query_pre_attn_scalar=16,
        sliding_window=window,
        sliding_window_pattern=2,
        **SIZES | EPS | {"vocab_size": vocab, "num_hidden_layers": 3} | changes,
    )
    return _random(lambda: gemma3_text.Model(args), seed, scale)


def shared(seed: int = 0, scale: float = 0.2, window: int = 16, pattern: str = "sfsf") -> nn.Module:
    """A Gemma 4 with the switches of E2B: per-layer inputs, both kinds of attention, K/V shared by half."""
    args = gemma4_text.ModelArgs(
        hidden_size=64,
        num_hidden_layers=len(pattern),
        layer_types=[{"s": "sliding_attention", "f": "full_attention"}[kind] for kind in pattern],
        intermediate_size=64,
        num_attention_heads=4,
        head_dim=32,
        global_head_dim=64,
        vocab_size=VOCAB,
        vocab_size_per_layer_input=VOCAB,
        num_key_value_heads=1,
        num_kv_shared_layers=len(pattern) // 2,
        hidden_size_per_layer_input=16,
        sliding_window=window,
        max_position_embeddings=4096,
    )
    model = _random(lambda: gemma4_text.Model(args), seed, scale)
    # Embeddings are tied: without random signs here the model echoes its input.
    model.model.norm.weight *= mx.where(mx.random.uniform(shape=(64,)) < 0.5, -1.0, 1.0)
    mx.eval(model.parameters())
    return model


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
        rope_parameters={
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            "full_attention": {"rope_theta": 1e6, "rope_type": "proportional", "partial_rotary_factor": 0.25},
        },
    )
    network = _random(lambda: AssistantNetwork(config), seed, 0.2)
    assert isinstance(network, AssistantNetwork)
    return assistant_source(network, 16)


def recurrent(seed: int = 0, scale: float = 0.2) -> nn.Module:
    """A Qwen3.5: gated delta nets, every second layer full attention."""
    args = qwen3_5.TextModelArgs(
        model_type="qwen3_5", num_hidden_layers=3, tie_word_embeddings=True, **SIZES, **DELTA
    )
    return _random(lambda: qwen3_5.TextModel(args), seed, scale)


def recurrent_moe(seed: int = 0, scale: float = 0.2) -> nn.Module:
    """A Qwen3-Next: gated delta nets, full attention and experts."""
    args = qwen3_next.ModelArgs(
        model_type="qwen3_next",
        num_hidden_layers=2,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        shared_expert_intermediate_size=64,
        mlp_only_layers=[],
        moe_intermediate_size=64,
        rope_theta=1e4,
        partial_rotary_factor=0.5,
        max_position_embeddings=1024,
        norm_topk_prob=True,
        **SIZES,
        **EPS,
        **DELTA,
    )
    return _random(lambda: qwen3_next.Model(args), seed, scale)


@cache
def model_of(kind: str) -> nn.Module:
    """Return the model of a kind of cache, the same one every time; that of "quantized" has windows, too."""
    model: nn.Module = globals()["sliding" if kind == "quantized" else kind]()
    return model


def bits_of(kind: str) -> int | None:
    """Return the bits of its K/V."""
    return 8 if "quantized" in kind else None


def prompt(length: int, seed: int = 3) -> list[int]:
    """`length` tokens with some repetition, so that lookup finds matches."""
    return [(7 * (i % 11) + seed * i // 5) % VOCAB for i in range(length)]
