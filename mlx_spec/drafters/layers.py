"""Shared by EAGLE-3, P-EAGLE, the DFlash family and Gemma 4 assistants: sizes, layers, attention, tables."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gemma3_text import MLP as GeluMLP
from mlx_lm.models.qwen3 import MLP as SiluMLP
from mlx_lm.models.rope_utils import initialize_rope

from mlx_spec.checkpoint.config import Checkpoint, text_config
from mlx_spec.checkpoint.files import one_line
from mlx_spec.checkpoint.rope_formulas import SCALED, stated_ropes, stated_rotation
from mlx_spec.checkpoint.targets import Config
from mlx_spec.drafters.checkpoint import (
    CONFIG,
    Conventions,
    Size,
    check_target,
    check_tokens,
    load_weights,
    read_fields,
    required,
)
from mlx_spec.drafters.conditioned import DrafterCache
from mlx_spec.errors import BadCheckpoint, Mismatch
from mlx_spec.model.ropes import StatedRope

LAYER_CONFIG = f"layer_config in {CONFIG}"
MLPS: dict[str, Callable[[int, int], nn.Module]] = {"silu": SiluMLP, "gelu_pytorch_tanh": GeluMLP}


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of a layer in config.json."""

    hidden_size: Size  # D
    vocab_size: Size  # V, the target's
    intermediate_size: Size
    num_attention_heads: Size
    rms_norm_eps: float
    hidden_act: Literal["silu", "gelu_pytorch_tanh"]


@dataclass(frozen=True)
class LayerConfig(LayerSizes):
    """All of config.json. The names of the tensors show what it does not say."""

    draft_vocab_size: Size  # W <= V
    num_key_value_heads: Size
    head_dim: Size
    rope: nn.Module
    tensors: frozenset[str]
    conventions: Conventions
    written: Config  # config.json, for keys that only one family reads

    @classmethod
    def from_dict(cls, config: Config, tensors: Collection[str], target_config: Config) -> LayerConfig:
        """Read config.json; `tensors` are the names in the checkpoint.

        Raises BadCheckpoint for a missing key and an unsupported value.
        """
        layer = required(config, "layer_config", dict, CONFIG)
        heads = required(layer, "num_attention_heads", Size, LAYER_CONFIG)
        head_dim = layer.get("head_dim") or required(layer, "hidden_size", Size, LAYER_CONFIG) // heads
        derived = {"head_dim": head_dim, "num_key_value_heads": layer.get("num_key_value_heads") or heads}
        conventions = Conventions.from_config(config)
        return read_fields(
            cls,
            {"hidden_act": "silu", **layer, **derived},
            LAYER_CONFIG,
            draft_vocab_size=required(config, "draft_vocab_size", Size, CONFIG),
            rope=_rope(config, conventions, head_dim, target_config),
            tensors=frozenset(tensors),
            conventions=conventions,
            written=config,
        )


def _rope(config: Config, conventions: Conventions, head_dim: int, target_config: Config) -> nn.Module:
    """Return the rotary embedding of a drafter: the target's, or its own.

    It has its own if its conventions say so, or if the target has one for each type of attention.
    """
    stating: Config = {}
    max_positions = text_config(target_config).get("max_position_embeddings")
    if conventions.rope != "own":
        stating = required(required(config, "target", dict, CONFIG), "rope", dict, f"target in {CONFIG}")
    split = any(isinstance(value, Mapping) for value in (stating.get("rope_parameters") or {}).values())
    if split or not stating:
        stating = config["layer_config"]
        max_positions = stating.get("max_position_embeddings")
    scaling = stating.get("rope_parameters") or stating.get("rope_scaling")  # the new form, or the old one
    stated = stated_ropes({"max_position_embeddings": max_positions, **stating, "rope_scaling": scaling})
    both = {**stating, **(scaling or {})}
    is_cut = both.get("rope_type") != "proportional"  # proportional ropes rotate some pairs of the whole head
    dims = int(head_dim * float(both.get("partial_rotary_factor") or 1.0)) if is_cut else head_dim
    base = float(both.get("rope_theta") or 10000.0)
    try:
        rope = stated.get(None)
        if rope is not None and rope["rope_type"] in SCALED:
            return StatedRope(dims, False, stated_rotation(rope, dims))
        settings = dict(scaling) if scaling else None
        made: nn.Module = initialize_rope(dims, base, False, settings, max_positions)
        return made
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise BadCheckpoint(f"rotary parameters {scaling} cannot be used: {one_line(error)}") from error


def load_layers(
    make: Callable[[LayerConfig], nn.Module], checkpoint: Checkpoint, written: Config, target_config: Config
) -> tuple[nn.Module, LayerConfig]:
    """Load a network that reads captured layers. Raises BadCheckpoint, and Mismatch for another target."""
    config = LayerConfig.from_dict(written, checkpoint.headers.tensors, target_config)
    check_target(written, target_config)
    network = make(config)
    capture, layers = config.conventions.capture, written["target"]["num_hidden_layers"]
    exist = all(0 <= index < layers for index in capture)
    if not (capture and exist and len(set(capture)) == len(capture)):
        raise Mismatch(
            f"drafter reads the outputs of layers {list(capture)}, the target has layers 0 to {layers - 1} "
            "and each is read once: convert it again for this target"
        )
    if config.draft_vocab_size != config.vocab_size and "draft_ids" not in network:
        raise BadCheckpoint(
            f"{checkpoint.folder} has a vocabulary of {config.draft_vocab_size} of the target's "
            f"{config.vocab_size} tokens and no 'draft_ids' that say which: convert it again"
        )
    load_weights(network, checkpoint)
    if "draft_ids" in network:
        check_tokens("'draft_ids'", network.draft_ids, config.vocab_size)
    return network, config


def add_tables(network: nn.Module, tensors: Collection[str], width: int, vocab: int, drafted: int) -> None:
    """Add the tables that the checkpoint has: embedding, LM head, and the map of a reduced vocabulary.

    The embedding has `vocab` tokens, the LM head `drafted` of them.
    """
    if "embed_tokens.weight" in tensors:
        network.embed_tokens = nn.Embedding(vocab, width)
    if "lm_head.weight" in tensors:
        network.lm_head = nn.Linear(width, drafted, bias=False)
    if "draft_ids" in tensors:
        network.draft_ids = mx.zeros((drafted,), dtype=mx.int32)


class DrafterLayer(nn.Module):
    """A decoder layer around an attention that appends to the caches."""

    def __init__(self, config: LayerSizes, attention: nn.Module) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = attention
        self.mlp = MLPS[config.hidden_act](width, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)

    def __call__(self, x: mx.array, cache: DrafterCache) -> mx.array:
        return self.finish(x, self.self_attn(self.input_layernorm(x), cache))

    def finish(self, residual: mx.array, attended: mx.array) -> mx.array:
        """Return the layer's output [1, T, D] from the residual stream and the output of attention."""
        x = residual + attended
        result: mx.array = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Gemma4Layer(DrafterLayer):
    """A decoder layer that also norms what its sublayers return, and scales its output."""

    def __init__(self, config: LayerSizes, attention: nn.Module) -> None:
        super().__init__(config, attention)
        self.pre_feedforward_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_feedforward_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layer_scalar = mx.ones(1)

    def finish(self, residual: mx.array, attended: mx.array) -> mx.array:
        x = residual + self.post_attention_layernorm(attended)
        y = self.mlp(self.pre_feedforward_layernorm(x))
        result: mx.array = (x + self.post_feedforward_layernorm(y)) * self.layer_scalar
        return result


class DrafterAttention(nn.Module):
    """Grouped-query attention over `DrafterCache`; projections have biases if the checkpoint has them."""

    def __init__(self, config: LayerConfig, inputs: int, name: str, *, normed: bool) -> None:
        super().__init__()
        heads, groups, head = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self._heads, self._groups, self._scale = heads, groups, head**-0.5

        def linear(projection: str, inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=f"{name}.{projection}.bias" in config.tensors)

        self.q_proj = linear("q_proj", inputs, heads * head)
        self.k_proj = linear("k_proj", inputs, groups * head)
        self.v_proj = linear("v_proj", inputs, groups * head)
        self.o_proj = linear("o_proj", heads * head, config.hidden_size)
        if normed:
            self.q_norm = nn.RMSNorm(head, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(head, eps=config.rms_norm_eps)
        self._rope = config.rope

    def queries(self, x: mx.array, position: int) -> mx.array:
        """Return the queries [1, H, T, Dk] of rows [1, T, D] from `position` on."""
        queries = self._split(self.q_proj(x), self._heads)
        normed = self.q_norm(queries) if "q_norm" in self else queries
        turned: mx.array = self._rope(normed, offset=position)
        return turned

    def append(self, x: mx.array, cache: DrafterCache, position: int) -> tuple[mx.array, mx.array]:
        """Append K and V of rows [1, T, D] from `position` on. Return all rows of the cache."""
        keys = self._split(self.k_proj(x), self._groups)
        keys = self._rope(self.k_norm(keys) if "k_norm" in self else keys, offset=position)
        return cache.update_and_fetch(keys, self._split(self.v_proj(x), self._groups))

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None = None
    ) -> mx.array:
        """Return the projected result [1, T, D] of attention."""
        attended = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self._scale, mask=mask)
        return self.o_proj(attended.swapaxes(1, 2).reshape(1, queries.shape[2], -1))

    def _split(self, x: mx.array, heads: int) -> mx.array:
        """Reshape [1, T, H * Dk] to [1, H, T, Dk]."""
        return x.reshape(1, x.shape[1], heads, -1).swapaxes(1, 2)
