"""Keys of config.json that the code of a model does not read are named, and no others."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.models.cache import RotatingKVCache
from support import pairs, tiny

from mlx_spec.checkpoint.config import read_checkpoint
from mlx_spec.checkpoint.repairs import repair_config
from mlx_spec.checkpoint.unread import source_of, unread_keys, unread_window
from mlx_spec.model.read import read_model

Settings = dict[str, Any]
DENSE = {"hidden_act": "silu", "attention_bias": False, "initializer_range": 0.02, "use_cache": True}
DENSE |= {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "pretraining_tp": 1, "head_dim": 128}
DENSE |= {"attention_dropout": 0.0, "max_position_embeddings": 32_768, "bos_token_id": 1, "torch_dtype": "f"}
EXPERTS = DENSE | {"num_experts_per_tok": 8, "router_aux_loss_coef": 0.001, "output_router_logits": False}
EXPERTS |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
NORMED = EXPERTS | {"norm_topk_prob": True}
V3 = NORMED | {"aux_loss_alpha": 0.001, "ep_size": 1, "n_group": 8, "topk_group": 4, "seq_aux": True}
V3 |= {
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    "routed_scaling_factor": 2.5,
}


def named(kind: str, settings: Settings) -> list[str]:
    config = repair_config({"model_type": kind, **settings})
    module = {"mistral": "llama", "minimax_m2": "minimax"}.get(kind, kind)
    return unread_keys(config, source_of(import_module(f"mlx_lm.models.{module}")))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (
            "llama",
            DENSE
            | {"mlp_bias": False, "is_llama_config": True, "rope_interleaved": False, "gguf_read": 96576768},
        ),
        ("qwen2", DENSE | {"max_window_layers": 28, "sliding_window": 32_768, "use_sliding_window": False}),
        ("qwen3", DENSE | {"max_window_layers": 28, "sliding_window": None, "use_sliding_window": False}),
        ("qwen3_moe", NORMED | {"moe_intermediate_size": 768}),
        ("qwen2_moe", EXPERTS | {"norm_topk_prob": False, "shared_expert_intermediate_size": 5632}),
        ("deepseek_v3", V3 | {"num_nextn_predict_layers": 1, "quantization_config": {"quant_method": "fp8"}}),
        (
            "minimax_m2",
            EXPERTS | {"attn_type_list": [1, 1], "qk_norm_type": "per_layer", "num_mtp_modules": 3},
        ),
        ("gemma2", DENSE | {"hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 128}),
        ("gpt_oss", EXPERTS | {"swiglu_limit": 7.0, "experts_per_token": 8, "initial_context_length": 4096}),
        ("gpt2", {"scale_attn_weights": True, "layer_norm_epsilon": 1e-5, "summary_type": "cls_index"}),
        ("gpt_neox", {"hidden_act": "gelu", "rope_theta": 1e6, "rotary_pct": 0.25, "layer_norm_eps": 1e-5}),
        ("phi3", DENSE | {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}),
        ("cohere2", {"use_parallel_block": True, "rotary_pct": 1.0, "logit_scale": 0.25, "layer_switch": 4}),
        ("openelm", {"activation_fn_name": "swish", "qkv_multipliers": [0.5, 1.0], "ffn_with_glu": True}),
        ("granitemoehybrid", EXPERTS | {"residual_multiplier": 0.22, "normalization_function": "rmsnorm"}),
        ("nemotron_h", {"mlp_hidden_act": "relu2", "norm_eps": 1e-5, "time_step_floor": 1e-4}),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_published_configs_are_read(kind: str, settings: Settings) -> None:
    assert named(kind, settings) == []


@pytest.mark.parametrize(
    ("kind", "key", "value", "neutral"),
    [
        ("llama", "final_logit_softcapping", 31.5, None),
        ("llama", "hidden_act", "gelu", "silu"),
        ("llama", "clip_qkv", 8.5, 0),
        ("llama", "some_new_scale", 0.37, 1.0),
        ("qwen3", "residual_multiplier", 0.22, 1),
        ("gemma3_text", "final_logit_softcapping", 31.5, None),
        ("qwen", "use_logn_attn", True, False),
        ("qwen2_moe", "norm_topk_prob", True, False),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True, False),
        ("gpt2", "scale_attn_weights", False, True),
        ("deepseek_v3", "rope_interleave", False, True),
        ("nanochat", "final_logit_softcapping", 30.5, 15.0),
        ("llama", "attention_chunk_size", 8192, None),
        ("llama", "some_new_switch", True, False),
        ("kimi_linear", "mla_use_nope", False, True),
        ("falcon_h1", "mamba_use_mlp", False, True),
        ("llama4", "no_rope_layers", [1, 0, 1, 0], [1, 1, 1, 0]),
        ("llama", "rope_layers", [1, 0], [1, 1]),
        ("llama", "residual_scales", [0.5, 2.0], None),
    ],
)
def test_a_key_that_no_code_reads_is_named(kind: str, key: str, value: Any, neutral: Any) -> None:
    assert named(kind, {key: value}) == [f"{key} {value}"]
    assert named(kind, {key: neutral}) == []


@pytest.mark.parametrize(
    ("settings", "is_named"),
    [
        ({"model_type": "mistral"}, True),
        ({"model_type": "mistral", "max_position_embeddings": 64}, False),
        ({"model_type": "qwen2"}, False),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 4}, False),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2}, True),
        ({"model_type": "x", "layer_types": ["full_attention"] * 4}, False),
        ({"model_type": "x", "layer_types": ["sliding_attention", "full_attention"] * 2}, True),
    ],
)
def test_a_window_that_no_cache_has_is_named(settings: Settings, is_named: bool) -> None:
    config = {"max_position_embeddings": 512, "num_hidden_layers": 4, "sliding_window": 64, **settings}
    assert unread_window(config, "", [False] * 4) == (["sliding_window 64"] if is_named else [])
    kinds = settings.get("layer_types", ["sliding_attention"] * 4)
    assert unread_window(config, "", [kind == "sliding_attention" for kind in kinds]) == []


@pytest.mark.parametrize("of_class", [[False, True] * 2, [True] * 4])
def test_windows_at_other_layers_are_named_unless_the_class_reads_the_kinds(of_class: list[bool]) -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    config = {"layer_types": kinds, "max_position_embeddings": 512, "sliding_window": 64}
    assert unread_window(config, "", of_class)[0].startswith("layer_types ['sliding_attention', 'full")
    assert unread_window(config, 'config["layer_types"]', of_class) == []
    assert unread_window({**config, "sliding_window": 512}, "", of_class) == []
    assert unread_window({**config, "layer_types": kinds[:2]}, "", of_class) == []


def test_reading_a_model_names_what_its_class_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read_model(read_checkpoint(pairs.save(tiny.full(), tmp_path / "right")))
    assert capsys.readouterr().err == ""
    folder = pairs.save(tiny.full(), tmp_path / "other", attn_logit_softcapping=50.5)
    read_model(read_checkpoint(folder))
    assert "mlx-lm does not read attn_logit_softcapping 50.5 of config.json" in capsys.readouterr().err


def test_reading_a_model_with_windows_at_other_layers_names_their_kinds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny.make("gemma3_text")
    kinds = [
        "sliding_attention" if isinstance(c, RotatingKVCache) else "full_attention"
        for c in model.make_cache()
    ]
    for name, layers in (("right", kinds), ("other", kinds[::-1])):
        read_model(read_checkpoint(pairs.save(model, tmp_path / name, layer_types=layers)))
        assert ("does not read layer_types" in capsys.readouterr().err) == (name == "other")
