"""Write the trained pair as two checkpoints that mlx-lm and mlx_spec load."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from demo_pair.drafter import Drafter
from demo_pair.model import FULL, SLIDING, Shape, Target
from mlx_spec.demo import TARGET

CONTEXT = 4096
END_OF_TURN = "<turn|>"
TEMPLATE = "chat_template.jinja"  # written by hand, in the package
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def text_config(shape: Shape) -> dict[str, Any]:
    """Return what the text_config of the target and of the drafter have in common."""
    return {
        "model_type": "gemma4_text",
        "vocab_size": shape.vocab_size,
        "head_dim": shape.head_dim,
        "global_head_dim": shape.global_head_dim,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "num_global_key_value_heads": None,
        "attention_k_eq_v": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "rope_parameters": ROPE,
        "sliding_window": shape.sliding_window,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "enable_moe_block": False,
        "use_cache": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "initializer_range": 0.02,
        "dtype": "bfloat16",
    }


def target_config(shape: Shape, end: int) -> dict[str, Any]:
    """Return the target's config.json."""
    own = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "layer_types": list(shape.layer_types),
        "num_kv_shared_layers": shape.num_kv_shared_layers,
        "use_double_wide_mlp": shape.use_double_wide_mlp,
        "hidden_size_per_layer_input": shape.hidden_size_per_layer_input,
        "vocab_size_per_layer_input": shape.vocab_size,
        "final_logit_softcapping": shape.final_logit_softcapping,
    }
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
        "text_config": text_config(shape) | own,
        "vision_config": None,
        "audio_config": None,
        "eos_token_id": [1, end],
        "tie_word_embeddings": True,
    }


def drafter_config(drafter: Drafter, end: int) -> dict[str, Any]:
    """Return the drafter's config.json."""
    own = {
        "hidden_size": drafter.hidden,
        "intermediate_size": drafter.inner,
        "num_hidden_layers": len(drafter.layer_types),
        "layer_types": list(drafter.layer_types),
        "num_kv_shared_layers": len(drafter.layer_types),
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "final_logit_softcapping": None,
    }
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "dtype": "bfloat16",
        "backbone_hidden_size": drafter.shape.hidden_size,
        "use_ordered_embeddings": False,
        "num_centroids": 0,
        "centroid_intermediate_top_k": 0,
        "tie_word_embeddings": True,
        "eos_token_id": [1, end],
        "text_config": text_config(drafter.shape) | own,
    }


def save_weights(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write the tensors in bfloat16."""
    kept = {n: t.detach().to(torch.bfloat16).contiguous() for n, t in tensors.items()}
    save_file(kept, str(file), metadata={"format": "mlx"})


def target_tensors(target: Target) -> dict[str, Tensor]:
    """Return the target's tensors under mlx-lm's names."""
    return {f"language_model.model.{n}": t for n, t in target.state_dict().items()}


def drafter_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """Return the drafter's tensors under the names of the published assistants."""
    return {n if "projection" in n else f"model.{n}": t for n, t in drafter.state_dict().items()}


def export_target(target: Target, work: Path, out: Path, end: int) -> None:
    """Write the target's folder: weights, configs, tokenizer and chat template."""
    out.mkdir(parents=True, exist_ok=True)
    save_weights(out / "model.safetensors", target_tensors(target))
    _write(out / "config.json", target_config(target.shape, end))
    generation = {
        "bos_token_id": 2,
        "pad_token_id": 0,
        "eos_token_id": [1, end],
        "do_sample": True,
        "temperature": 1.0,
    }
    _write(out / "generation_config.json", {**generation, "top_k": 64, "top_p": 0.95})
    copy_tokenizer(work, out)


def export_drafter(drafter: Drafter, work: Path, out: Path, end: int) -> None:
    """Write the drafter's folder: weights, configs, tokenizer and chat template."""
    out.mkdir(parents=True, exist_ok=True)
    save_weights(out / "model.safetensors", drafter_tensors(drafter))
    _write(out / "config.json", drafter_config(drafter, end))
    generation = {"bos_token_id": 2, "pad_token_id": 0, "eos_token_id": [1, end]}
    _write(
        out / "generation_config.json",
        {**generation, "num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"},
    )
    copy_tokenizer(work, out)


def copy_tokenizer(work: Path, out: Path) -> None:
    """Copy the tokenizer of `work` and the chat template to `out`."""
    for name in TOKENIZER_FILES:
        shutil.copyfile(work / name, out / name)
    shutil.copyfile(TARGET / TEMPLATE, out / TEMPLATE)


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
