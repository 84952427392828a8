"""Account for the keys of config.json: code reads them, or they have no effect, or they are named.

What the code reads is learned from its source. Rotary scaling is checked by its angles
(`mlx_spec/model/ropes.py`), a window by the caches of the model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from mlx_spec.checkpoint.config import context_length, integer, text_config
from mlx_spec.checkpoint.repairs import RENAMED
from mlx_spec.checkpoint.targets import Config


def unread_keys(config: Config, source: str) -> list[str]:
    """Return the keys of a language model's config that may change logits and that `source` does not read.

    Each with its value. `source` is the code of the model's class (`source_of`).
    """
    text = text_config(config)
    renamed = set(RENAMED.get(str(text.get("model_type") or config.get("model_type")), {}).values())
    read = _names(source).intersection(text)
    unread = [key for key in text if key not in read | renamed and not is_accounted(key)]
    return [
        f"{key} {_short(text[key])}"
        for key in unread
        if not _is_neutral(key, text)
        and not _is_written(text[key], source)
        and not any(text[key] == text[other] for other in read if _kind(key) == _kind(other))
    ]


def unread_window(config: Config, source: str, windows: Sequence[bool]) -> list[str]:
    """Return what config.json says of attention windows and the class of a language model leaves out.

    `windows` is True for the cache of a layer that has a window, `source` is the code of the class. Names the
    size if no layer has a window. Names `layer_types` if other layers than it states have one, and `source`
    does not read that key. A window that holds the whole context has no effect.
    """
    text, context = text_config(config), context_length(config)
    window, kinds = integer(text, "sliding_window") or 0, text.get("layer_types")
    size = window or (integer(text, "attention_chunk_size") or 0 if any(windows) else 0)
    if not 0 < size < (context or size + 1):
        return []
    stated = (
        [bool(re.search("sliding|chunk", str(each))) for each in kinds] if isinstance(kinds, list) else []
    )
    if any(windows):
        is_read = len(stated) != len(windows) or stated == [*windows] or "layer_types" in _names(source)
        return [] if is_read else [f"layer_types {_short(kinds)}"]
    if isinstance(kinds, list):
        slides = any(stated)
    elif "use_sliding_window" in text:
        layers = integer(text, "num_hidden_layers") or 0
        slides = bool(text["use_sliding_window"]) and (integer(text, "max_window_layers") or 0) < layers
    else:  # types whose class in transformers has that switch, off
        slides = not str(text.get("model_type", config.get("model_type"))).startswith(
            ("qwen", "smollm", "mimo")
        )
    return [f"sliding_window {window}"] if slides else []


@lru_cache(4096)
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
        r"architectures|auto_map|version|name_or_path|model_type|attn_impl|flash|fuse|kernel|mambapy|onnx|scan",
        r"chunk_size_feed|mamba_chunk|logits_to_keep|_parallel$|(_|^)(tp|ep)(_size)?$|is_(en|de)coder|cross_att|^gguf_",
        r"pretraining|pruned|remove_invalid|tie_|_sharing$|metadata|^use_cache|_config$|unsloth|^norm_before_gate$",
        # what tensors show
        r"(?<!chunk)(?<!window)_size$|((?<!rotary)_dims?|_heads|width|rank|channels|expand|inner)$|(^|_)bias$|^(no|add|use)_bias",
        r"^num_(?!experts?_(per|group))|^n_(embd|heads?|kv_heads|layers?|inner|positions|ctx|\w+_experts)$|^d_",
        r"(?<!rope_)(layers|_types|_list|_freq|_period|_offset|_indices|_idxs|_ids?)$|^layers?_(?!norm|scal)|dense_replace",
        r"qk_(layer)?norm|multi_query|ffn_with_glu|expansion|qkv_multipliers|(?<!rope)_ratio$|_dim_|routing_bias|expert_bias|group_size$",
        # lengths, angles, windows: checked by themselves
        r"max_(position|seq|sequence|context|len)|^(min|max)_length$|seq(uence)?_len|max_length$|original_max",
        r"^rope_(scaling|parameters)$|sliding_window|max_window|window_pattern",
    )
    return re.search("|".join(parts), key) is not None


@lru_cache(32)
def _names(source: str) -> frozenset[str]:
    """Return what code names as an attribute or in quotes."""
    return frozenset(re.findall(r"\.(\w+)", source) + re.findall(r"[\"']([^\"'\s]+)(?=[\"'])", source))


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

    A number that is 1 is rarely more than what a class does always.
    """
    value, kind = text[key], _kind(key)
    always_on = (  # switches that are on in the classes that do not read them. All others are off there
        "attn_output_gate block_use_swiglu kda_safe_gate mamba_inner_layernorms mamba_use_mlp mla_use_nope "
        "moe_renormalize norm_first rope_interleave scale_attn_weights use_gated_activation use_grouped_topk "
        "use_parallel_block use_parallel_embedding use_pos_enc use_rmsnorm use_rotary_pos_emb"
    ).split()
    if isinstance(value, bool):
        return value == (key in always_on)
    if isinstance(value, list | dict):
        fourth = [int(i % 4 > 0) for i in range(1, len(value) + 1)]  # what classes have that read no list
        varies = isinstance(value, list) and len({str(each) for each in value}) > 1 and value != fourth
        return not varies and not re.search("scal|factor|multiplier$", key)
    if key in ("floor_scale", "attn_scale") and not text.get("attn_temperature_tuning"):
        return True
    usual = {"query_pre_attn_scalar": text.get("head_dim"), "base": 10_000, "epsilon": 1e-5}
    return not value or value in (1, usual.get(kind)) or (key, value) == ("no_rope_layer_interval", 4)


def _is_written(value: Any, source: str) -> bool:
    """Return True if code has a value itself: the only one that its models have."""
    if isinstance(value, str):  # activations alone are known by names that code has, too
        code, plain = _squashed(source), _squashed(value)
        known = (("swish", "silu"), ("silu", "silu"), ("gelu", "gelu"), ("relu", "relu"))
        name = next((name for part, name in known if part in plain), None)
        return name is None or name in code
    if not isinstance(value, float):  # code has integers for other reasons
        return False
    numbers = re.findall(r"(?<![\w.])\d+(?:\.\d*(?:[eE][-+]?\d+)?|[eE][-+]?\d+)(?![\w.])", source)
    return value in map(float, numbers)


@lru_cache(128)
def _squashed(text: str) -> str:
    return text.lower().replace("_", "").replace("-", "")


def _short(value: Any, longest: int = 40) -> str:
    shown = str(value)
    return shown if len(shown) <= longest else f"{shown[: longest - 3]}..."


def source_of(module: ModuleType) -> str:
    """Return the code of a module of mlx-lm, and of the modules beside it that it imports."""
    texts, waiting = dict[str, str](), [Path(str(module.__file__))]
    while waiting:
        file = waiting.pop()
        if file.name not in texts and file.is_file():
            texts[file.name] = file.read_text(encoding="utf-8")
            names = re.findall(r"^from \.(\w+) import|^from \. import (\w+)", texts[file.name], re.MULTILINE)
            waiting += [file.with_name(f"{a or b}.py") for a, b in names]
    return "\n".join(texts.values())
