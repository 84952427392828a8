"""The five tiny pairs as transformers configs: the switches of the published checkpoints at toy sizes."""

from typing import Any

from transformers import (
    Gemma4AssistantConfig,
    Gemma4Config,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedTextConfig,
)

S, G = "sliding_attention", "full_attention"
VOCAB = 512
WINDOW = 16
NUM_CENTROIDS = 32  # 16 tokens each
CENTROID_TOP_K = 4  # 64 candidate tokens

Spec = dict[str, Any]

COMMON: Spec = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=64,
    head_dim=16,
    global_head_dim=32,
    max_position_embeddings=4096,
    sliding_window=WINDOW,
    rope_parameters={
        S: {"rope_type": "default", "rope_theta": 10_000.0},
        G: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
    final_logit_softcapping=30.0,
    tie_word_embeddings=True,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=2,
)

# What the variants below do not say otherwise.
TEXT: Spec = dict(
    num_kv_shared_layers=0,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_global_key_value_heads=None,
    attention_k_eq_v=False,
)
PER_LAYER: Spec = dict(vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=16)
NOT_PER_LAYER: Spec = dict(vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=0)
K_EQ_V: Spec = dict(attention_k_eq_v=True, num_global_key_value_heads=1, use_bidirectional_attention="vision")
MOE: Spec = dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=64)


def variant(seed: int, trained_seed: int, layer_types: list[str], *parts: Spec, **text: Any) -> Spec:
    """`seed` is of the random pair; both were chosen for the greedy margins of golden.json."""
    own = dict(num_hidden_layers=len(layer_types), layer_types=layer_types)
    for part in (*parts, text):
        own |= part
    return dict(seed=seed, trained_seed=trained_seed, centroids=False, unified=False, text={**TEXT, **own})


VARIANTS: dict[str, Spec] = {
    # per-layer embeddings, shared K/V, double-wide MLP in the sharing layers, 1 KV head, centroid head
    "e2b": variant(
        1339,
        1239,
        [S, S, S, S, G] * 2,
        PER_LAYER,
        num_kv_shared_layers=4,
        num_key_value_heads=1,
        use_double_wide_mlp=True,
    )
    | {"centroids": True},
    # per-layer embeddings, shared K/V, 2 KV heads, centroid head
    "e4b": variant(1749, 1249, [S, S, S, G] * 2, PER_LAYER, num_kv_shared_layers=3, use_double_wide_mlp=False)
    | {"centroids": True},
    # mixture of experts, K = V in the full layers, dense head
    "26b": variant(1359, 1259, [S, S, S, G], NOT_PER_LAYER, K_EQ_V, MOE),
    # dense, K = V in the full layers, more heads
    "31b": variant(
        1369,
        1269,
        [S, S, G] * 2,
        NOT_PER_LAYER,
        K_EQ_V,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_global_key_value_heads=2,
    ),
    # gemma4_unified: dense, K = V in the full layers, 1 global KV head
    "12b": variant(1279, 1379, [S, S, G] * 2, K_EQ_V) | {"unified": True},
}


def text_values(spec: Spec) -> Spec:
    return {**COMMON, **spec["text"]}


def target_config(spec: Spec) -> Gemma4Config | Gemma4UnifiedConfig:
    # The image, audio and video placeholder ids keep their published values (2588xx), out of the vocabulary:
    # transformers replaces placeholders by <pad> before embedding, mlx-lm does not.
    if spec["unified"]:
        text = Gemma4UnifiedTextConfig(**text_values(spec))
        return Gemma4UnifiedConfig(text_config=text.to_dict(), vision_config=None, audio_config=None)
    text = Gemma4TextConfig(**text_values(spec))
    return Gemma4Config(text_config=text.to_dict(), vision_config=None, audio_config=None)


def assistant_config(spec: Spec) -> Gemma4AssistantConfig | Gemma4UnifiedAssistantConfig:
    target = text_values(spec)
    kv_keys = ("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads", "attention_k_eq_v")
    text = {
        **COMMON,
        **{key: target[key] for key in kv_keys},
        "num_hidden_layers": 4,
        "layer_types": [S, S, S, G],
        "num_kv_shared_layers": 4,  # every layer reads the target's K/V
        "final_logit_softcapping": None,
    }
    head = dict(
        backbone_hidden_size=target["hidden_size"],
        use_ordered_embeddings=spec["centroids"],
        num_centroids=NUM_CENTROIDS,
        centroid_intermediate_top_k=CENTROID_TOP_K,
        tie_word_embeddings=True,
    )
    if spec["unified"]:
        return Gemma4UnifiedAssistantConfig(text_config=Gemma4UnifiedTextConfig(**text).to_dict(), **head)
    text |= dict(
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        enable_moe_block=False,
        use_double_wide_mlp=False,
    )
    return Gemma4AssistantConfig(text_config=Gemma4TextConfig(**text).to_dict(), **head)
