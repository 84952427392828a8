"""Makes trained tiny drafters of the one-pass families, as published, for ../12b-trained/target.

    dflash/    blocks of eight over the outputs of three layers
    medusa/    three heads
    peagle/    two layers over the same outputs, a reduced vocabulary
    pard/      a Llama that is a seventh of the target

That target has a sliding window of 16 and knows the corpus of ../tokenizer.py well; its drafters know it less
well: drafts are accepted, accepted in part and rejected. Run in the repository's root, three minutes on one
core: `PYTHONPATH=. python tests/golden/trained/one_pass.py`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache

import mlx.core as mx
import mlx.nn as nn
from make import EOS, HERE, LENGTH, ROPE, V, W, batches, draft_id, eagle3_config, fit, flat, id_maps, save
from mlx_lm.models import llama
from mlx_lm.utils import load_model

from mlx_spec.drafters.checkpoint import Conventions
from mlx_spec.drafters.conditioned import Rows
from mlx_spec.drafters.dflash import DFlashNetwork
from mlx_spec.drafters.eagle3 import PEagleNetwork
from mlx_spec.drafters.layers import LayerConfig
from mlx_spec.drafters.medusa import MedusaNetwork
from mlx_spec.model.target import LMTarget
from mlx_spec.types import Features, FeatureSpec

D, LAYERS = 64, 6
MASK = V - 1
CAPTURE = (0, 2, 4)
TEXT = 96  # tokens of a text, six windows
BLOCK, HEADS, K = 8, 3, 5
RATE = 2e-3
LAYER = {
    "hidden_size": D,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rms_norm_eps": 1e-6,
    "vocab_size": V,
    "max_position_embeddings": 4096,
    **ROPE,
}
DFLASH = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    **LAYER,
    "block_size": BLOCK,
    "num_target_layers": LAYERS,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(CAPTURE)},
}
PEAGLE = {
    "architectures": ["PEagleDraftModel"],
    "model_type": "llama",
    **LAYER,
    "draft_vocab_size": W,
    "mask_token_id": MASK,
    "eagle_aux_hidden_state_layer_ids": [index + 1 for index in CAPTURE],  # inputs
}
PARD = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **LAYER,
    "hidden_size": 32,
    "tie_word_embeddings": True,
    "eos_token_id": EOS,
    "pard_token": MASK,
}


@cache
def target(needs: FeatureSpec) -> LMTarget:
    """The target in float32."""
    model, _ = load_model(HERE.parent / "12b-trained" / "target")
    model.set_dtype(mx.float32)
    return LMTarget(model, needs)


def read(needs: FeatureSpec) -> Iterator[tuple[mx.array, Features]]:
    """Texts [TEXT] and what the target makes of them."""
    for x in batches(1, TEXT):
        target(needs).rewind(0)
        yield x[0], target(needs).prefill(x[0].tolist())


def anchors(rng: random.Random, ahead: int) -> range:
    """Every fifth place in a text, the last one first: what is written behind one reaches none before it."""
    return range(TEXT - ahead - 1 - rng.randrange(2), 4, -5)


def cross_entropy(logits: mx.array, goals: mx.array) -> mx.array:
    """The mean over rows whose goal is known; others are -1."""
    losses = nn.losses.cross_entropy(logits, mx.maximum(goals, 0))
    return mx.where(goals < 0, 0, losses).mean()


def make_dflash() -> None:
    names = dict(layer_config=LAYER, draft_vocab_size=V)
    names["mlx_spec"] = asdict(Conventions(hidden="layers", capture=CAPTURE, rope="own"))
    network = DFlashNetwork(LayerConfig.from_dict(names, (), {}))
    network.norm.weight *= 0.2
    needs, rng = FeatureSpec(CAPTURE), random.Random(3)
    parts = target(needs).parts

    def loss(seen: tuple[mx.array, Features]) -> mx.array:
        x, features = seen
        caches, total = [Rows() for _ in network.layers], mx.array(0.0)
        network.remember(mx.concatenate(features.hidden, axis=-1), caches)
        for place in anchors(rng, BLOCK):
            for rows in caches:
                rows.cut(place, place)
            block = mx.concatenate([x[place : place + 1], mx.full(BLOCK - 1, MASK)])
            slots = network(parts.embed(block), caches, 0)
            total = total + cross_entropy(parts.unembed(slots[1:]), x[place + 1 : place + BLOCK])
        return total / 16

    fit(network, loss, read(needs), 1000, RATE)
    save(HERE / "dflash", flat(network), DFLASH, tokenizer=False)


def make_medusa() -> None:
    network = MedusaNetwork(HEADS, 1, D, V, biased=True)
    needs = FeatureSpec(final_hidden=True)
    for head in network.heads:
        head.layers[0].weight *= 0

    def loss(seen: tuple[mx.array, Features]) -> mx.array:
        x, hidden = seen[0], seen[1].final_hidden
        heads = [head(hidden[: -2 - k]) for k, head in enumerate(network.heads)]
        return sum(cross_entropy(logits, x[2 + k :]) for k, logits in enumerate(heads)) / HEADS

    fit(network, loss, read(needs), 110, RATE)
    tensors = {}
    for name, tensor in flat(network).items():
        _, head, part, *rest = name.split(".")
        tensors[f"{head}.1.weight" if part == "lm_head" else f"{head}.0.linear.{rest[-1]}"] = tensor
    config = {"medusa_num_heads": HEADS, "medusa_num_layers": 1}
    save(HERE / "medusa", tensors, config, tokenizer=False)


def make_peagle() -> None:
    goals, written = draft_id(), eagle3_config(PEAGLE, D, CAPTURE)
    network = PEagleNetwork(LayerConfig.from_dict(written, {"lm_head.weight", "embed_tokens.weight"}, {}))
    network.norm.weight *= 0.2
    network.mask_hidden = 0.1 * mx.random.normal(network.mask_hidden.shape)
    needs, rng = FeatureSpec(CAPTURE), random.Random(4)
    network.embed_tokens.weight = target(needs).parts.embed(mx.arange(V))

    def loss(seen: tuple[mx.array, Features]) -> mx.array:
        x, features = seen
        caches, rows = [Rows() for _ in network.layers], mx.concatenate(features.hidden, axis=-1)
        _, normed = network(network.embed_tokens(x[1:]), network.fuse(rows[:-1]), caches)
        total = 16 * cross_entropy(network.lm_head(normed[:-1]), goals[x[2:]])
        masks = mx.broadcast_to(network.mask_hidden, (K - 1, network.mask_hidden.size))
        for place in anchors(rng, K + 2):
            for cached in caches:
                cached.cut(place + 1, place + 1)
            embedded = network.embed_tokens(mx.full(K - 1, MASK))
            _, normed = network(embedded, network.fuse(masks), caches)
            total = total + cross_entropy(network.lm_head(normed), goals[x[place + 3 : place + K + 2]])
        return total / 16

    fit(network, loss, read(needs), 500, RATE)
    tensors = flat(network) | id_maps()
    tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
    save(HERE / "peagle", tensors, PEAGLE, tokenizer=False)


def make_pard() -> None:
    model, rng = llama.Model(llama.ModelArgs.from_dict(PARD)), random.Random(5)

    def loss(x: mx.array) -> mx.array:
        end = rng.randrange(4, LENGTH - K)
        shown = mx.concatenate([x[:, :end], mx.full((x.shape[0], K - 1), MASK)], axis=1)
        return cross_entropy(model(shown), x[:, 1 : end + K])

    fit(model, loss, batches(12, LENGTH), 500)
    save(HERE / "pard", flat(model), PARD, tokenizer=False)


if __name__ == "__main__":
    for seed, make in enumerate((make_dflash, make_medusa, make_peagle, make_pard)):
        if not sys.argv[1:] or make.__name__.removeprefix("make_") in sys.argv[1:]:
            print(make.__name__)
            mx.random.seed(10 + seed)
            make()
