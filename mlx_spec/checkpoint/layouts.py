"""Give the tensors of a checkpoint the names and shapes that mlx-lm's class of the model reads.

transformers saves some models under other names than mlx-lm expects. It saves experts one by one, and leaves
out a tied LM head. Except for FP8 weights, no value changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from mlx_spec.checkpoint.config import stated_dtype, text_config
from mlx_spec.checkpoint.left_out import check_dropped
from mlx_spec.checkpoint.owners import is_of_language
from mlx_spec.checkpoint.quantizers import dequantized_fp8
from mlx_spec.checkpoint.repairs import HEAD, TABLE

Weights = dict[str, mx.array]
DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}

# Model type -> part of a name in transformers 5, and in mlx-lm.
RENAMED: dict[str, tuple[tuple[str, str], ...]] = {
    "gpt2": (("transformer.", ""),),
    "kimi_k25": ((".model.blocks.", ".model.layers."),),
    "kimi_linear": tuple(
        (f".block_sparse_moe.{name}_proj.", f".mlp.{name}_proj.") for name in ("gate", "up", "down")
    ),
    "nanochat": (
        ("model.embed_tokens.", "transformer.wte."),
        ("model.layers.", "transformer.h."),
        (".self_attn.o_proj.", ".attn.c_proj."),
        (".self_attn.q_proj.", ".attn.c_q."),
        (".self_attn.k_proj.", ".attn.c_k."),
        (".self_attn.v_proj.", ".attn.c_v."),
        (".mlp.fc1.", ".mlp.c_fc."),
        (".mlp.fc2.", ".mlp.c_proj."),
    ),
    "olmo_hybrid": (
        (".attention_layer_norm.", ".input_layernorm."),
        (".feedforward_layer_norm.", ".post_attention_layernorm."),
    ),
}


def model_classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
    """Return mlx-lm's classes of a model and its arguments. The first gets a `sanitize` that adapts names."""
    model_class, args_class = _get_classes(config)

    def sanitize(self: nn.Module, weights: Weights) -> Weights:
        weights = _before(config, weights)
        stored = dict(weights)
        head = (
            {name: array for name, array in weights.items() if HEAD.search(name)} if "__init__" in own else {}
        )
        if "sanitize" in dir(model_class):
            weights = dict(model_class.sanitize(self, weights))
        check_dropped(config, stored, {**weights, **head})
        return _after(self, config, {**weights, **head})

    own: dict[str, Any] = {"sanitize": sanitize, "__module__": model_class.__module__}
    # Model types whose class in mlx-lm always uses the embedding as the LM head.
    always_tied = ("cohere", "cohere2", "gemma", "gemma2", "lfm2", "lfm2_moe")
    if config["model_type"] in always_tied and text_config(config).get("tie_word_embeddings") is False:
        own |= _own_head(model_class)
    return type(model_class.__name__, (model_class,), own), args_class


def _own_head(model_class: Any) -> dict[str, Any]:
    """Return methods that add an LM head to a class of mlx-lm that always ties it to the embedding."""

    def init(self: Any, args: Any) -> None:
        model_class.__init__(self, args)
        self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        # In each call, because quantizing replaces the embedding, which the class calls as its head.
        object.__setattr__(self.model.embed_tokens, "as_linear", self.lm_head)
        return model_class.__call__(self, *arguments, **options)

    return {"__init__": init, "__call__": call}


def _before(config: Mapping[str, Any], weights: Weights) -> Weights:
    """Dequantize and rename tensors before mlx-lm's own `sanitize`, which expects other names."""
    kind = str(config["model_type"])
    if config.get("quantization_config") is None and config.get("quantization") is None:
        dtype = DTYPES.get(str(stated_dtype(config)).removeprefix("torch.").lower(), mx.bfloat16)
        weights = dequantized_fp8(weights, dtype)
    for old, new in RENAMED.get(kind, ()):
        weights = {name.replace(old, new): array for name, array in weights.items()}
    return BY_TYPE[kind](text_config(config), weights) if kind in BY_TYPE else weights


def _after(model: nn.Module, config: Mapping[str, Any], weights: Weights) -> Weights:
    """Complete the tensors that `model` reads: stack experts, add a tied head, drop other modalities."""
    expected = dict(tree_flatten(model.parameters())).keys()
    weights = {
        name: array
        for name, array in weights.items()
        if is_of_language(name) or f"{name.rpartition('.')[0]}.weight" in expected or name in expected
    }
    weights = _stacked(weights, {name for name in expected if ".switch_mlp." in name})
    head = next((name for name in expected if HEAD.search(name) and name not in weights), None)
    if text_config(config).get("tie_word_embeddings"):
        if head is not None:
            return weights | _heads(weights, head.removesuffix(".weight"))
        heads = [name for name in weights if HEAD.search(name) and name not in expected]
        weights = {name: array for name, array in weights.items() if name not in heads}
    return weights


def _heads(weights: Weights, head: str) -> Weights:
    """Return the tensors of an LM head that is tied to the embedding."""
    table = next((name for name in weights if TABLE.search(name)), "").removesuffix(".weight")
    parts = ("weight", "scales", "biases")  # of a layer
    return {f"{head}.{part}": weights[f"{table}.{part}"] for part in parts if f"{table}.{part}" in weights}


def _stacked(weights: Weights, expected: set[str]) -> Weights:
    """Stack experts that are stored one by one, if the model has one tensor for all of them."""
    numbered: dict[str, dict[int, str]] = {}
    for name in weights:
        if match := re.fullmatch(r"(.*)\.experts\.(\d+)\.(\w+)\.(\w+)", name):
            before, number, layer, part = match.groups()
            if f"{before}.switch_mlp.{layer}.weight" in expected:
                numbered.setdefault(f"{before}.switch_mlp.{layer}.{part}", {})[int(number)] = name
    stacks = {name: [parts[i] for i in sorted(parts)] for name, parts in numbered.items()}
    used = {part for parts in stacks.values() for part in parts}
    rest = {name: array for name, array in weights.items() if name not in used}
    return rest | {name: mx.stack([weights[part] for part in parts]) for name, parts in stacks.items()}


# --- one model type


def _wrapped(text: Mapping[str, Any], weights: Weights) -> Weights:
    """Rename a language model that was saved alone, as if it were inside a composite model."""
    if any("language_model." in name for name in weights):
        return weights
    return {f"model.language_{name}": array for name, array in weights.items()}


def _turned_experts(text: Mapping[str, Any], weights: Weights) -> Weights:
    """Transpose experts that are stored [output, input] to [input, output], and add a tied head."""
    stored = text["hidden_size"], text["moe_intermediate_size"]  # of down_proj in transformers 5
    if any(name.endswith(".experts.down_proj") and weights[name].shape[-2:] == stored for name in weights):
        stacks = (".experts.down_proj", ".experts.gate_up_proj")
        weights = {
            name: mx.swapaxes(a, -1, -2) if name.endswith(stacks) else a for name, a in weights.items()
        }
    if not text.get("tie_word_embeddings"):
        return weights
    inside = any(name.startswith("language_model.") for name in weights)
    return {**_heads(weights, "language_model.lm_head" if inside else "lm_head"), **weights}


def _split_experts(text: Mapping[str, Any], weights: Weights) -> Weights:
    """Split unquantized gate and up, whose columns alternate, and transpose all three projections."""
    result = dict(weights)
    for name in [name for name in weights if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]:
        array, stem = mx.swapaxes(result.pop(name), -1, -2), name.rpartition(".")[0]
        if name.endswith("gate_up_proj"):
            bias = result.pop(f"{name}_bias")
            for offset, layer in enumerate(("gate_proj", "up_proj")):
                result[f"{stem}.{layer}.weight"] = array[:, offset::2]
                result[f"{stem}.{layer}.bias"] = bias[:, offset::2]
        else:
            result[f"{stem}.down_proj.weight"] = array
            result[f"{stem}.down_proj.bias"] = result.pop(f"{name}_bias")
    return result


BY_TYPE: dict[str, Callable[[Mapping[str, Any], Weights], Weights]] = {
    "gemma3n": _wrapped,
    "gpt_oss": _split_experts,
    "qwen3_vl_moe": _turned_experts,
}
