"""Models with random weights: targets of real shapes with assistants, and a toy for long contexts.

Quantized weights are random bits, so that nothing larger than the model itself is ever held. The toy has the
caches of a large model and almost no weights. Its prompts are written into the caches without attention, so
64k tokens take a second; blocks of up to 64 tokens attend as usual.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import gemma4_text, llama
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
from mlx_spec.hub.weights import WeightFormat
from mlx_spec.types import Drafter, FeatureSpec, TargetParts

GROUP = 64
FOUR_BIT = WeightFormat(4, GROUP)
ON_CPU = 2**30  # bytes; the most for a machine without an accelerator
LOOKED_UP = "embed_tokens_per_layer"  # a table of which a token reads one row
NIBBLE = 4.6  # standard deviation of 0 .. 15
VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 256, 64, 4, 2, 64  # of the toy
WINDOW = 1024  # of the toy's sliding layers
LONGEST_BLOCK = 64  # tokens of the toy; longer ones are prompts
ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "default", "rope_theta": 1e6},
}


@dataclass(frozen=True)
class RandomPair:
    model: nn.Module
    make_drafter: Callable[[TargetParts], Drafter] | None
    needs: FeatureSpec
    vocab: int
    format: WeightFormat
    read: int  # bytes of weights that one token reads
    held: int  # bytes of weights


def gemma(args: gemma4_text.ModelArgs, assistant: AssistantConfig) -> RandomPair:
    """Return a 4-bit target with a bfloat16 assistant."""
    model = gemma4_text.Model(args)
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=GROUP, bits=FOUR_BIT.bits)
    _fit(model)
    _fill(model)
    network = AssistantNetwork(assistant)
    network.set_dtype(mx.bfloat16)
    if assistant.num_centroids:
        network.masked_embedding.token_ordering = mx.arange(assistant.vocab_size, dtype=mx.int32)
    mx.eval(network.parameters())
    return RandomPair(
        model,
        lambda parts: Gemma4Assistant(network, assistant.sliding_window, parts),
        Gemma4Assistant.needs,
        args.vocab_size,
        FOUR_BIT,
        sum(array.nbytes for name, array in weights(model).items() if LOOKED_UP not in name),
        _size(model),
    )


def dense(args: llama.ModelArgs) -> RandomPair:
    """Return a float32 target with tied embeddings and no drafter."""
    model = llama.Model(args)
    _fit(model)
    mx.eval(model.parameters())
    size = _size(model)
    return RandomPair(model, None, FeatureSpec(), args.vocab_size, WeightFormat(32), size, size)


def e4b() -> RandomPair:
    """Return a pair of the shape of Gemma 4 E4B and its assistant."""
    return gemma(
        gemma4_text.ModelArgs(
            hidden_size=2560,
            num_hidden_layers=42,
            intermediate_size=10240,
            num_attention_heads=8,
            num_key_value_heads=2,
            num_kv_shared_layers=18,
            sliding_window_pattern=6,
            use_double_wide_mlp=False,
        ),
        AssistantConfig(
            backbone_hidden_size=2560,
            vocab_size=262144,
            hidden_size=256,
            intermediate_size=2048,
            num_attention_heads=4,
            layer_types=(SLIDING, SLIDING, SLIDING, FULL),
            heads=(HeadShape(2, 256),) * 3 + (HeadShape(2, 512),),
            sliding_window=512,
            rms_norm_eps=1e-6,
            rope_parameters=ROPE,
            num_centroids=2048,
            centroid_intermediate_top_k=32,
        ),
    )


def tiny() -> RandomPair:
    """Return all parts of E4B, each as small as possible."""
    return gemma(
        gemma4_text.ModelArgs(
            hidden_size=64,
            num_hidden_layers=6,
            intermediate_size=64,
            num_attention_heads=2,
            head_dim=64,
            global_head_dim=64,
            vocab_size=256,
            vocab_size_per_layer_input=256,
            num_kv_shared_layers=3,
            hidden_size_per_layer_input=64,
            sliding_window=32,
            sliding_window_pattern=3,
            use_double_wide_mlp=False,
        ),
        AssistantConfig(
            backbone_hidden_size=64,
            vocab_size=256,
            hidden_size=64,
            intermediate_size=64,
            num_attention_heads=2,
            layer_types=(SLIDING, FULL),
            heads=(HeadShape(1, 64),) * 2,
            sliding_window=32,
            rms_norm_eps=1e-6,
            rope_parameters=ROPE,
            num_centroids=16,
            centroid_intermediate_top_k=4,
        ),
    )


def llama_f32(*, hidden: int = 1280, layers: int = 2, vocab: int = 4096) -> RandomPair:
    """Return a target of few wide layers: 230 MB, nearly all time in matrix products."""
    return dense(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=hidden,
            num_hidden_layers=layers,
            intermediate_size=4 * hidden,
            num_attention_heads=max(hidden // 128, 1),
            rms_norm_eps=1e-6,
            vocab_size=vocab,
        )
    )


SHAPES: dict[str, Callable[[], RandomPair]] = {"tiny": tiny, "llama-f32": llama_f32, "e4b": e4b}


def weights(model: nn.Module) -> dict[str, mx.array]:
    return dict(cast(list[tuple[str, mx.array]], tree_flatten(model.parameters())))


def _size(model: nn.Module) -> int:
    """Return the bytes of its weights."""
    return sum(array.nbytes for array in weights(model).values())


def _fit(model: nn.Module) -> None:
    """Exit if the weights, which are not allocated yet, are too large for this machine."""
    size = _size(model)
    found = mx.device_info()
    memory = int(found.get("memory_size") or found.get("total_memory") or 2 * ON_CPU)
    most = memory // 2 if mx.default_device().type == mx.gpu else ON_CPU
    if size > most:
        sys.exit(f"this shape has {size / 1e9:.1f} GB of weights, {most / 1e9:.1f} GB are the most here")


def _fill(model: nn.Module) -> None:
    """Fill quantized weights with random bits, and scales that give them the usual size."""
    for module in model.modules():
        if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
            columns = module.scales.shape[-1] * GROUP
            scale = columns**-0.5 / NIBBLE
            module.weight = mx.random.randint(-(2**31), 2**31 - 1, module.weight.shape).view(mx.uint32)
            module.scales = mx.full(module.scales.shape, scale, mx.bfloat16)
            module.biases = mx.full(module.scales.shape, -7.5 * scale, mx.bfloat16)
            mx.eval(module.parameters())
    mx.eval(model.parameters())


class Toy(nn.Module):
    """Layers of the given kinds: "full", "sliding", "recurrent"."""

    def __init__(self, kinds: tuple[str, ...], window: int = WINDOW) -> None:
        super().__init__()
        self.model = _Decoder(kinds)
        self._kinds, self._window = kinds, window

    @property
    def layers(self) -> list[nn.Module]:
        layers: list[nn.Module] = self.model.layers
        return layers

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
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
    """Return a random Gemma 4 assistant that reads the K/V of a Toy."""
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
