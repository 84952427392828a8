"""Native multi-token prediction heads: Qwen3-Next, Qwen3.5, Qwen3.6, DeepSeek-V3, GLM-4.5 and later.

A head norms the target's hidden state and the embedding of the token that follows it. It projects both to one
vector, and runs a decoder layer of the target's architecture (DeepSeek-V3, arXiv:2412.19437, section 2.2). It
runs again for every further token, on its own output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import deepseek_v3, glm4_moe, glm4_moe_lite, qwen3_5, qwen3_next

from mlx_spec.checkpoint.config import Checkpoint
from mlx_spec.checkpoint.files import AGAIN, one_line
from mlx_spec.checkpoint.targets import Config
from mlx_spec.drafters.checkpoint import (
    CONFIG,
    POST_NORM,
    PRE_NORM,
    Conventions,
    Size,
    check_target,
    load_weights,
    required,
)
from mlx_spec.drafters.conditioned import ChainDrafter, DrafterCache, check_conventions, network_source
from mlx_spec.drafters.drafter import DrafterSource
from mlx_spec.drafters.layers import add_tables
from mlx_spec.errors import BadCheckpoint
from mlx_spec.model.rotary import multi_axis_rope
from mlx_spec.prompt import RotaryPositions
from mlx_spec.types import Features, FeatureSpec

# --- the decoder layer of mlx-lm, with full attention, and with experts if the target has any


# By the `model_type` of the target: class of the arguments, class of the layer, arguments to override.
LAYERS: dict[str, tuple[Any, Callable[[Any, int], nn.Module], dict[str, Any]]] = {
    "qwen3_next": (
        qwen3_next.ModelArgs,
        qwen3_next.Qwen3NextDecoderLayer,
        {"mlp_only_layers": [], "decoder_sparse_step": 1},
    ),
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        (qwen3_5.TextModelArgs, qwen3_5.DecoderLayer, {}),
    ),
    "deepseek_v3": (deepseek_v3.ModelArgs, deepseek_v3.DeepseekV3DecoderLayer, {"moe_layer_freq": 1}),
    "glm4_moe": (glm4_moe.ModelArgs, glm4_moe.DecoderLayer, {}),
    "glm4_moe_lite": (glm4_moe_lite.ModelArgs, glm4_moe_lite.Glm4MoeLiteDecoderLayer, {}),
}


def _build_layer(layer_type: str, text: Mapping[str, Any]) -> nn.Module:
    if text.get("index_n_heads"):
        raise BadCheckpoint(
            f"the MTP head of a {layer_type} attends through an indexer (index_n_heads "
            f"{text['index_n_heads']}), which this version cannot run: use the target without it"
        )
    if layer_type not in LAYERS:
        raise BadCheckpoint(
            f"the MTP head of a {layer_type} cannot be run by this version, known are {', '.join(LAYERS)}: "
            "use the target without it"
        )
    arguments, layer, changes = LAYERS[layer_type]
    try:
        args = replace(arguments.from_dict(dict(text)), **changes)
        full = vars(args).get("full_attention_interval", args.num_hidden_layers + 1)
        return layer(args, full - 1)
    except (TypeError, KeyError, ValueError, AttributeError, AssertionError) as error:
        raise BadCheckpoint(
            f"text_config in {CONFIG} describes no {layer_type} ({one_line(error)}): {AGAIN}"
        ) from error


class MTPNetwork(nn.Module):
    """The head: two norms, a projection, a decoder layer, a norm. Parameters have the converter's names."""

    def __init__(self, config: Mapping[str, Any], conventions: Conventions) -> None:
        super().__init__()
        text: dict[str, Any] = required(config, "text_config", dict, CONFIG)
        where = f"text_config in {CONFIG}"
        width, eps = required(text, "hidden_size", Size, where), required(text, "rms_norm_eps", float, where)
        layer_type = required(config, "layer_type", str, CONFIG)
        array_masks = ("deepseek_v3", "glm4_moe_lite")  # latent attention adds the mask to its scores
        self._array_mask, self._conventions = layer_type in array_masks, conventions
        self.norm_embedding = nn.RMSNorm(width, eps=eps)
        self.norm_hidden = nn.RMSNorm(width, eps=eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = [_build_layer(layer_type, text)]
        self.norm = nn.RMSNorm(width, eps=eps)

    def fuse(self, features: mx.array) -> mx.array:
        return features

    def __call__(
        self, embedded: mx.array, hidden: mx.array, caches: list[DrafterCache]
    ) -> tuple[mx.array, mx.array]:
        """Return the hidden state for the next step and the final norm's output, [T, D] each."""
        dtype = self.norm.weight.dtype
        inputs = [self.norm_embedding(embedded.astype(dtype)), self.norm_hidden(hidden.astype(dtype))]
        x = self.fc(mx.concatenate(inputs, axis=-1))[None]
        x = self.layers[0](x, caches[0].mask(x.shape[1], array=self._array_mask), caches[0])
        normed: mx.array = self.norm(x)[0]
        return normed if self._conventions.chain == POST_NORM else x[0], normed

    @classmethod
    def open(cls, checkpoint: Checkpoint, config: Config, target_config: Config) -> DrafterSource:
        conventions = Conventions.from_config(config)
        check_conventions(conventions, (POST_NORM, PRE_NORM))
        check_target(config, target_config)
        network = cls(config, conventions)
        size = required(config["text_config"], "vocab_size", Size, f"text_config in {CONFIG}")
        add_tables(network, checkpoint.headers.tensors, network.norm.weight.size, size, size)
        load_weights(network, checkpoint)
        post_norm = conventions.hidden == POST_NORM
        needs = FeatureSpec(final_hidden=True) if post_norm else FeatureSpec(hidden_layers=(-1,))
        return network_source(str(config["model_type"]), network, needs, size, MTPDrafter)


class MTPDrafter(ChainDrafter):
    """A chain whose rows have the target's rotary positions, also in pictures and after them, as in vLLM."""

    _rotary = RotaryPositions()

    def observe(self, history: Sequence[int], features: Features) -> None:
        self._rotary = features.rotary
        super().observe(history, features)

    def process(self, rows: mx.array, tokens: list[int]) -> None:
        start = self._positions[-self._num_waiting]
        with multi_axis_rope(self._network, self._rotary, start, start + len(tokens)):
            super().process(rows, tokens)

    def _cut(self) -> None:
        super()._cut()
        for cache in self._caches:
            cache.offset += self._rotary.shift(cache.offset)
