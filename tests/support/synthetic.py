"""Tiny synthetic checkpoints of every drafter family, under the names and in the shapes of their references.

Those with native MTP heads have the names that transformers loads (golden/families/); the others follow
SafeAILab/EAGLE `cnets.py`, SpecForge, speculators, z-lab/dflash, FasterDecoding/Medusa, vLLM, AMD-AGI/PARD.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

NAMES = json.loads((Path(__file__).parents[1] / "golden" / "families" / "names.json").read_text())
D, V, T_LAYERS = 64, 256, 12
HEADS, GROUPS, HEAD, INNER = 6, 2, 16, 96
KEPT = [index for index in range(V) if index % 8 in (1, 2, 5)]  # of a reduced vocabulary
W = len(KEPT)
LAYER = {
    "model_type": "llama",
    "hidden_size": D,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": HEAD,
    "vocab_size": V,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
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

    def scaled(self, part: str, factor: float) -> Checkpoint:
        """With the tensors multiplied whose names contain `part`."""
        scaled = {name: factor * t if part in name else t for name, t in self.tensors.items()}
        return replace(self, tensors=scaled)

    def write(self, folder: Path) -> Path:
        """Write a folder in the Hugging Face format."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        mx.save_safetensors(str(folder / "model.safetensors"), self.tensors, {"format": "pt"})
        return folder


def target_config(layers: int, hidden: int = D, vocab: int = V) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "vocab_size": vocab,
        "num_hidden_layers": layers,
        "rope_theta": 10000.0,
    }


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
    tensors["d2t"] = mx.array(KEPT) - mx.arange(W)
    tensors["t2d"] = mx.array([index in KEPT for index in range(V)])
    config = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    return Checkpoint(tensors, {**config, "draft_vocab_size": W}, target_config(T_LAYERS))


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
    return Checkpoint(tensors, config, target_config(T_LAYERS))


def _random(forms: dict[str, list[int]], seed: int, scale: float = 0.2) -> dict[str, mx.array]:
    mx.random.seed(seed)
    noise = {name: scale * mx.random.normal(form) for name, form in forms.items()}
    return {name: 1 + w if "norm" in name else w for name, w in noise.items()}


def _layer(prefix: str, width: int, hidden: int) -> dict[str, list[int]]:
    return {prefix + name: shape for name, shape in layer_shapes(width, hidden).items()}


def medusa(layers: int = T_LAYERS, heads: int = 4, hidden: int = D, vocab: int = V) -> Checkpoint:
    """In the reference's names."""
    forms: dict[str, list[int]] = {}
    for head in range(heads):
        forms |= {f"{head}.0.linear.weight": [hidden, hidden], f"{head}.0.linear.bias": [hidden]}
        forms[f"{head}.1.weight"] = [vocab, hidden]
    config = {"medusa_num_heads": heads, "medusa_num_layers": 1}
    return Checkpoint(_random(forms, 11), config, target_config(layers, hidden, vocab))


def dflash(
    layers: int = T_LAYERS,
    capture: Sequence[int] = (1, 3, 5, 7, 9),
    hidden: int = D,
    vocab: int = V,
    **config: Any,
) -> Checkpoint:
    """Two layers in z-lab's names, blocks of five."""
    forms = {
        "fc.weight": [hidden, len(capture) * hidden],
        "hidden_norm.weight": [hidden],
        "norm.weight": [hidden],
    }
    for index in range(2):
        norms = {f"layers.{index}.self_attn.{part}_norm.weight": [HEAD] for part in "qk"}
        forms |= _layer(f"layers.{index}.", hidden, hidden) | norms
    special = {"mask_token_id": vocab - 1, "target_layer_ids": list(capture)}
    merged = {
        **LAYER,
        "hidden_size": hidden,
        "vocab_size": vocab,
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "block_size": 5,
        "num_target_layers": layers,
        "dflash_config": special,
        **config,
    }
    return Checkpoint(_random(forms, 12), merged, target_config(layers, hidden, vocab))


def dflash2(
    layers: int = T_LAYERS, capture: Sequence[int] = (1, 3, 5, 7, 9), hidden: int = D, vocab: int = V
) -> Checkpoint:
    """Kernels of two taps for groups of 16, and a selector of the best five tokens."""
    sizes = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 5}
    special = {"mask_token_id": vocab - 1, "target_layer_ids": list(capture), **sizes}
    made = dflash(layers, capture, hidden, vocab, architectures=["DFlash2DraftModel"], dflash_config=special)
    forms = {f"candidate_selector.{which}_codebook": [vocab, 8] for which in ("predecessor", "successor")}
    forms["candidate_selector.hidden_projection.weight"] = [8, hidden]
    for part in (f"layers.{index}.{which}_conv." for index in range(2) for which in ("attention", "mlp")):
        forms |= {
            f"{part}base_kernel": [2, 2, hidden],
            f"{part}kernel_projection.weight": [hidden // 4, hidden],
        }
    return replace(made, tensors={**made.tensors, **_random(forms, 15)})


def dspark(
    layers: int = T_LAYERS,
    capture: Sequence[int] = (1, 3, 5, 7, 9),
    hidden: int = D,
    vocab: int = V,
    kind: str = "vanilla",
    **config: Any,
) -> Checkpoint:
    """As DeepSpec writes it: with its own tables, and a head that estimates acceptance."""
    head = {"markov_rank": 8, "markov_head_type": kind, "enable_confidence_head": True, **config}
    made = dflash(layers, capture, hidden, vocab, architectures=["Qwen3DSparkModel"], **head)
    forms = {f"{name}.weight": [vocab, hidden] for name in ("embed_tokens", "lm_head")}
    forms |= {"markov_head.markov_w1.weight": [vocab, 8], "markov_head.markov_w2.weight": [vocab, 8]}
    forms |= {"confidence_head.proj.weight": [1, hidden + 8], "confidence_head.proj.bias": [1]}
    if kind != "vanilla":
        name, rows, columns = ("gate", 8, hidden + 8) if kind == "gated" else ("joint", 24, hidden + 16)
        forms |= {f"markov_head.{name}_proj.weight": [rows, columns], f"markov_head.{name}_proj.bias": [rows]}
    return replace(made, tensors={**made.tensors, **_random(forms, 16)})


def gemma4_dspark(
    layers: int = T_LAYERS, capture: Sequence[int] = (1, 3, 5, 7, 9), hidden: int = D, vocab: int = V
) -> Checkpoint:
    """Without `v_proj`, and one head of K and V of another size than `head_dim` says."""
    made = dspark(layers, capture, hidden, vocab)
    replaced = tuple(f"self_attn.{part}" for part in ("q_norm", "k_norm", "q_proj", "k_proj", "v_proj"))
    tensors = {name: t for name, t in made.tensors.items() if not any(part in name for part in replaced)}
    forms: dict[str, list[int]] = {}
    for layer in (f"layers.{index}." for index in range(2)):
        forms |= {f"{layer}{where}_feedforward_layernorm.weight": [hidden] for where in ("pre", "post")}
        forms |= {f"{layer}self_attn.{part}_norm.weight": [2 * HEAD] for part in "qk"}
        forms |= {
            f"{layer}self_attn.{part}_proj.weight": [2 * HEAD * n, hidden] for part, n in (("q", 3), ("k", 1))
        }
    scalars = {f"layers.{index}.layer_scalar": mx.array([0.8]) for index in range(2)}
    rope = {"full_attention": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}
    config = {
        **{key: value for key, value in made.config.items() if key not in ("rope_theta", "hidden_act")},
        "architectures": ["Gemma4DSparkModel"],
        "model_type": "gemma4_text",
        "num_attention_heads": 3,
        "global_head_dim": 2 * HEAD,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 30.0,
        "rope_parameters": rope,
    }
    return Checkpoint({**tensors, **_random(forms, 17), **scalars}, config, made.target)


def peagle(
    layers: int = T_LAYERS, capture: Sequence[int] = (1, 5, 8), hidden: int = D, vocab: int = V, **config: Any
) -> Checkpoint:
    """Two layers in SpecForge's names, which number the layers' inputs."""
    forms = {"fc.weight": [hidden, len(capture) * hidden], "norm.weight": [hidden]}
    forms |= _layer("layers.0.", 2 * hidden, hidden) | _layer("layers.1.", hidden, hidden)
    forms |= {"layers.0.hidden_norm.weight": [hidden], "mask_hidden": [1, 1, len(capture) * hidden]}
    forms["embed_tokens.weight"] = [vocab, hidden]
    merged = {
        **LAYER,
        "hidden_size": hidden,
        "vocab_size": vocab,
        "architectures": ["PEagleDraftModel"],
        "num_hidden_layers": 2,
        "mask_token_id": vocab - 1,
        "eagle_aux_hidden_state_layer_ids": [index + 1 for index in capture],
        **config,
    }
    return Checkpoint(_random(forms, 13, 0.1), merged, target_config(layers, hidden, vocab))


def vllm_medusa() -> Checkpoint:
    """Medusa as vLLM wants it: two blocks a head, without biases."""
    tensors = {}
    for head in range(2):
        for layer in range(2):
            tensors[f"blocks.{head}.layers.{layer}.weight"] = random("", [D, D])
        tensors[f"lm_heads.{head}.weight"] = random("", [V, D])
    return Checkpoint(
        tensors, {"model_type": "medusa", "num_heads": 2, "hidden_size": D}, target_config(T_LAYERS)
    )


def mlp_speculator(
    layers: int = T_LAYERS,
    hidden: int = D,
    vocab: int = V,
    inner: int = 32,
    steps: int = 4,
    tied: bool = False,
) -> Checkpoint:
    """In the names of fms-extras, which repeats tied tensors."""
    forms: dict[str, list[int]] = {}
    for step in range(steps):
        inputs = inner if step else hidden
        forms |= {f"emb.{step}.weight": [vocab, inner], f"proj.{step}.weight": [inner, inputs]}
        forms |= {
            f"ln.{step}.weight": [inner],
            f"ln.{step}.bias": [inner],
            f"head.{step}.weight": [vocab, inner],
        }
    tensors = _random(forms, 18)
    for name in tensors if tied else ():
        part, step_, kind = name.split(".")
        tensors[name] = tensors[f"{part}.{min(int(step_), int(part == 'proj'))}.{kind}"]
    config = {"model_type": "mlp_speculator", "emb_dim": hidden, "inner_dim": inner, "n_predict": steps}
    config |= {
        "vocab_size": vocab,
        "tie_weights": tied,
        "scale_input": tied,
        "top_k_tokens_per_head": [4, 3, 2],
    }
    named = {f"speculator.{name}": tensor for name, tensor in tensors.items()}
    return Checkpoint(named, config, target_config(layers, hidden, vocab))


def lstm_speculator() -> Checkpoint:
    """In Arctic's names."""
    inner, gates = 32, ("forget", "input", "output", "cell")
    forms = {f"{gate}_proj.{step}.weight": [inner, inner if step else D] for gate in gates for step in (0, 1)}
    forms |= {f"{norm}_ln.0.{kind}": [inner] for norm in ("cell", "state") for kind in ("weight", "bias")}
    forms |= {"forget_emb.0.weight": [V, inner], "head.0.weight": [V, inner]}
    tensors = _random(forms, 19)
    tensors |= {f"{gate}_emb.0.weight": tensors["forget_emb.0.weight"] for gate in gates}
    config = {"model_type": "mlp_speculator", "method": "sum_lstm", "emb_dim": f"{inner}.{inner}"}
    config |= {"inner_dim": f"{inner}.{inner}", "proj_dim": f"{inner}", "input_hidden_dim": D, "n_predict": 3}
    config |= {"vocab_size": V, "tie_weights": True, "tie_lstm_embs": True, "scale_input": True}
    return Checkpoint(tensors, config, target_config(T_LAYERS))


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
    tensors = {name: random(name, form) for name, form in forms.items()}
    return Checkpoint(tensors, {**config, "pard_token": 63, "spd_type": "pard"}, target_config(T_LAYERS))


def layer_shapes(
    width: int, hidden: int = D, queries: int = HEADS * HEAD, keys: int = GROUPS * HEAD
) -> dict[str, list[int]]:
    """The tensors of a decoder layer whose attention reads rows of `width`."""
    return {
        "input_layernorm.weight": [hidden],
        "post_attention_layernorm.weight": [hidden],
        "self_attn.q_proj.weight": [queries, width],
        "self_attn.k_proj.weight": [keys, width],
        "self_attn.v_proj.weight": [keys, width],
        "self_attn.o_proj.weight": [hidden, queries],
        "mlp.gate_proj.weight": [INNER, hidden],
        "mlp.up_proj.weight": [INNER, hidden],
        "mlp.down_proj.weight": [hidden, INNER],
    }
