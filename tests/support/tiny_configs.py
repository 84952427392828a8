"""Tiny configurations of every architecture in mlx-lm, and of one model for each kind of cache.

`COMMON` gives each setting one small value, whatever architecture has it. `SPECIAL` lists what an
architecture needs besides, `VARIANTS` other forms of one. Windows hold 16 tokens.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import mlx.nn as nn
import mlx_lm.models

Settings = dict[str, Any]

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD, INNER, WINDOW = 256, 128, 4, 4, 2, 32, 64, 16
FULL, SLIDING = "full_attention", "sliding_attention"
ALTERNATE = [SLIDING, FULL] * (LAYERS // 2)
LINEAR = ["linear_attention", FULL] * (LAYERS // 2)
ROPE = {"rope_type": "default", "rope_theta": 1e4}

# Values, and the settings that have them.
_BY_VALUE: list[tuple[Any, str]] = [
    (VOCAB, "vocab_size vocab_size_per_layer_input"),
    (HIDDEN, "hidden_size hidden_dim n_embd d_model"),
    (LAYERS, "num_hidden_layers num_layers n_layer n_layers"),
    (HEADS, "num_attention_heads num_heads n_head n_heads"),
    (KV_HEADS, "num_key_value_heads num_kv_heads n_kv_heads"),
    (HEAD, "head_dim"),
    (
        INNER,
        "intermediate_size intermediate_size_mlp dense_intermediate_size moe_intermediate_size "
        "shared_intermediate_size shared_expert_intermediate_size "
        "moe_shared_expert_intermediate_size ffn_hidden_size expert_ffn_hidden_size",
    ),
    (
        4,
        "num_experts num_local_experts n_routed_experts moe_num_experts index_n_heads conv_kernel "
        "mamba_d_conv linear_num_value_heads linear_conv_kernel_dim",
    ),
    (
        2,
        "num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k sliding_window_pattern "
        "layer_group_size group_norm_size mamba_expand linear_num_key_heads full_attention_interval "
        "zero_expert_num",
    ),
    (
        1,
        "num_shared_experts n_shared_experts n_group topk_group first_k_dense_replace "
        "moe_layer_freq decoder_sparse_step n_groups mamba_n_groups",
    ),
    (True, "norm_topk_prob use_conv_bias use_qk_norm mla_scale_q_lora mla_scale_kv_lora"),
    (1.0, "routed_scaling_factor logits_scaling"),
    ("noaux_tc", "topk_method"),
    ([], "mlp_only_layers"),
    (
        32,
        "kv_lora_rank q_lora_rank qk_nope_head_dim v_head_dim index_head_dim linear_key_head_dim "
        "linear_value_head_dim dim_model_base query_pre_attn_scalar",
    ),
    (16, "qk_rope_head_dim state_size ssm_state_size mamba_d_state mamba_d_head mamba_head_dim"),
    (48, "qk_head_dim"),
    (8, "index_topk time_step_rank mamba_n_heads mamba_num_heads"),
    (1e-5, "rms_norm_eps norm_eps layer_norm_eps layer_norm_epsilon"),
    (1e4, "rope_theta rope_local_base_freq"),
    (2048, "max_position_embeddings n_positions n_ctx"),
    (0.5, "partial_rotary_factor residual_multiplier"),
    (WINDOW, "sliding_window"),
    (ALTERNATE, "layer_types"),
    (False, "tie_word_embeddings attention_bias mlp_bias use_bias conv_bias use_qkv_bias mamba_proj_bias"),
    (2.0, "embedding_multiplier scale_emb"),
    (0.2, "attention_multiplier"),
    (3, "conv_L_cache"),
    ((0.001, 100.0), "time_step_limit"),
    (1.4, "scale_depth"),
    ("identity", "zero_expert_type"),
    ("MLA", "attention_method"),
    (30.0, "final_logit_softcapping"),
]
COMMON: Settings = {name: value for value, names in _BY_VALUE for name in names.split()}
NESTED = {  # architectures that wrap another one: the name of the settings they take in "text_config"
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "kimi_vl": "deepseek_v3",
    "lfm2-vl": "lfm2",
    "mistral3": "ministral3",
    "pixtral": "llama",
    "qwen2_vl": "qwen2",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "gemma3n": "gemma3n",
    "kimi_k3": "kimi_k3",
    "llama4": "llama4",
    "minimax_m3_vl": "minimax_m3_vl",
    "muse_spark": "muse_spark",
}
TEXT_ARGS = {"gemma3n": "TextConfig", "qwen3_5": "TextModelArgs"}  # else "TextArgs", where there are any
SU = {"rope_type": "su", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "mscale_all_dim": 1.0}
LLAMA_4 = {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}
KDA = {
    "kda_layers": [1, 3],
    "full_attn_layers": [2, 4],
    "num_heads": 4,
    "head_dim": 32,
    "short_conv_kernel_size": 4,
}
BY_KIND = {kind: ROPE for kind in (FULL, SLIDING)}
SPECIAL: dict[str, Settings] = {
    "afm7": {"num_kv_reuse_layers": 2},
    "apertus": {"post_norm": False, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2},
    "bailing_hybrid": {"rope_scaling": None},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": INNER, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": KV_HEADS, "clip_qkv": 8.0, "rope_theta": 1e4},
    },
    "deepseek_v2": {"rope_scaling": YARN},
    "exaone4": {"rope_scaling": None, "sliding_window_pattern": "LG"},
    "exaone_moe": {"is_moe_layer": [False, True, True, True]},
    "falcon_h1": {"mamba_d_ssm": HIDDEN},
    "gemma3n": {
        "num_kv_shared_layers": 2,
        "num_hidden_layers": 6,
        "layer_types": [SLIDING, FULL] * 3,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0, 0.0],
        "hidden_size_per_layer_input": 16,
        "altup_num_inputs": 2,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 8,
    },
    "gemma4_text": {
        "num_hidden_layers": 8,
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 2,
        "num_kv_shared_layers": 4,
        "global_head_dim": 64,
        "hidden_size_per_layer_input": 16,
        "num_key_value_heads": 1,
    },
    "glm4_moe": {"rope_scaling": None},
    "glm_moe_dsa": {"scoring_func": "sigmoid", "rope_parameters": ROPE},
    "gear": {"layer_types": [FULL, SLIDING, "conv_mixer", SLIDING]},
    "gpt_bigcode": {"n_inner": INNER},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gptj": {"rotary_dim": 16},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan": {
        "rope_scaling": {"alpha": 10.0, "factor": 1.0, "type": "dynamic"},
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
    },
    "iquestloopcoder": {"loop_window_size": WINDOW},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_k3": {"linear_attn_config": KDA, "activation_situ_beta": 1.0, "attn_res_block_size": 2},
    "kimi_linear": {"linear_attn_config": KDA, "model_max_length": 2048},
    "laguna": {"num_attention_heads_per_layer": [4] * 4},
    "lfm2": {
        "block_dim": HIDDEN,
        "block_ff_dim": INNER,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 3],
        "layer_types": None,
    },
    "lfm2_moe": {
        "use_expert_bias": True,
        "num_dense_layers": 1,
        "full_attn_idxs": [1, 3],
        "layer_types": None,
    },
    "lille-130m": {"block_size": 2048},
    "llama4": {
        "attention_chunk_size": WINDOW,
        "interleave_moe_layer_step": 2,
        "num_experts_per_tok": 1,
        "rope_scaling": None,
        "floor_scale": 8,
    },
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash_ngram": {"ngram_vocab_size_ratio": 2},
    "mellum": {"rope_parameters": BY_KIND},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "scoring_func": "sigmoid",
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 1e4,
        "swa_num_attention_heads": HEADS,
        "swa_num_key_value_heads": KV_HEADS,
        "swa_head_dim": HEAD,
        "swa_v_head_dim": HEAD,
    },
    "minicpm3": {"rope_scaling": SU},
    "minimax": {"rotary_dim": 16},
    "minimax_m3_vl": {
        "rotary_dim": 16,
        "moe_layer_freq": [0, 1, 1, 1],
        "sparse_attention_freq": [0, 1, 0, 1],
        "index_block_size": 8,
        "index_topk_blocks": 2,
        "index_n_heads": KV_HEADS,
        "layer_types": None,
    },
    "ministral3": {"rope_parameters": LLAMA_4},
    "mistral4": {"rope_parameters": LLAMA_4},
    "muse_spark": {
        "post_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 1e4},
        "layer_rope_theta": [1e4, 0, 1e4, 0],
        "output_multiplier": 1.0,
        "moe_hidden_size": INNER,
        "num_shared_experts": 0,
    },
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"replace_with_linear": True}},
        ]
    },
    "nemotron_h": {"layer_types": None, "layers_block_type": ["mamba", "attention", "moe", "mlp"]},
    "olmo_hybrid": {"linear_allow_neg_eigval": True, "layer_types": LINEAR},
    "openelm": {
        "num_transformer_layers": 2,
        "model_dim": HIDDEN,
        "ffn_dim_divisor": 16,
        "num_query_heads": [4, 4],
        "num_kv_heads": [2, 2],
        "ffn_multipliers": [0.5, 1.0],
    },
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": INNER,
        "gegelu_limit": 20.0,
        "vocab_size": 100352,
    },
    "phixtral": {"num_vocab": VOCAB, "model_dim": HIDDEN, "rotary_dim": 16},
    "plamo": {"n_shared_head": 2},
    "plamo2": {"hidden_size_per_head": HEAD},
    "plamo3": {"window_size": WINDOW},
    "qwen": {"kv_channels": HEAD, "num_key_value_heads": HEADS},
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "recurrent", "attention"],
        "head_dim": HEAD,
    },
    "rwkv7": {
        "a_low_rank_dim": 16,
        "v_low_rank_dim": 16,
        "gate_low_rank_dim": 16,
        "decay_low_rank_dim": 16,
    },
    "spark2_5": {"rope_parameters": BY_KIND},
    "step3p5": {"num_attention_groups": KV_HEADS, "share_expert_dim": INNER, "moe_layers_enum": "1,2,3"},
}
VARIANTS: dict[str, tuple[str, Settings]] = {  # other forms: the architecture, and what differs
    "llama, no windows": ("llama", {"layer_types": [FULL] * LAYERS}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, longer windows": ("llama", {"sliding_window": 40}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}),
    "gemma4_text, no shared K/V": ("gemma4_text", {"num_kv_shared_layers": 0}),
    "gemma4_text, experts": (
        "gemma4_text",
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": INNER},
    ),
    "gemma4_text, keys as values": ("gemma4_text", {"attention_k_eq_v": True}),
    "gemma3_text, every third": ("gemma3_text", {"sliding_window_pattern": 3, "num_hidden_layers": 6}),
    "plamo3, every third": ("plamo3", {"sliding_window_pattern": 3, "num_hidden_layers": 6}),
    "cohere2, every fourth": ("cohere2", {"sliding_window_pattern": 4}),
    "exaone4, no windows": ("exaone4", {"sliding_window": None, "sliding_window_pattern": None}),
    "ministral3, no windows": ("ministral3", {"layer_types": [FULL] * LAYERS}),
    "olmo3, windows first": ("olmo3", {"layer_types": [SLIDING, SLIDING, SLIDING, FULL]}),
    "gpt_oss, full first": ("gpt_oss", {"layer_types": [FULL, SLIDING] * 2}),
    "baichuan_m1, no windows": ("baichuan_m1", {"sliding_window_layers": []}),
    "jamba, more layers": ("jamba", {"num_hidden_layers": 6, "attn_layer_period": 3}),
    "nemotron_h, attention first": (
        "nemotron_h",
        {"layers_block_type": ["attention", "mamba", "mlp", "mamba"]},
    ),
    "lfm2, convolutions last": ("lfm2", {"full_attn_idxs": [0, 2]}),
    "granitemoehybrid, attention first": (
        "granitemoehybrid",
        {"layer_types": ["attention", "mamba", "mamba", "attention"]},
    ),
    "qwen3_next, every third": ("qwen3_next", {"full_attention_interval": 3, "num_hidden_layers": 6}),
    "llama4, chunks of 40": ("llama4", {"attention_chunk_size": 40}),
    "llama4, eight layers": ("llama4", {"num_hidden_layers": 8}),
    "gear, no convolutions": ("gear", {"layer_types": ALTERNATE}),
}
NOT_HERE = {  # why an architecture does not run
    "bitnet": "its kernels are for Metal only",
    "muse_spark": "its kernels are for Metal only",
    "olmo": "mlx-lm needs the package ai2-olmo for it",
    "prism_hadamard_qwen35": "a way to pack qwen3_5, with a list of packed modules of its own",
}

# Models of each kind of cache: the architecture, and all that is set. Their width is half of the others'.
SIZES: Settings = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
}
EPS: Settings = {"rms_norm_eps": 1e-5}
DELTA: Settings = {
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
CACHES: dict[str, tuple[str, Settings]] = {
    "full": ("llama", SIZES | EPS | {"num_hidden_layers": 3}),
    "full, normed": (  # with norms of queries and keys
        "qwen3",
        SIZES
        | EPS
        | {
            "num_hidden_layers": 3,
            "max_position_embeddings": 4096,
            "rope_theta": 1e4,
            "tie_word_embeddings": True,
        },
    ),
    "sliding": (  # sliding and full attention in turn
        "gemma3_text",
        SIZES
        | EPS
        | {
            "num_hidden_layers": 3,
            "rope_theta": 1e4,
            "rope_local_base_freq": 1e4,
            "query_pre_attn_scalar": 16,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
        },
    ),
    "shared": (  # as E2B: per-layer inputs, both kinds of attention, K/V shared by half of the layers
        "gemma4_text",
        SIZES
        | {
            "intermediate_size": 64,
            "global_head_dim": 64,
            "vocab_size_per_layer_input": VOCAB,
            "num_key_value_heads": 1,
            "hidden_size_per_layer_input": 16,
            "sliding_window": WINDOW,
            "max_position_embeddings": 4096,
        },
    ),
    # Gated delta nets, every second layer full attention; the other one with experts, too.
    "recurrent": ("qwen3_5", SIZES | DELTA | {"num_hidden_layers": 3, "tie_word_embeddings": True}),
    "recurrent_moe": (
        "qwen3_next",
        SIZES
        | EPS
        | DELTA
        | {
            "num_hidden_layers": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "shared_expert_intermediate_size": 64,
            "mlp_only_layers": [],
            "moe_intermediate_size": 64,
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "max_position_embeddings": 1024,
            "norm_topk_prob": True,
        },
    ),
}


def names() -> list[str]:
    """Return the names of all architectures of mlx-lm, then those of the variants."""
    return [*(name for name in _modules() if _has_model(name)), *VARIANTS]


def built(name: str, changes: Settings) -> nn.Module:
    """Return a model with the weights that its class begins with. `changes` are settings."""
    if name in CACHES:
        kind, own = CACHES[name]
        parts = vars(importlib.import_module(f"mlx_lm.models.{kind}"))
        model, args = (parts.get(f"Text{part}", parts[part]) for part in ("Model", "ModelArgs"))
        whole: nn.Module = model(args(**{"model_type": kind} | own | changes))
        return whole
    kind, variant = VARIANTS.get(name, (name, {}))
    changes = variant | changes
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    settings: Settings = {"model_type": kind}
    if kind in NESTED:
        inner = NESTED[kind]
        parts = vars(importlib.import_module(f"mlx_lm.models.{inner}"))
        args = next(parts[key] for key in (TEXT_ARGS.get(inner), "TextArgs", "ModelArgs") if key in parts)
        settings |= {"text_config": _settings(inner, args) | changes, "vocab_size": VOCAB}
    else:
        settings |= _settings(kind, module.ModelArgs) | changes
    nested: nn.Module = module.Model(module.ModelArgs.from_dict(settings))
    return nested


def _settings(name: str, args: Any) -> Settings:
    known = inspect.signature(args).parameters
    return {k: v for k, v in COMMON.items() if k in known} | {"model_type": name} | SPECIAL.get(name, {})


def _modules() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)]


def _has_model(name: str) -> bool:
    if name in NOT_HERE:
        return True
    return hasattr(importlib.import_module(f"mlx_lm.models.{name}"), "Model")
