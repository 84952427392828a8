"""Gemma 4 assistants. The names are ours already; what remains is the head's copy and the integer ordering.

Source: transformers `models/gemma4_assistant`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict

import mlx.core as mx

from mlx_spec.checkpoint import shortened
from mlx_spec.convert.families.conventions import KEY, Conventions
from mlx_spec.convert.families.family import Config, Converted, Family, Tensors
from mlx_spec.drafters.gemma4 import AssistantConfig, check_fit
from mlx_spec.errors import BadCheckpoint

NAME = "gemma4_assistant"
MODEL_TYPES = (NAME, "gemma4_unified_assistant")
TABLE, HEAD, ORDER = "model.embed_tokens.weight", "lm_head.weight", "masked_embedding.token_ordering"
OUTER = ("pre_projection.weight", "post_projection.weight", "model.norm.weight")
CENTROIDS = ("masked_embedding.centroids.weight", ORDER)
OF_LAYER = (
    "self_attn.q_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_norm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "pre_feedforward_layernorm.weight",
    "post_feedforward_layernorm.weight",
    "layer_scalar",
)
# Chained steps read the post-projection's output. All of a round stand at the position of the pending token.
CONVENTIONS = Conventions(
    hidden="post_norm", chain="post_norm", fc_order=("embedding", "hidden"), rope="target"
)


def recognises(config: Config, names: Collection[str]) -> bool:
    """Whether this is an assistant, by its model_type."""
    return config.get("model_type") in MODEL_TYPES


def convert(tensors: Tensors, config: Config, target_config: Config) -> Converted:
    """The assistant for this target. Raises Mismatch where it was made for another, BadCheckpoint."""
    assistant = AssistantConfig.from_dict(config)
    check_fit(assistant, target_config)
    layers = range(len(assistant.layer_types))
    needed = {TABLE, *OUTER, *(f"model.layers.{i}.{name}" for i in layers for name in OF_LAYER)}
    needed |= set(CENTROIDS) if assistant.num_centroids else set()
    missing = sorted(needed - tensors.keys())
    if missing:
        raise BadCheckpoint(f"this assistant lacks the tensors {shortened(missing)}: download it again")
    ours = {name: tensors[name] for name in sorted(needed)}
    if ORDER in ours:
        ours[ORDER] = _integers(ours[ORDER])
    dropped = {}
    if HEAD in tensors:
        dropped[HEAD] = "a copy of the embedding table"
    if not assistant.num_centroids:
        dropped |= {
            name: "config.json has use_ordered_embeddings off" for name in CENTROIDS if name in tensors
        }
    written = {**config, "model_type": NAME, KEY: asdict(CONVENTIONS)}
    head = f"a head of {assistant.num_centroids} centroids" if assistant.num_centroids else "a dense head"
    return Converted(written, ours, frozenset(needed), dropped, _quantizable, (head,))


def _integers(order: mx.array) -> mx.array:
    """Token ids, kept integer. Raises BadCheckpoint for floats."""
    if not mx.issubdtype(order.dtype, mx.integer):
        raise BadCheckpoint(
            f"{ORDER} holds {order.dtype} where token ids belong, a cast damaged it: download it again"
        )
    return order.astype(mx.int32)


def _quantizable(name: str) -> bool:
    return name.endswith(".weight") and "norm" not in name.rsplit(".", 2)[-2]


GEMMA4_ASSISTANT = Family(NAME, runnable=True, recognises=recognises, convert=convert)
