"""Makes two trained tiny pairs as published: a Llama with EAGLE-3, and a Qwen3.5 with its MTP head inside.

Both targets are fitted on the corpus of ../tokenizer.py, their drafters on it less well: drafts are accepted,
accepted in part and rejected. Run in the repository's root, a minute on one core:
`PYTHONPATH=. python tests/golden/trained/make.py`.
"""

from __future__ import annotations

import functools
import json
import random
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import llama, qwen3_5

from mlx_spec.drafters.checkpoint import Conventions
from mlx_spec.drafters.conditioned import Rows
from mlx_spec.drafters.eagle3 import Eagle3Network
from mlx_spec.drafters.layers import LayerConfig
from mlx_spec.drafters.mtp import MTPNetwork
from mlx_spec.model.target import LMTarget
from mlx_spec.text import read_tokenizer
from mlx_spec.types import Features, FeatureSpec

HERE = Path(__file__).parent
TOKENIZED = HERE.parent / "12b" / "target"
SIDE_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
sys.path.insert(0, str(HERE.parent))
D, V, W, LENGTH, BOS, EOS = 48, 512, 192, 48, 2, 1
ROPE = {"rope_theta": 1e4}
LLAMA = {
    "model_type": "llama",
    "hidden_size": D,
    "num_hidden_layers": 5,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rms_norm_eps": 1e-5,
    "vocab_size": V,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": EOS,
    **ROPE,
}
DELTA = {
    **LLAMA,
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "intermediate_size": 80,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "full_attention_interval": 2,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, **ROPE},
    "mtp_num_hidden_layers": 1,
}
POST_NORM = Conventions(hidden="post_norm", chain="post_norm")
EAGLE3 = {
    "architectures": ["LlamaForCausalLMEagle3"],
    **{key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"},
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "draft_vocab_size": W,
    "eagle_aux_hidden_state_layer_ids": [1, 3, 4],  # inputs
}


def eagle3_config(layer: dict[str, Any], width: int, capture: tuple[int, ...]) -> dict[str, Any]:
    """The config.json that the converter would write."""
    conventions = replace(POST_NORM, hidden="layers", chain="pre_norm", capture=capture)
    return {
        "layer_config": layer,
        "target_hidden_size": width,
        "draft_vocab_size": W,
        **dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm"), False),
        "target": {"rope": ROPE},
        "mlx_spec": asdict(conventions),
    }


@functools.cache
def common_ids() -> np.ndarray:
    """The target's id of each draft id: the W most common ones."""
    common = [token for token, _ in Counter(corpus()).most_common(W)]
    rest = [token for token in range(V) if token not in common]
    return np.array(sorted([*common, *rest[: W - len(common)]]))


def draft_id() -> mx.array:
    """The draft id of each of the target's, or -1."""
    inverse = np.full(V, -1)
    inverse[common_ids()] = np.arange(W)
    return mx.array(inverse)


def id_maps() -> dict[str, mx.array]:
    ids = common_ids()
    return {"d2t": mx.array(ids - np.arange(W)), "t2d": mx.array(np.isin(np.arange(V), ids))}


@functools.cache
def corpus() -> tuple[int, ...]:
    from tokenizer import CORPUS  # of the folder above

    tokenizer, rng, ids = read_tokenizer(TOKENIZED), random.Random(1), []
    while len(ids) < 20_000:
        for line in rng.sample(CORPUS, len(CORPUS)):
            ids += [BOS, *tokenizer.encode(line, add_special_tokens=False).ids, EOS]
    return tuple(ids)


def batches(count: int, length: int) -> Iterator[mx.array]:
    rng, ids = random.Random(2), corpus()
    while True:
        starts = [rng.randrange(len(ids) - length) for _ in range(count)]
        yield mx.array([ids[start : start + length] for start in starts])


def fit(
    model: nn.Module, loss: Callable[[Any], mx.array], data: Iterator[Any], steps: int, rate: float = 4e-3
) -> None:
    optimizer = optim.AdamW(optim.cosine_decay(rate, steps), weight_decay=0.0)
    step = nn.value_and_grad(model, loss)
    for number in range(steps):
        value, gradient = step(next(data))
        gradient, _ = optim.clip_grad_norm(gradient, 1.0)
        optimizer.update(model, gradient)
        mx.eval(model.parameters(), optimizer.state)
        if number % 50 == 0 or number == steps - 1:
            print(f"  step {number:4d} loss {value.item():.3f}", flush=True)


def fit_target(model: nn.Module, steps: int) -> None:
    def loss(x: mx.array) -> mx.array:
        return nn.losses.cross_entropy(model(x[:, :-1]), x[:, 1:], reduction="mean")

    model.train()
    fit(model, loss, batches(12, LENGTH), steps)
    model.eval()
    model.update(tree_map(lambda w: w.astype(mx.bfloat16).astype(mx.float32), model.parameters()))


def fit_drafter(
    network: Eagle3Network | MTPNetwork,
    target: LMTarget,
    unembed: Callable[[mx.array], mx.array],
    draft_id: mx.array,
    steps: int,
) -> None:
    """Two tokens ahead: from the target's features, then from what the network made of them."""
    embed = target.parts.embed

    def read(x: list[int]) -> mx.array:
        target.rewind(0)
        features: Features = target.prefill(x)
        parts = [*features.hidden, *([] if features.final_hidden is None else [features.final_hidden])]
        return mx.concatenate(parts, axis=-1)

    def loss(rows: tuple[mx.array, mx.array]) -> mx.array:
        x, features = rows
        hidden, total = network.fuse(features[:-3]), mx.array(0.0)
        for ahead in (1, 2):
            tokens, goals = x[ahead : len(x) - 3 + ahead], draft_id[x[ahead + 1 : len(x) - 2 + ahead]]
            hidden, normed = network(embed(tokens), hidden, [Rows()])
            losses = nn.losses.cross_entropy(unembed(normed), mx.maximum(goals, 0))
            total = total + mx.where(goals < 0, 0, losses).mean() / ahead
        return total

    def data() -> Iterator[tuple[mx.array, mx.array]]:
        for x in batches(1, 160):
            yield x[0], read(x[0].tolist())

    fit(network, loss, data(), steps)


def save(folder: Path, tensors: dict[str, mx.array], config: dict, *, tokenizer: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stored = {
        n: t.astype(mx.bfloat16) if mx.issubdtype(t.dtype, mx.floating) else t for n, t in tensors.items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), stored, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for name in SIDE_FILES if tokenizer else ():
        if (TOKENIZED / name).is_file():
            shutil.copyfile(TOKENIZED / name, folder / name)


def flat(module: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(module.parameters()))


def make_eagle3() -> None:
    mx.random.seed(1)
    model = llama.Model(llama.ModelArgs.from_dict(LLAMA))
    fit_target(model, 160)
    save(HERE / "llama", flat(model), LLAMA, tokenizer=True)
    capture = tuple(index - 1 for index in EAGLE3["eagle_aux_hidden_state_layer_ids"])
    written = eagle3_config(EAGLE3, D, capture)
    config = LayerConfig.from_dict(written, {"lm_head.weight"}, {})
    network = Eagle3Network(config)
    fit_drafter(network, LMTarget(model, FeatureSpec(capture)), network.lm_head, draft_id(), 400)
    tensors = {name.replace("layers.0.", "midlayer."): t for name, t in flat(network).items()}
    save(HERE / "eagle3", tensors | id_maps(), EAGLE3, tokenizer=False)


NORM = re.compile(
    r"(layernorm|q_norm|k_norm|model\.norm|language_model\.norm|^mtp\.norm|pre_fc_norm\w*)\.weight$"
)
HEAD = (("norm_embedding", "pre_fc_norm_embedding"), ("norm_hidden", "pre_fc_norm_hidden"))


def as_published(name: str, tensor: mx.array) -> mx.array:
    """Norms around 0, convolutions as torch has them."""
    if "conv1d" in name:
        return tensor.moveaxis(2, 1)
    return tensor - 1 if NORM.search(name) and "linear_attn.norm" not in name else tensor


def make_qwen() -> None:
    mx.random.seed(2)
    config = {"model_type": "qwen3_5", "text_config": DELTA, "tie_word_embeddings": True, "eos_token_id": EOS}
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config))
    fit_target(model, 160)
    published = flat(model.language_model)  # before a target puts its taps into the names
    written = {"text_config": DELTA, "layer_type": "qwen3_5_text", "mlx_spec": asdict(POST_NORM)}
    network = MTPNetwork(written, POST_NORM)
    target = LMTarget(model, FeatureSpec(final_hidden=True))
    fit_drafter(network, target, target.parts.unembed, mx.arange(V), 120)
    tensors = {}
    for name, tensor in published.items():
        tensors[name.replace("model.", "model.language_model.", 1)] = tensor
    for name, tensor in flat(network).items():
        for ours, theirs in HEAD:
            name = name.replace(ours, theirs)
        tensors[f"mtp.{name}"] = tensor
    save(HERE / "qwen", {n: as_published(n, t) for n, t in tensors.items()}, config, tokenizer=True)


if __name__ == "__main__":
    for make in (make_eagle3, make_qwen):
        if not sys.argv[1:] or make.__name__.removeprefix("make_") in sys.argv[1:]:
            print(make.__name__)
            make()
