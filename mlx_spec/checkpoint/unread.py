"""Account for the keys of config.json: code reads them, or they have no effect, or they are named.

What the code reads is learned from its source. Rotary scaling is checked by its angles
(`mlx_spec/model/ropes.py`), a window by the caches of the model.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

from mlx_spec.checkpoint.config import context_length, integer, text_config
from mlx_spec.checkpoint.families import Config
from mlx_spec.checkpoint.repairs import RENAMED


def unread_keys(config: Config, source: str) -> list[str]:
    """Return the keys of a language model's config that may change logits and that `source` does not read.

    Each with its value. `source` is the code of the model's class (`source_of`).
    """
    text = text_config(config)
    renamed = set(RENAMED.get(str(text.get("model_type") or config.get("model_type")), {}).values())
    read = {key for key in text if _is_named(key, source)}
    unread = [key for key in text if key not in read | renamed and not is_accounted(key)]
    return [
        f"{key} {_short(text[key])}"
        for key in unread
        if not _is_neutral(key, text)
        and not _is_written(text[key], source)
        and not any(text[key] == text[other] for other in read if _kind(key) == _kind(other))
    ]


def unread_window(config: Config, *, has_windows: bool) -> list[str]:
    """Return the attention window of a language model with its size, if its class has none. Else nothing.

    A window that holds the whole context has no effect.
    """
    text, context = text_config(config), context_length(config)
    window, kinds = integer(text, "sliding_window") or 0, text.get("layer_types")
    if has_windows or not 0 < window < (context or window + 1):
        return []
    if isinstance(kinds, list):
        slides = any("sliding" in str(kind) for kind in kinds)
    elif "use_sliding_window" in text:
        layers = integer(text, "num_hidden_layers") or 0
        slides = bool(text["use_sliding_window"]) and (integer(text, "max_window_layers") or 0) < layers
    else:  # types whose class in transformers has that switch, off
        slides = not str(text.get("model_type", config.get("model_type"))).startswith(
            ("qwen", "smollm", "mimo")
        )
    return [f"sliding_window {window}"] if slides else []


def is_accounted(key: str) -> bool:
    """Return True for a key that changes no logits, or that something else accounts for, by its name."""
    parts = (
        # tokens, other modalities, heads for several tokens, generation: read elsewhere, or not needed
        r"(^|_)(token|tokens|token_ids?|token_index|vocab|vocabulary)(_|$)|tokenizer|(^|_)(bos|eos|pad|sep|im)_",
        r"vision|visual|image|video|audio|speech|multi_?modal|(^|_)mm_|patch|(^|_)(mtp|nextn|eagle|draft)(_|$)",
        r"^(temperature|top_k|top_p|typical_p|do_sample|num_beams|repetition_penalty|length_penalty)$|_beam",
        # training, and tasks other than text
        r"drop|(^|_)pdrop|init|_std$|aux|loss|jitter|label|train|summary|classif|problem|task|finetun|gradient",
        r"time_step_(min|max|floor|scale)|linear_dt_|linear_a_log_|rescale_prenorm|random_routing|_coef$|overlap",
        # formats, and the way to compute
        r"dtype|precision|^(bf|fp)\d+$|_fp\d+$|upcast|quant|cache|return_|^output_(attentions|hidden|router)",
        r"architectures|auto_map|version|name_or_path|model_type|attn_impl|flash|fused|kernel|mambapy|onnx|scan",
        r"chunk_size_feed|mamba_chunk|logits_to_keep|_parallel$|(_|^)(tp|ep)(_size)?$|is_(en|de)coder|cross_att|^gguf_",
        r"pretraining|pruned|remove_invalid|tie_|metadata|^use_cache|_config$",
        # what tensors show
        r"(?<!chunk)(?<!window)_size$|((?<!rotary)_dims?|_heads|width|rank|channels|expand|inner)$|(^|_)bias$|^(no|add|use)_bias",
        r"^num_(?!experts?_(per|group))|^n_(embd|heads?|kv_heads|layers?|inner|positions|ctx|\w+_experts)$|^d_",
        r"(layers|layer_types|_types|_list|_freq|_period|_offset|_indices|_idxs|_ids?)$|^layers?_(?!norm)|dense_replace",
        r"qk_(layer)?norm|multi_query|ffn_with_glu|expansion|(?<!rope)_ratio$|_dim_|routing_bias|expert_bias|group_size$",
        # lengths, angles, windows: checked by themselves
        r"max_(position|seq|sequence|context|len)|^(min|max)_length$|seq(uence)?_len|max_length$|original_max",
        r"^rope_(scaling|parameters)$|sliding_window|max_window|window_pattern",
    )
    return re.search("|".join(parts), key) is not None


def _is_named(key: str, source: str) -> bool:
    return re.search(rf"\.{re.escape(key)}\b|[\"']{re.escape(key)}[\"']", source) is not None


def _kind(key: str) -> str:
    """Return what a key states, where families have several names for it."""
    kinds = (
        ("eps(ilon)?$", "epsilon"),
        ("theta|_base", "base"),
        ("top_?k|per_tok|moe_k$", "experts of a token"),
    )
    return next((kind for pattern, kind in kinds if re.search(pattern, key)), key)


def _is_neutral(key: str, text: Config) -> bool:
    """Return True for a value with which a key has no effect: nothing, or what models are without it.

    A number that is 1, and a switch that is on, are rarely more than what a class does always.
    """
    value, kind = text[key], _kind(key)
    off = (  # switches that no class has on by itself
        "alibi use_alibi use_dynamic_ntk use_logn_attn norm_topk_prob attn_temperature_tuning "
        "use_bidirectional_attention scale_attn_by_inverse_layer_idx add_swa_attention_sink_bias"
    ).split()
    on = ("rope_interleave", "scale_attn_weights")
    if isinstance(value, bool):
        return not value if key in off else value or key not in on
    if isinstance(value, list | dict):
        return not re.search("scal|factor|multiplier$", key)
    if key in ("floor_scale", "attn_scale") and not text.get("attn_temperature_tuning"):
        return True
    usual = {"query_pre_attn_scalar": text.get("head_dim"), "base": 10_000, "epsilon": 1e-5}
    return not value or value in (1, usual.get(kind)) or (key, value) == ("no_rope_layer_interval", 4)


def _is_written(value: Any, source: str) -> bool:
    """Return True if code has a value itself: the only one that its models have."""
    if isinstance(value, str):  # activations alone are known by names that code has, too
        found, plain = _squashed(source), _squashed(value)
        known = (("swish", "silu"), ("silu", "silu"), ("gelu", "gelu"), ("relu", "relu"))
        name = next((name for part, name in known if part in plain), None)
        return name is None or name in found
    if not isinstance(value, float):  # code has integers for other reasons
        return False
    numbers = re.findall(r"(?<![\w.])\d+(?:\.\d*(?:[eE][-+]?\d+)?|[eE][-+]?\d+)(?![\w.])", source)
    return value in map(float, numbers)


def _squashed(text: str) -> str:
    return text.lower().replace("_", "").replace("-", "")


def _short(value: Any, longest: int = 40) -> str:
    shown = str(value)
    return shown if len(shown) <= longest else f"{shown[: longest - 3]}..."


def source_of(module: ModuleType) -> str:
    """Return the code of a module of mlx-lm, and of the modules beside it that it imports."""
    found, waiting = dict[str, str](), [Path(str(module.__file__))]
    while waiting:
        file = waiting.pop()
        if file.name not in found and file.is_file():
            found[file.name] = file.read_text(encoding="utf-8")
            names = re.findall(r"^from \.(\w+) import|^from \. import (\w+)", found[file.name], re.MULTILINE)
            waiting += [file.with_name(f"{a or b}.py") for a, b in names]
    return "\n".join(found.values())
