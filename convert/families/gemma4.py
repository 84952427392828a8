"""Gemma 4 assistants, whose names are ours already.

Source: transformers `models/gemma4_assistant`.
"""

from __future__ import annotations

from dataclasses import asdict

import mlx.core as mx

from mlx_spec.drafters.checkpoint import KEY, Conventions
from mlx_spec.drafters.gemma4 import AssistantConfig, AssistantNetwork, check_fit
from mlx_spec.errors import BadCheckpoint

from .common import LAYER_KEYS, Config, Converted, Tensors, finish, read, refuse_switches

NAME, TITLE = "gemma4_assistant", "the Gemma 4 assistant"
HEAD = "lm_head.weight"
KEYS = frozenset(
    "backbone_hidden_size num_centroids centroid_intermediate_top_k use_ordered_embeddings text_config "
    "block_size draft_vocab_size".split()
) | {KEY}
TEXT_KEYS = frozenset(
    "attention_k_eq_v global_head_dim num_global_key_value_heads hidden_activation per_layer_config "
    "num_kv_shared_layers use_bidirectional_attention vocab_size_per_layer_input num_experts top_k_experts "
    "moe_intermediate_size sliding_window_pattern final_logit_softcapping".split()
)
# Chained steps read the post-projection's output. All of a round are at the position of its first token.
CONVENTIONS = Conventions(hidden="post_norm", chain="post_norm", rope="target")


def convert(tensors: Tensors, config: Config, target_config: Config) -> Converted:
    """Convert an assistant. Raises BadCheckpoint, Mismatch for another target's."""
    assistant = AssistantConfig.from_dict(config)
    refuse_switches(TITLE, config, KEYS)
    refuse_switches(TITLE, config["text_config"], {*LAYER_KEYS, *TEXT_KEYS})
    check_fit(assistant, target_config)
    source = read(TITLE, tensors, config)
    for name in {"masked_embedding.token_ordering", "draft_ids"} & source.tensors.keys():
        ids = source.tensors[name]
        if not mx.issubdtype(ids.dtype, mx.integer):
            raise BadCheckpoint(
                f"{name} holds {ids.dtype} where token ids belong, a cast damaged it: download it again"
            )
        source.tensors[name] = ids.astype(mx.int32)
    source.drop(HEAD, "a copy of the embedding table")
    if not assistant.num_centroids:
        for name in [name for name in source.tensors if name.startswith("masked_embedding.")]:
            source.drop(name, "config.json has use_ordered_embeddings off")
    written = {**config, "model_type": NAME, KEY: asdict(CONVENTIONS)}
    head = f"a head of {assistant.num_centroids} centroids" if assistant.num_centroids else "a dense head"
    if assistant.draft_vocab_size is not None:
        head = f"the target's head for {assistant.draft_vocab_size} tokens"
    return finish(source, AssistantNetwork(assistant), written, notes=(head,))
