"""Repair config.json: put its values under the keys that mlx-lm reads, and fill in missing values.

Missing values come from the weights, or from the defaults of transformers' config classes.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

from mlx_spec.checkpoint.headers import Tensors
from mlx_spec.checkpoint.owners import is_of_language
from mlx_spec.checkpoint.targets import Config

# Keys under which configs keep the language model. `layer_config` is our own, for drafters.
TEXT_CONFIGS = ("text_config", "layer_config", "transformer_layer_config", "llm_config", "language_config")
# --- names of tensors
HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output)\.(weight|scales)$")
TABLE = re.compile(r"(^|\.)(embed_tokens|wte|tok_embeddings|word_embeddings|embed_in|embeddings)\.weight$")

# --- defaults of transformers' config classes
# Model type -> values that config.json may leave out, and for which mlx-lm has another default or none.
# Composite configs leave out values that equal their default.
_MISTRAL = {"num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
_QWEN2_VL = {"max_position_embeddings": 32_768, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
_QWEN3_VL = {"max_position_embeddings": 128_000, "rms_norm_eps": 1e-6, "rope_theta": 5e5, "head_dim": 128}
_QWEN3_5 = {"max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
_QWEN3_5 |= {"head_dim": 256, "linear_num_value_heads": 32, "linear_key_head_dim": 128}
DEFAULTS: dict[str, dict[str, Any]] = {
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True, "rope_theta": 12e6},
    "deepseek_v2": {"rope_scaling": {"type": "yarn", "factor": 1.0}},  # mlx-lm knows no other rope for it
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
    },
    "gemma3n_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "max_position_embeddings": 32_768,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "final_logit_softcapping": 30.0,
    },
    "gemma4_text": {"max_position_embeddings": 131_072},
    "gemma4_unified_text": {
        "max_position_embeddings": 262_144,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
    },
    "gpt_oss": {"max_position_embeddings": 131_072},
    "granite": {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "attention_bias": False, "mlp_bias": False},
    "llama": {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 2048},
    "minimax_m2": {"shared_intermediate_size": 0, "rope_theta": 5e6, "head_dim": 128},
    "mistral": {**_MISTRAL, "max_position_embeddings": 131_072},
    "phi3": {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 4096},
    "qwen2": {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 32_768},
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3": {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 32_768},
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": {**_QWEN3_5, "num_experts": 256, "num_experts_per_tok": 8},
    "qwen3_moe": {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "norm_topk_prob": False, "mlp_only_layers": []},
    "qwen3_vl_text": _QWEN3_VL,
    "qwen3_vl_moe_text": {
        **_QWEN3_VL,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "solar_open": {"first_k_dense_replace": 0, "partial_rotary_factor": 1.0, "rope_theta": 1e6},
}
# Composite model type -> type of its language model, if that part does not name one.
TEXT_TYPES = {"gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "gemma4": "gemma4_text"}
TEXT_TYPES |= {"gemma4_unified": "gemma4_unified_text", "mistral3": "mistral", "llava": "llama"}
TEXT_TYPES |= {
    f"qwen{name}": f"qwen{name}_text" for name in ("2_vl", "2_5_vl", "3_vl", "3_vl_moe", "3_5", "3_5_moe")
}
# Model type -> key of mlx-lm -> key of transformers 5 with its value.
RENAMED = {
    "exaone": {"num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps"},
    "gpt2": {"n_ctx": "n_positions"},
    "gpt_neox": {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
    "lfm2": {"block_dim": "hidden_size", "block_ff_dim": "intermediate_size"},
    "solar_open": {"intermediate_size": "moe_intermediate_size"},
}


def repair_config(config: Config, tensors: Tensors | None = None) -> dict[str, Any]:
    """Return `config` with the keys that mlx-lm reads. Missing sizes come from the weights."""
    result: dict[str, Any] = decode_floats(copy.deepcopy(dict(config)))
    # A language model that is saved alone gets the composite type that mlx-lm has for it.
    wrapped = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe", "gemma3n_text": "gemma3n"}
    if result.get("model_type") in wrapped and not isinstance(result.get("text_config"), dict):
        result = {**result, "model_type": wrapped[result["model_type"]], "text_config": dict(result)}
    nested = next((result[key] for key in TEXT_CONFIGS if isinstance(result.get(key), dict)), None)
    for model in (result, nested):
        if model is not None:
            _count(model)
            _spread_rope(model)
            if "num_local_experts" in model:  # of Qwen3 in transformers 5
                model.setdefault("num_experts", model["num_local_experts"])
    model_type, text = str(result.get("model_type")), result if nested is None else nested
    text_type = str(text.get("model_type") or TEXT_TYPES.get(model_type, model_type))
    if nested is not None and model_type in TEXT_TYPES:
        nested.setdefault("model_type", TEXT_TYPES[model_type])
    language = {name: info for name, info in (tensors or {}).items() if is_of_language(name)}
    _fill(text, _sizes(text, language))
    _fill(text, {key: text[old] for key, old in RENAMED.get(text_type, {}).items() if old in text})
    if "hidden_size" in text:  # a fragment of a config is not completed
        _fill(text, DEFAULTS.get(text_type, {}))
    if text_type in BY_TYPE:
        BY_TYPE[text_type](text)
    _tie(result, text, language)
    # Composite types whose vocabulary size mlx-lm reads from the top level.
    top_vocabulary = ("gemma3", "gemma4", "gemma4_unified")
    if model_type in top_vocabulary and nested is not None and "vocab_size" in nested:
        result["vocab_size"] = nested["vocab_size"]
    return result


def decode_floats(value: Any) -> Any:
    """Return a value of config.json with infinity and NaN decoded, which transformers writes as tags."""
    if isinstance(value, dict):
        tag = value.get("__float__")
        if tag in ("Infinity", "-Infinity", "NaN"):
            return float(tag)
        return {key: decode_floats(each) for key, each in value.items()}
    return [decode_floats(each) for each in value] if isinstance(value, list) else value


def _fill(config: dict[str, Any], values: Config) -> None:
    config |= {key: copy.deepcopy(value) for key, value in values.items() if config.get(key) is None}


def _count(config: dict[str, Any]) -> None:
    """Turn whole floats into integers for keys that are counts or sizes: some tools write 4096.0."""
    of_counts = (
        "^(num|n)_|"
        "_(size|window|dim|layers?|heads|embeddings|length|positions|len|pattern|per_tok|rank|groups)$"
    )
    whole = {key: value for key, value in config.items() if isinstance(value, float) and value.is_integer()}
    config |= {key: int(value) for key, value in whole.items() if re.search(of_counts, key)}


def _sizes(text: Config, tensors: Tensors) -> dict[str, int]:
    """Return the sizes that the weights of the language model show, even if `text` has others."""
    sizes: dict[str, int] = {}
    norm = r"(^|(model|transformer|backbone|gpt_neox)\.)(norm|ln_f|norm_f|final_layer_?norm)\.weight$"
    feed_forward = r"layers\.0\.mlp\.(up_proj|gate_proj|fc1)\.weight$"
    for key, pattern in (("vocab_size", TABLE), ("hidden_size", norm), ("intermediate_size", feed_forward)):
        if (length := _axis(tensors, pattern)) is not None:  # the first axis is never packed
            sizes[key] = length
    matches = (re.search(r"(?:^|\.)(?:layers|h)\.(\d+)\.", name) for name in tensors)
    layers = [int(match[1]) for match in matches if match]
    if layers:
        sizes["num_hidden_layers"] = max(layers) + 1 - int(text.get("num_nextn_predict_layers") or 0)
    keys, output = _axis(tensors, r"\.k_proj\.weight$"), _axis(tensors, r"self_attn\.o_proj\.weight$", -1)
    known = {**sizes, **{key: value for key, value in text.items() if isinstance(value, int) and value > 0}}
    size, kv_heads, heads = (known.get(k) for k in ("head_dim", "num_key_value_heads", "num_attention_heads"))
    if keys and not size:
        size = keys // kv_heads if kv_heads else (output // heads if output and heads else None)
        sizes |= {"head_dim": size} if size else {}
    if keys and size:
        sizes |= {"num_key_value_heads": keys // size}
        sizes |= {"num_attention_heads": output // size} if output else {}
    return sizes


def _axis(tensors: Tensors, pattern: str | re.Pattern[str], axis: int = 0) -> int | None:
    """Return the length of an axis of the tensors whose names match; None unless all agree.

    Quantized weights are packed along all axes but the first, so those axes are unknown.
    """
    matching = [info for name, info in tensors.items() if re.search(pattern, name) and info.shape]
    lengths = {info.shape[axis] for info in matching if axis == 0 or info.dtype.startswith(("F", "BF"))}
    return lengths.pop() if len(lengths) == 1 else None


def _tie(config: dict[str, Any], text: dict[str, Any], tensors: Tensors) -> None:
    """Set `tie_word_embeddings` for mlx-lm.

    The top level of a composite config decides, as in transformers, then its language model. The head is
    tied, too, if one of them says so and the weights have no head. If neither has the key, weights decide.
    """
    key = "tie_word_embeddings"
    said = [value for part in (config, text) if (value := part.get(key)) is not None]
    if not any(map(TABLE.search, tensors)):
        has_head = True  # not known
    else:
        has_head = any(map(HEAD.search, tensors))
        said = said or [not has_head]
    if said:
        text[key] = said[0] or (not has_head and any(said))


def _spread_rope(config: dict[str, Any]) -> None:
    """Copy `rope_parameters` of transformers 5 to the keys of earlier versions."""
    rope, kind = config.get("rope_parameters"), config.get("model_type")
    if not isinstance(rope, dict):
        return
    older: dict[str, Any] = {}
    # Model types that mlx-lm reads in their old form, with one rope for each kind of attention.
    two_ropes = ("gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "olmo3")
    if kind in two_ropes and isinstance(rope.get("full_attention"), dict):
        older["rope_local_base_freq"] = (rope.get("sliding_attention") or {}).get("rope_theta", 10_000.0)
        rope = rope["full_attention"]
    if "rope_theta" not in rope:
        return
    scaled = rope.get("rope_type", "default") != "default"
    older["rope_scaling"] = {"type": rope["rope_type"], **rope} if scaled else None
    older["rope_theta"] = rope["rope_theta"]
    if "partial_rotary_factor" in rope:
        older["partial_rotary_factor"] = rope["partial_rotary_factor"]
    layers = config.get("layer_types") or []
    periodic = ("gemma3", "gemma3_text", "cohere2")  # mlx-lm reads the period of their layers
    if kind in periodic and "full_attention" in layers:
        older["sliding_window_pattern"] = layers.index("full_attention") + 1
    config |= {key: value for key, value in older.items() if config.get(key) is None}


# --- one model type


def _merge_layers(text: dict[str, Any]) -> None:
    """Turn `per_layer_config` of Gemma 4 in transformers 5.23 into keys for all full layers."""
    layers = text.pop("per_layer_config", None) or {}
    full = [i for i, kind in enumerate(text.get("layer_types") or []) if kind == "full_attention"]
    own = layers.get(str(full[0]), {}) if full else {}
    if not layers:
        return
    text.setdefault("global_head_dim", own.get("head_dim", text.get("head_dim")))
    if own.get("num_key_value_heads") is not None:
        text.setdefault("num_global_key_value_heads", own["num_key_value_heads"])


def _granite_hybrid(text: dict[str, Any]) -> None:
    """Give layers their names of transformers 4. Without a key for positions there are no rotary ones."""
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    if isinstance(text.get("layer_types"), list):
        text["layer_types"] = [names.get(str(kind), kind) for kind in text["layer_types"]]
    text["position_embedding_type"] = text.get("position_embedding_type") or "nope"


def _mamba2(text: dict[str, Any]) -> None:
    if isinstance(text.get("hidden_size"), int):
        _fill(text, {"intermediate_size": int(text.get("expand", 2) * text["hidden_size"])})


def _gpt_bigcode(text: dict[str, Any]) -> None:
    if isinstance(text.get("n_embd"), int):
        _fill(text, {"n_inner": 4 * text["n_embd"]})
    text["num_key_value_heads"] = 1 if text.get("multi_query", True) else text.get("n_head")


def _exaone_moe(text: dict[str, Any]) -> None:
    _fill(text, {"is_moe_layer": [kind == "sparse" for kind in text.get("mlp_layer_types") or []] or None})


def _exaone4(text: dict[str, Any]) -> None:
    """Write the period of layers as letters: L for sliding, G for full attention."""
    period = text.get("sliding_window_pattern")
    if isinstance(period, int):
        text["sliding_window_pattern"] = "L" * (period - 1) + "G" if period > 0 else None
    text.setdefault("rope_scaling", None)


def _kimi_linear(text: dict[str, Any]) -> None:
    """Group the settings of linear attention. Other layers have no rotary positions."""
    layers = text.get("layer_types")
    if not isinstance(layers, list) or "linear_num_heads" not in text:
        return
    linear = [i + 1 for i, kind in enumerate(layers) if kind == "linear_attention"]
    linear_config = {
        "kda_layers": linear,
        "full_attn_layers": [i + 1 for i in range(len(layers)) if i + 1 not in linear],
        "num_heads": text["linear_num_heads"],
        "head_dim": text["linear_head_dim"],
        "short_conv_kernel_size": text["linear_conv_kernel_dim"],
    }
    dense = [kind == "dense" for kind in text.get("mlp_layer_types") or []]
    _fill(text, {"linear_attn_config": linear_config, "rope_theta": 1e4, "mla_use_nope": True})
    _fill(text, {"first_k_dense_replace": sum(dense)} if dense else {})


def _minimax_m2(text: dict[str, Any]) -> None:
    part = float(text.get("partial_rotary_factor") or 1.0)
    _fill(text, {"rotary_dim": int(part * (text.get("head_dim") or 128))})


BY_TYPE: dict[str, Callable[[dict[str, Any]], None]] = {
    "exaone4": _exaone4,
    "exaone_moe": _exaone_moe,
    "gemma4_text": _merge_layers,
    "gemma4_unified_text": _merge_layers,
    "gpt_bigcode": _gpt_bigcode,
    "granitemoehybrid": _granite_hybrid,
    "kimi_linear": _kimi_linear,
    "mamba2": _mamba2,
    "minimax_m2": _minimax_m2,
}
