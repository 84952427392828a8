"""Makes the EAGLE-3 golden files: a tiny Llama, two drafters as published, and what they should draft.

Everything is computed in float64 by numpy, without caches: each draft token from all rows anew. Written after
the paper (arXiv:2503.01840) and the description of the checkpoints, independently of mlx_spec. Run in this
folder: `python make.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "support"))
from by_hand import Shape, array, attention, finish, norm  # noqa: E402

V, W, T, LAYERS = 96, 40, 32, 8  # vocabularies, hidden size and layers of the target
HEADS, GROUPS, HEAD, INNER, EPS, THETA = 6, 2, 8, 40, 1e-5, 5e4
SCALING = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
K, KEPT = 4, (3, 1, 5, 2, 4)  # tokens drafted and committed in each round
CAPTURE = (1, 3, 4)  # outputs: the inputs of layers 2, L // 2 and L - 3
Weights = dict[str, mx.array]  # bfloat16, which the files store
rng = np.random.default_rng(5)


def random(*form: int) -> mx.array:
    """A matrix, or a norm far from 1."""
    noise = rng.standard_normal(form)
    weight = 1 + 0.4 * noise if len(form) == 1 else noise / np.sqrt(form[-1])
    return mx.array(weight.astype(np.float32)).astype(mx.bfloat16)


def layer(width: int, inputs: int) -> Weights:
    """A Llama layer whose attention reads rows of `inputs`."""
    forms = {
        "self_attn.q_proj": (HEADS * HEAD, inputs),
        "self_attn.k_proj": (GROUPS * HEAD, inputs),
        "self_attn.v_proj": (GROUPS * HEAD, inputs),
        "self_attn.o_proj": (width, HEADS * HEAD),
        "mlp.gate_proj": (INNER, width),
        "mlp.up_proj": (INNER, width),
        "mlp.down_proj": (width, INNER),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    return {f"{name}.weight": random(*form) for name, form in forms.items()}


def frequencies() -> np.ndarray:
    """Llama 3's: long waves slowed by the factor, short ones kept, a ramp between them."""
    plain = THETA ** -(np.arange(0, HEAD, 2) / HEAD)
    turns = SCALING["original_max_position_embeddings"] * plain / (2 * np.pi)
    low, high = SCALING["low_freq_factor"], SCALING["high_freq_factor"]
    share = np.clip((turns - low) / (high - low), 0, 1)
    return share * plain + (1 - share) * plain / SCALING["factor"]


SHAPE = Shape(HEADS, GROUPS, HEAD, eps=EPS, frequencies=tuple(frequencies()))


def decoder_layer(w: Weights, prefix: str, residual: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Attention over rows `x` [S, inputs], and the MLP, each with its residual."""
    attended = attention(x, w, prefix, SHAPE, np.arange(len(x), dtype=float))
    return finish(residual, attended, w, prefix, EPS)


def make_target() -> Weights:
    weights = {"embed_tokens.weight": random(V, T), "norm.weight": random(T)}
    for index in range(LAYERS):
        weights |= {f"layers.{index}.{name}": tensor for name, tensor in layer(T, T).items()}
    return {**{f"model.{name}": tensor for name, tensor in weights.items()}, "lm_head.weight": random(V, T)}


def run_target(weights: Weights, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Captured outputs side by side [S, 3T] and logits [S, V]."""
    x, seen = array(weights, "model.embed_tokens.weight")[ids], []
    for index in range(LAYERS):
        prefix = f"model.layers.{index}."
        normed = norm(x, array(weights, f"{prefix}input_layernorm.weight"), EPS)
        x = decoder_layer(weights, prefix, x, normed)
        seen.append(x)
    logits = norm(x, array(weights, "model.norm.weight"), EPS) @ array(weights, "lm_head.weight").T
    return np.concatenate([seen[index] for index in CAPTURE], axis=-1), logits


def make_drafter(width: int) -> Weights:
    drafter = {f"midlayer.{name}": tensor for name, tensor in layer(width, 2 * width).items()}
    drafter["midlayer.hidden_norm.weight"] = random(width)
    return drafter | {
        "fc.weight": random(width, 3 * T),
        "norm.weight": random(width),
        "lm_head.weight": random(W, width),
    }


def draft(
    w: Weights, table: np.ndarray, features: np.ndarray, tokens: list[int], ids: np.ndarray, *, norms: bool
) -> tuple[list[int], np.ndarray]:
    """K tokens after `tokens`, and the logits [K, W]. Row i reads features i and token i + 1."""
    read = norm(features, array(w, "input_norm.weight"), EPS) if norms else features
    hidden, followed = read @ array(w, "fc.weight").T, list(tokens[1:])
    found = []
    for _ in range(K):
        normed = norm(hidden, array(w, "midlayer.hidden_norm.weight"), EPS)
        embedded = norm(table[followed], array(w, "midlayer.input_layernorm.weight"), EPS)
        x = np.concatenate([embedded, normed], axis=-1)
        out = decoder_layer(w, "midlayer.", normed if norms else hidden, x)
        logits = norm(out[-1], array(w, "norm.weight"), EPS) @ array(w, "lm_head.weight").T
        found.append(logits)
        followed.append(int(ids[logits.argmax()]))
        hidden = np.concatenate([hidden, out[-1:]])  # before the final norm
    return followed[-K:], np.array(found)


def save(folder: Path, weights: Weights, config: dict, **extra: mx.array) -> None:
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), {**weights, **extra}, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def layer_config(width: int) -> dict:
    return {
        "model_type": "llama",
        "hidden_size": width,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": HEAD,
        "intermediate_size": INNER,
        "rms_norm_eps": EPS,
        "vocab_size": V,
        "max_position_embeddings": 2048,
        "num_hidden_layers": 1,
    }


def main() -> None:
    target = make_target()
    rope = {"rope_theta": THETA, "rope_scaling": SCALING, "tie_word_embeddings": False}
    save(HERE / "llama", target, {**layer_config(T), **rope, "num_hidden_layers": LAYERS})
    ids = np.sort(rng.choice(np.arange(1, V - 1), W - 2, replace=False))
    ids = np.concatenate([[0], ids, [V - 1]])  # the first and the last token are among them
    marks = np.isin(np.arange(V), ids)
    maps = {"d2t": mx.array(ids - np.arange(W)), "t2d": mx.array(marks)}
    plain, speculators = make_drafter(T), make_drafter(24)
    speculators |= {"input_norm.weight": random(3 * T), "embed_tokens.weight": random(V, 24)}
    # Published drafters leave out the rotary parameters, or have others than their target.
    published = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": W, "rope_theta": 1e4}
    save(HERE / "official", plain, {**layer_config(T), **published}, **maps)
    renamed = {name.replace("midlayer", "layers.0"): tensor for name, tensor in speculators.items()}
    config = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer_config(24),
        "draft_vocab_size": W,
        "target_hidden_size": T,
        "norm_before_fc": True,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    }
    save(HERE / "speculators", renamed, config, **maps)

    history = rng.integers(0, V, 21).tolist()
    for _ in range(sum(KEPT)):
        history.append(int(run_target(target, history)[1][-1].argmax()))
    features, logits = run_target(target, history)
    golden = {"features": features, "target_logits": logits}
    tables = {
        "official": array(target, "model.embed_tokens.weight"),
        "speculators": array(speculators, "embed_tokens.weight"),
    }
    drafts: dict[str, list[list[int]]] = {}
    for name, weights in (("official", plain), ("speculators", speculators)):
        drafts[name] = []
        for number in range(len(KEPT) + 1):
            n = 21 + sum(KEPT[:number])
            tokens, found = draft(
                weights, tables[name], features[: n - 1], history[:n], ids, norms=name == "speculators"
            )
            drafts[name].append(tokens)
            golden[f"{name}.{number}"] = found
    stored = {name: mx.array(tensor.astype(np.float32)) for name, tensor in golden.items()}
    mx.save_safetensors(str(HERE / "golden.safetensors"), stored)
    facts = {"history": history, "prompt": 21, "kept": KEPT, "drafts": drafts, "draft_ids": ids.tolist()}
    (HERE / "golden.json").write_text(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
