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

# seed: of the random pair, trained_seed: of the trained one; chosen for the greedy margins of golden.json.
VARIANTS: dict[str, Spec] = {
    # per-layer embeddings, shared K/V, double-wide MLP in the sharing layers, 1 KV head, centroid head
    "e2b": dict(
        seed=1339,
        trained_seed=1239,
        centroids=True,
        unified=False,
        text=dict(
            num_hidden_layers=10,
            layer_types=[S, S, S, S, G] * 2,
            num_kv_shared_layers=4,
            num_attention_heads=4,
            num_key_value_heads=1,
            num_global_key_value_heads=None,
            attention_k_eq_v=False,
            hidden_size_per_layer_input=16,
            vocab_size_per_layer_input=VOCAB,
            use_double_wide_mlp=True,
        ),
    ),
    # per-layer embeddings, shared K/V, 2 KV heads, centroid head
    "e4b": dict(
        seed=1749,
        trained_seed=1249,
        centroids=True,
        unified=False,
        text=dict(
            num_hidden_layers=8,
            layer_types=[S, S, S, G] * 2,
            num_kv_shared_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_global_key_value_heads=None,
            attention_k_eq_v=False,
            hidden_size_per_layer_input=16,
            vocab_size_per_layer_input=VOCAB,
            use_double_wide_mlp=False,
        ),
    ),
    # mixture of experts, K = V in the full layers, dense head
    "26b": dict(
        seed=1359,
        trained_seed=1259,
        centroids=False,
        unified=False,
        text=dict(
            num_hidden_layers=4,
            layer_types=[S, S, S, G],
            num_kv_shared_layers=0,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=VOCAB,
            use_bidirectional_attention="vision",
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=64,
        ),
    ),
    # dense, K = V in the full layers, more heads
    "31b": dict(
        seed=1369,
        trained_seed=1269,
        centroids=False,
        unified=False,
        text=dict(
            num_hidden_layers=6,
            layer_types=[S, S, G] * 2,
            num_kv_shared_layers=0,
            num_attention_heads=8,
            num_key_value_heads=4,
            num_global_key_value_heads=2,
            attention_k_eq_v=True,
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=VOCAB,
            use_bidirectional_attention="vision",
        ),
    ),
    # gemma4_unified: dense, K = V in the full layers, 1 global KV head
    "12b": dict(
        seed=1279,
        trained_seed=1379,
        centroids=False,
        unified=True,
        text=dict(
            num_hidden_layers=6,
            layer_types=[S, S, G] * 2,
            num_kv_shared_layers=0,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            use_bidirectional_attention="vision",
        ),
    ),
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
