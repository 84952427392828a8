"""The decoder layer of a native MTP head, by the `model_type` of its target: mlx-lm's own.

A layer is built as the target has it where it is most complete: full attention, and experts if there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.nn as nn
from mlx_lm.models import deepseek_v3, glm4_moe, glm4_moe_lite, qwen3_5, qwen3_next

from mlx_spec.errors import BadCheckpoint
from mlx_spec.hub.files import AGAIN, one_line

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Kind:
    """One architecture."""

    build: Callable[[dict[str, Any]], nn.Module]
    array_mask: bool = False  # latent attention adds the mask to scores, and needs it as an array


def _qwen3_5(text: dict[str, Any]) -> nn.Module:
    args = qwen3_5.TextModelArgs.from_dict(text)
    return qwen3_5.DecoderLayer(args, args.full_attention_interval - 1)


def _qwen3_next(text: dict[str, Any]) -> nn.Module:
    args = replace(qwen3_next.ModelArgs.from_dict(text), mlp_only_layers=[], decoder_sparse_step=1)
    return qwen3_next.Qwen3NextDecoderLayer(args, args.full_attention_interval - 1)


def _deepseek_v3(text: dict[str, Any]) -> nn.Module:
    args = replace(deepseek_v3.ModelArgs.from_dict(text), moe_layer_freq=1)
    return deepseek_v3.DeepseekV3DecoderLayer(args, args.num_hidden_layers)


def _glm4_moe(text: dict[str, Any]) -> nn.Module:
    args = glm4_moe.ModelArgs.from_dict(text)
    return glm4_moe.DecoderLayer(args, args.num_hidden_layers)


def _glm4_moe_lite(text: dict[str, Any]) -> nn.Module:
    args = glm4_moe_lite.ModelArgs.from_dict(text)
    return glm4_moe_lite.Glm4MoeLiteDecoderLayer(args, args.num_hidden_layers)


KINDS: dict[str, Kind] = {
    "qwen3_next": Kind(_qwen3_next),
    "qwen3_5": Kind(_qwen3_5),
    "qwen3_5_text": Kind(_qwen3_5),
    "qwen3_5_moe": Kind(_qwen3_5),
    "qwen3_5_moe_text": Kind(_qwen3_5),
    "deepseek_v3": Kind(_deepseek_v3, array_mask=True),
    "glm4_moe": Kind(_glm4_moe),
    "glm4_moe_lite": Kind(_glm4_moe_lite, array_mask=True),
}


def build(layer_type: str, text: Config) -> tuple[nn.Module, Kind]:
    """The layer and its kind. Raises BadCheckpoint for an unknown one and where `text` is not of it."""
    if text.get("index_n_heads"):
        raise BadCheckpoint(
            f"the MTP head of a {layer_type} attends through an indexer (index_n_heads "
            f"{text['index_n_heads']}), which this version cannot run: use the target without it"
        )
    kind = KINDS.get(layer_type)
    if kind is None:
        raise BadCheckpoint(
            f"the MTP head of a {layer_type} cannot be run by this version, known are {', '.join(KINDS)}: "
            "use the target without it"
        )
    try:
        return kind.build(dict(text)), kind
    except (TypeError, KeyError, ValueError, AttributeError, AssertionError) as error:
        raise BadCheckpoint(
            f"text_config in config.json of the drafter describes no {layer_type} "
            f"({one_line(error)}): {AGAIN}"
        ) from error
