"""Tiny synthetic checkpoints of every drafter family, under the names and in the shapes of their references.

Those with native MTP heads have the names that transformers loads (golden/families/); the others follow
SafeAILab/EAGLE `cnets.py`, SpecForge, speculators, z-lab/dflash, FasterDecoding/Medusa, vLLM, AMD-AGI/PARD.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

NAMES = json.loads((Path(__file__).parents[1] / "golden" / "families" / "names.json").read_text())
D, V, W, T_LAYERS, BLOCK = 32, 64, 24, 12, 8
HEADS, GROUPS, HEAD, INNER = 4, 2, 10, 48
TARGET = {"model_type": "llama", "hidden_size": D, "vocab_size": V, "num_hidden_layers": T_LAYERS}
LAYER = {
    "model_type": "llama",
    "hidden_size": D,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": HEAD,
    "vocab_size": V,
    "rms_norm_eps": 1e-6,
}


@dataclass(frozen=True)
class Checkpoint:
    """A drafter as its authors would publish it, and the config.json of its target."""

    tensors: dict[str, mx.array]
    config: dict[str, Any]
    target: dict[str, Any]

    def changed(self, **tensors: mx.array | None) -> Checkpoint:
        """With other tensors; None removes one. `__` stands for the dots of a name."""
        named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
        merged = {**self.tensors, **named}
        return replace(self, tensors={name: t for name, t in merged.items() if t is not None})

    def write(self, folder: Path) -> Path:
        """Write a folder in the Hugging Face format."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        mx.save_safetensors(str(folder / "model.safetensors"), self.tensors, {"format": "pt"})
        return folder


def random(name: str, form: list[int], centre: float = 1.0) -> mx.array:
    """Weights; norms lie around `centre`."""
    noise = mx.random.normal(form) * 0.1
    return noise + centre if "norm" in name and name.endswith("weight") else noise


def native(model_type: str, centre: float | None = None) -> Checkpoint:
    """A target with its MTP head: `model_type` of golden/families/names.json."""
    made = NAMES[model_type]
    if centre is None:
        centre = 0.0 if model_type.startswith("qwen") else 1.0
    tensors = {name: random(name, form, centre) for name, form in made["tensors"].items()}
    for name in tensors:
        if name.endswith((".2.embed_tokens.weight", "shared_head.head.weight")):
            own = "model.embed_tokens.weight" if "embed" in name else "lm_head.weight"
            tensors[name] = mx.array(tensors[own])
    # As in published configs, and as mlx-lm asks for.
    config = {"rope_theta": 1e4, "rope_scaling": None, "partial_rotary_factor": 0.4, **made["config"]}
    return Checkpoint(tensors, config, config)


def fused(checkpoint: Checkpoint, prefix: str) -> Checkpoint:
    """The same with the experts below `prefix` in two tensors, as newer checkpoints have them."""
    count = sum(name.startswith(prefix) and name.endswith("gate_proj.weight") for name in checkpoint.tensors)
    tensors = dict(checkpoint.tensors)

    def stacked(part: str) -> mx.array:
        return mx.stack([tensors.pop(f"{prefix}{expert}.{part}.weight") for expert in range(count)])

    gate, up, down = (stacked(part) for part in ("gate_proj", "up_proj", "down_proj"))
    tensors[f"{prefix}gate_up_proj"] = mx.concatenate([gate, up], axis=1)
    tensors[f"{prefix}down_proj"] = down
    return replace(checkpoint, tensors=tensors)


def eagle3(layer: str = "midlayer.", prefix: str = "", width: int = 2 * D) -> Checkpoint:
    """EAGLE-3 with a reduced vocabulary. SpecForge: `layer` layers.0., prefix model.; speculators: none."""
    forms = {
        "fc.weight": [D, 3 * D],
        "norm.weight": [D],
        "lm_head.weight": [W, D],
        **{f"{layer}{name}": form for name, form in layer_shapes(width).items()},
        f"{layer}hidden_norm.weight": [D],
    }
    tensors = {prefix + name: random(name, form) for name, form in forms.items()}
    kept = mx.array([index for index in range(V) if index % 8 in (1, 2, 5)])
    tensors["d2t"] = kept - mx.arange(W)
    tensors["t2d"] = mx.array([index % 8 in (1, 2, 5) for index in range(V)])
    config = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    return Checkpoint(tensors, {**config, "draft_vocab_size": W}, dict(TARGET))


def speculators_eagle3() -> Checkpoint:
    """EAGLE-3 as vLLM's speculators store it: nested config, own embedding, normed input."""
    made = eagle3("layers.0.")
    tensors = {**made.tensors, "embed_tokens.weight": random("", [V, D]), "verifier_norm.weight": mx.ones(D)}
    tensors["input_norm.weight"] = mx.ones(3 * D)
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {**LAYER, "num_hidden_layers": 1},
        "draft_vocab_size": W,
        "norm_before_fc": True,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [2, 6, 9],
    }
    return Checkpoint(tensors, config, dict(TARGET))


def peagle() -> Checkpoint:
    """P-EAGLE of two layers over the whole vocabulary."""
    made = eagle3("layers.0.")
    second = {f"layers.1.{name}": random(name, form) for name, form in layer_shapes(D).items()}
    own = {"embed_tokens.weight": random("", [V, D]), "lm_head.weight": random("", [V, D])}
    tensors = {**made.tensors, **second, **own, "mask_hidden": random("", [1, 1, 3 * D])}
    tensors |= {"d2t": mx.zeros(V, dtype=mx.int64), "t2d": mx.ones(V, dtype=mx.bool_)}
    config = {**LAYER, "architectures": ["PEagleDraftModel"], "num_hidden_layers": 2, "mask_token_id": 63}
    return Checkpoint(tensors, config, dict(TARGET))


def dflash() -> Checkpoint:
    """DFlash of two layers that reads five of the target's."""
    forms = {"fc.weight": [D, 5 * D], "hidden_norm.weight": [D], "norm.weight": [D]}
    for index in range(2):
        layer = {**layer_shapes(D), "self_attn.q_norm.weight": [HEAD], "self_attn.k_norm.weight": [HEAD]}
        forms |= {f"layers.{index}.{name}": form for name, form in layer.items()}
    config = {
        **LAYER,
        "model_type": "qwen3",
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 2,
        "block_size": BLOCK,
        "num_target_layers": T_LAYERS,
        "dflash_config": {"mask_token_id": 63, "target_layer_ids": [1, 3, 5, 7, 9]},
    }
    return Checkpoint({name: random(name, form) for name, form in forms.items()}, config, dict(TARGET))


def medusa(prefix: str = "", heads: int = 3) -> Checkpoint:
    """Medusa in the reference's names; v1.0 has them below `medusa_head.`, beside the target."""
    tensors = {}
    for head in range(heads):
        tensors[f"{prefix}{head}.0.linear.weight"] = random("", [D, D])
        tensors[f"{prefix}{head}.0.linear.bias"] = random("", [D])
        tensors[f"{prefix}{head}.1.weight"] = random("", [V, D])
    if prefix:
        tensors["model.embed_tokens.weight"] = random("", [V, D])
    return Checkpoint(tensors, {"medusa_num_heads": 2, "medusa_num_layers": 1}, dict(TARGET))


def vllm_medusa() -> Checkpoint:
    """Medusa as vLLM wants it: two blocks a head, without biases."""
    tensors = {}
    for head in range(2):
        for layer in range(2):
            tensors[f"blocks.{head}.layers.{layer}.weight"] = random("", [D, D])
        tensors[f"lm_heads.{head}.weight"] = random("", [V, D])
    return Checkpoint(tensors, {"model_type": "medusa", "num_heads": 2, "hidden_size": D}, dict(TARGET))


def pard(kind: str = "qwen3") -> Checkpoint:
    """PARD of two layers."""
    extra = {"qwen3": {"self_attn.q_norm.weight": [HEAD], "self_attn.k_norm.weight": [HEAD]}, "llama": {}}
    head = D // HEADS if kind == "qwen2" else HEAD  # qwen2 knows no other
    queries, keys = HEADS * head, GROUPS * head
    extra["qwen2"] = {
        "self_attn.q_proj.bias": [queries],
        "self_attn.k_proj.bias": [keys],
        "self_attn.v_proj.bias": [keys],
    }
    forms = {"model.embed_tokens.weight": [V, D], "model.norm.weight": [D], "lm_head.weight": [V, D]}
    for index in range(2):
        layer = {**layer_shapes(D, queries=queries, keys=keys), **extra[kind]}
        forms |= {f"model.layers.{index}.{name}": form for name, form in layer.items()}
    config = {**LAYER, "model_type": kind, "num_hidden_layers": 2, "tie_word_embeddings": True}
    config["head_dim"] = head
    config |= {"rope_theta": 1e4, "max_position_embeddings": 64}
    tensors = {name: random(name, form) for name, form in forms.items()}
    return Checkpoint(tensors, {**config, "pard_token": 63, "spd_type": "pard"}, dict(TARGET))


def layer_shapes(
    width: int, hidden: int = D, queries: int = HEADS * HEAD, keys: int = GROUPS * HEAD, inner: int = INNER
) -> dict[str, list[int]]:
    """The tensors of a decoder layer whose attention reads rows of `width`."""
    return {
        "input_layernorm.weight": [hidden],
        "post_attention_layernorm.weight": [hidden],
        "self_attn.q_proj.weight": [queries, width],
        "self_attn.k_proj.weight": [keys, width],
        "self_attn.v_proj.weight": [keys, width],
        "self_attn.o_proj.weight": [hidden, queries],
        "mlp.gate_proj.weight": [inner, hidden],
        "mlp.up_proj.weight": [inner, hidden],
        "mlp.down_proj.weight": [hidden, inner],
    }
