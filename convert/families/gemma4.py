"""Gemma 4 assistants. Our names of tensors are the published ones.

Source: transformers `models/gemma4_assistant`.
"""

from __future__ import annotations

from dataclasses import asdict

import mlx.core as mx

from mlx_spec.checkpoint.targets import Config
from mlx_spec.drafters.checkpoint import KEY, Conventions
from mlx_spec.drafters.gemma4 import AssistantConfig, AssistantNetwork, check_fit
from mlx_spec.errors import BadCheckpoint

from .common import LAYER_KEYS, Converted, Tensors, finish, read, refuse_switches


def convert(tensors: Tensors, config: Config, target_config: Config) -> Converted:
    """Convert an assistant. Raises BadCheckpoint, and Mismatch if it is made for another target."""
    assistant = AssistantConfig.from_dict(config)
    title = "the Gemma 4 assistant"
    keys = (
        "backbone_hidden_size num_centroids centroid_intermediate_top_k use_ordered_embeddings text_config "
        "block_size draft_vocab_size"
    ).split()
    layer_keys = (
        "attention_k_eq_v global_head_dim num_global_key_value_heads hidden_activation per_layer_config "
        "num_kv_shared_layers use_bidirectional_attention vocab_size_per_layer_input num_experts "
        "top_k_experts moe_intermediate_size sliding_window_pattern final_logit_softcapping"
    ).split()
    refuse_switches(title, config, {*keys, KEY})
    refuse_switches(title, config["text_config"], {*LAYER_KEYS, *layer_keys})
    check_fit(assistant, target_config)
    source = read(title, tensors, config)
    for name in {"masked_embedding.token_ordering", "draft_ids"} & source.tensors.keys():
        ids = source.tensors[name]
        if not mx.issubdtype(ids.dtype, mx.integer):
            raise BadCheckpoint(
                f"{name} holds {ids.dtype} where token ids belong, a cast damaged it: download it again"
            )
        source.tensors[name] = ids.astype(mx.int32)
    source.drop("lm_head.weight", "a copy of the embedding table")
    if not assistant.num_centroids:
        for name in [name for name in source.tensors if name.startswith("masked_embedding.")]:
            source.drop(name, "config.json has use_ordered_embeddings off")
    # Later draft steps read the output of the post-projection. All steps of a round have the same position.
    conventions = Conventions(hidden="post_norm", chain="post_norm", rope="target")
    written = {**config, "model_type": "gemma4_assistant", KEY: asdict(conventions)}
    head = f"a head of {assistant.num_centroids} centroids" if assistant.num_centroids else "a dense head"
    if assistant.draft_vocab_size is not None:
        head = f"the target's head for {assistant.draft_vocab_size} tokens"
    return finish(source, AssistantNetwork(assistant), written, notes=(head,))
