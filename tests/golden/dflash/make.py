"""Write a tiny DFlash drafter in the form it is published in, and what mlx-vlm computes with it.

python tests/golden/dflash/make.py        needs mlx-vlm (0.7.10 wrote what is here)

    config.json, model.safetensors    the drafter: norm weights spread, three query heads to one of K and V
    golden.safetensors                embed, head [V, D]: the target's tables
                                      features [S, 3D]: its captured layers
                                      logits.{i} [B - 1, V]: of round i
    golden.json                       history, and how many tokens of it each round begins with

Rounds accept all, some and none of a block: every one commits what the next begins with.
"""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_vlm.speculative.drafters.qwen3_dflash import DFlashDraftModel, ModelConfig

HERE = Path(__file__).parent
D, V, BLOCK, MASK, CAPTURE = 24, 40, 5, 39, [1, 2, 4]
CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": D,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "rms_norm_eps": 1e-6,
    "vocab_size": V,
    "max_position_embeddings": 512,
    "rope_theta": 5e3,
    "block_size": BLOCK,
    "num_target_layers": 6,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": CAPTURE},
}
BEGINS = [9, 10, 13, 18, 19, 22]  # prompt; then 1 (none accepted), 3, 5 (all), 1, 3 tokens a round


def spread(weight: mx.array) -> mx.array:
    noise = mx.random.normal(weight.shape) * 0.3
    return noise if weight.ndim > 1 else 1 + noise


def main() -> None:
    mx.random.seed(7)
    model = DFlashDraftModel(ModelConfig.from_dict(CONFIG))
    model.update(tree_map(spread, model.parameters()))
    tables = {name: mx.random.normal((V, D)) for name in ("embed", "head")}
    features = mx.random.normal((BEGINS[-1] - 1, len(CAPTURE) * D))
    history = mx.random.randint(0, V, (BEGINS[-1],)).tolist()
    mx.save_safetensors(str(HERE / "model.safetensors"), dict(tree_flatten(model.parameters())))
    model.embed_tokens, model.lm_head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
    model.embed_tokens.weight, model.lm_head.weight = tables["embed"], tables["head"]
    caches, golden, start = model.make_cache(), {**tables, "features": features}, 0
    for i, begin in enumerate(BEGINS):
        rows = features[None, start : begin - 1]
        golden[f"logits.{i}"] = model.draft_block(history[begin - 1], rows, caches, BLOCK, lambda x: x)[0]
        mx.eval(golden)
        start = begin - 1
    mx.save_safetensors(str(HERE / "golden.safetensors"), golden)
    (HERE / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    (HERE / "golden.json").write_text(json.dumps({"history": history, "begins": BEGINS}) + "\n")


if __name__ == "__main__":
    main()
