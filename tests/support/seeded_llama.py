"""A tiny Llama whose float32 weights come from a seed, for this package and for transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

WIDTH, INNER, HEADS, VOCAB, LAYERS = 64, 96, 4, 256, 2
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 2,
}
PROMPT = list(range(40, 52))


def weights(seed: int = 0) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """The tensors by their names in transformers."""
    shapes = {"model.embed_tokens": (VOCAB, WIDTH), "lm_head": (VOCAB, WIDTH), "model.norm": (WIDTH,)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{name}_proj": (WIDTH, WIDTH) for name in "qkvo"}
        shapes |= {f"{layer}.mlp.{name}_proj": (INNER, WIDTH) for name in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj"] = (WIDTH, INNER)
        shapes |= {f"{layer}.{name}_layernorm": (WIDTH,) for name in ("input", "post_attention")}
    random = np.random.default_rng(seed)
    drawn = {name: random.standard_normal(shape) * 0.2 for name, shape in shapes.items()}
    return {f"{n}.weight": (a + (a.ndim == 1)).astype(np.float32) for n, a in drawn.items()}


def save(folder: Path, generation: dict[str, Any]) -> Path:
    """A checkpoint with a generation_config.json, without a tokenizer."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **generation}))
    return folder
