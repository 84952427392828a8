"""Computes the EAGLE-3 golden files: what two drafters, as published, should draft for a tiny Llama.

Everything is computed in float64 by numpy, without caches: each draft token from all rows anew. Written after
the paper (arXiv:2503.01840) and the description of the checkpoints, independently of mlx_spec. Run in this
folder: `python make.py`. The checkpoints, of random weights, are inputs, as are the prompt in golden.json and
how many tokens each round commits. `git log` of this file finds what made them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
from support.by_hand import Shape, array, attention, finish, norm  # noqa: E402
from support.checkpoints import Tensors, read, stored  # noqa: E402

K, CAPTURE = 4, (1, 3, 4)  # tokens drafted in each round; outputs: the inputs of layers 2, L // 2 and L - 3
CONFIG, FACTS = read(HERE / "llama"), read(HERE, "golden.json")
LAYERS, HEAD, EPS = (CONFIG[key] for key in ("num_hidden_layers", "head_dim", "rms_norm_eps"))


def frequencies() -> np.ndarray:
    """Llama 3's: long waves slowed by the factor, short ones kept, a ramp between them."""
    scaling = CONFIG["rope_scaling"]
    plain = CONFIG["rope_theta"] ** -(np.arange(0, HEAD, 2) / HEAD)
    turns = scaling["original_max_position_embeddings"] * plain / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    share = np.clip((turns - low) / (high - low), 0, 1)
    return share * plain + (1 - share) * plain / scaling["factor"]


HEADS, GROUPS = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
SHAPE = Shape(HEADS, GROUPS, HEAD, eps=EPS, frequencies=tuple(frequencies()))


def decoder_layer(w: Tensors, prefix: str, residual: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Attention over rows `x` [S, inputs], and the MLP, each with its residual."""
    attended = attention(x, w, prefix, SHAPE, np.arange(len(x), dtype=float))
    return finish(residual, attended, w, prefix, EPS)


def run_target(weights: Tensors, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Captured outputs side by side [S, 3T] and logits [S, V]."""
    x, seen = array(weights, "model.embed_tokens.weight")[ids], []
    for index in range(LAYERS):
        prefix = f"model.layers.{index}."
        normed = norm(x, array(weights, f"{prefix}input_layernorm.weight"), EPS)
        x = decoder_layer(weights, prefix, x, normed)
        seen.append(x)
    logits = norm(x, array(weights, "model.norm.weight"), EPS) @ array(weights, "lm_head.weight").T
    return np.concatenate([seen[index] for index in CAPTURE], axis=-1), logits


def draft(
    w: Tensors, table: np.ndarray, features: np.ndarray, tokens: list[int], ids: np.ndarray, *, norms: bool
) -> tuple[list[int], np.ndarray]:
    """K tokens after `tokens`, and the logits [K, W]. Row i reads features i and token i + 1."""
    read = norm(features, array(w, "input_norm.weight"), EPS) if norms else features
    hidden, followed = read @ array(w, "fc.weight").T, list(tokens[1:])
    found = []
    for _ in range(K):
        normed = norm(hidden, array(w, "layers.0.hidden_norm.weight"), EPS)
        embedded = norm(table[followed], array(w, "layers.0.input_layernorm.weight"), EPS)
        x = np.concatenate([embedded, normed], axis=-1)
        out = decoder_layer(w, "layers.0.", normed if norms else hidden, x)
        logits = norm(out[-1], array(w, "norm.weight"), EPS) @ array(w, "lm_head.weight").T
        found.append(logits)
        followed.append(int(ids[logits.argmax()]))
        hidden = np.concatenate([hidden, out[-1:]])  # before the final norm
    return followed[-K:], np.array(found)


def main() -> None:
    target, prompt, kept = stored(HERE / "llama" / "model.safetensors"), FACTS["prompt"], FACTS["kept"]
    history = FACTS["history"][:prompt]
    for _ in range(sum(kept)):
        history.append(int(run_target(target, history)[1][-1].argmax()))
    features, logits = run_target(target, history)
    golden = {"features": features, "target_logits": logits}
    drafts: dict[str, list[list[int]]] = {}
    for name in ("official", "speculators"):
        loaded = stored(HERE / name / "model.safetensors")
        weights = {key.replace("midlayer", "layers.0"): tensor for key, tensor in loaded.items()}
        own = "embed_tokens.weight"
        table = array(weights, own) if own in weights else array(target, f"model.{own}")
        ids = np.array(weights["d2t"]) + np.arange(weights["d2t"].size)
        drafts[name] = []
        for number in range(len(kept) + 1):
            n, norms = prompt + sum(kept[:number]), name == "speculators"
            tokens, found = draft(weights, table, features[: n - 1], history[:n], ids, norms=norms)
            drafts[name].append(tokens)
            golden[f"{name}.{number}"] = found
    arrays = {name: mx.array(tensor.astype(np.float32)) for name, tensor in golden.items()}
    mx.save_safetensors(str(HERE / "golden.safetensors"), arrays)
    facts = {"history": history, "prompt": prompt, "kept": kept, "drafts": drafts, "draft_ids": ids.tolist()}
    (HERE / "golden.json").write_text(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
