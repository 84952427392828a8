"""Write tiny published drafters of the DFlash family, and what their authors' torch computes with them.

    PYTHONPATH=DEEPSPEC python tests/golden/dflash/make.py

needs torch, transformers 5.10, z-lab's `dflash` 0.1.0, and DEEPSPEC, a clone of deepseek-ai/DeepSpec.

    WEIGHTS.safetensors    tensors of a checkpoint
    golden.json            history, how many tokens of it each round begins with, and of each case its weights
                           and its config.json
    golden.safetensors     embed, head [V, D]: the target's tables
                           features [S, 3D]: its captured layers
    CASE.hidden.{i} [K, D], CASE.path.{i} [K]    of round i: what the head reads, and the greedy path
    CASE.tokens.{i} [K], CASE.q.{i} [K, V]       a path drawn at temperature 1, and the distributions along it

Rounds accept a block in part, not at all and whole. No round uses a cache: the context comes again each time.
"""

import json
from pathlib import Path

import torch
from deepspec.modeling.dspark.gemma4 import Gemma4DSparkModel
from deepspec.modeling.dspark.qwen3 import Qwen3DSparkModel
from dflash.model import DFlash2DraftModel, DFlashDraftModel
from safetensors.torch import save_file
from transformers import Gemma4TextConfig, Qwen3Config

HERE = Path(__file__).parent
D, V, BLOCK, MASK, CAPTURE, WINDOW = 16, 40, 4, 39, [0, 1, 3], 8
BEGINS = [13, 15, 16, 20]  # a prompt; then 2, 1 and 4 tokens a round
R = torch.Generator().manual_seed(3)
FULL, SLIDING = "full_attention", "sliding_attention"

QWEN3 = {
    "hidden_size": D,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": V,
    "max_position_embeddings": 512,
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "rope_parameters": {"rope_theta": 5e3, "rope_type": "default"},
    "tie_word_embeddings": False,
}
GEMMA4 = {
    "hidden_size": D,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 8,
    "global_head_dim": 16,
    "attention_k_eq_v": True,
    "layer_types": [FULL, FULL],
    "vocab_size": V,
    "max_position_embeddings": 512,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
    "final_logit_softcapping": 2.0,
    "rope_parameters": {
        FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1e3, "rope_type": "proportional"},
        SLIDING: {"rope_theta": 1e4, "rope_type": "default"},
    },
    "tie_word_embeddings": False,
}
SPARK = {
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "target_layer_ids": CAPTURE,
    "num_target_layers": 5,
    "num_anchors": 4,
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
BOTH = [SLIDING, FULL]
CONVOLVED = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5}


def normal(*shape):
    return torch.randn(*shape, generator=R)


def fill(model):
    """Spread norms around 1, kernels around the identity, matrices by their inputs."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        with torch.no_grad():
            if "rotary" in name or "embed_scale" in name:
                continue
            if "base_kernel" in name:
                tensor.copy_(0.3 * normal(*tensor.shape))
                tensor[:, 0] += 1
            elif tensor.ndim == 1:
                tensor.copy_((not name.endswith("bias")) + 0.2 * normal(*tensor.shape))
            elif "codebook" in name or "markov_w1" in name:
                tensor.copy_(normal(*tensor.shape))
            else:
                tensor.copy_(normal(*tensor.shape) / tensor.shape[-1] ** 0.5)
    return model.eval()


def zlab(layer_types, causal=None, **special):
    config = Qwen3Config(**QWEN3, layer_types=layer_types)
    config.num_target_layers, config.block_size = 5, BLOCK
    config.dflash_config = {"mask_token_id": MASK, "target_layer_ids": CAPTURE, **special}
    if causal is not None:
        config.is_causal = causal
    return config


def spark(model, base, **changes):
    config = (Gemma4TextConfig if model is Gemma4DSparkModel else Qwen3Config)(**base)
    kept = {key: base[key] for key in ("num_global_key_value_heads", "global_head_dim") if key in base}
    for key, value in {**SPARK, **kept, "architectures": [model.__name__], **changes}.items():
        setattr(config, key, value)
    config._attn_implementation = "sdpa"
    return config


def plain(**changes):
    base = {**QWEN3, "use_sliding_window": False, "layer_types": [FULL, FULL]}
    return spark(Qwen3DSparkModel, base, **changes)


CASES = {  # of each case: class, name of its weights, config
    "full": (DFlashDraftModel, "dflash", zlab([FULL, FULL])),
    "sliding": (DFlashDraftModel, "dflash", zlab(BOTH)),
    "sliding, not causal": (DFlashDraftModel, "dflash", zlab(BOTH, False)),
    "causal": (DFlashDraftModel, "dflash", zlab(BOTH, True)),
    "dflash2": (DFlash2DraftModel, "dflash2", zlab(BOTH, False, **CONVOLVED)),
    "dspark": (Qwen3DSparkModel, "dspark", plain()),
    "dspark, gated": (Qwen3DSparkModel, "dspark_gated", plain(markov_head_type="gated")),
    "dspark, rnn": (Qwen3DSparkModel, "dspark_rnn", plain(markov_head_type="rnn")),
    "gemma4_dspark": (Gemma4DSparkModel, "gemma4_dspark", spark(Gemma4DSparkModel, GEMMA4)),
    "gemma4_dspark, values": (
        Gemma4DSparkModel,
        "gemma4_dspark_values",
        spark(Gemma4DSparkModel, {**GEMMA4, "attention_k_eq_v": False}),
    ),
}


def published(model):
    """The names of published files: z-lab's codebooks have no `.weight`."""
    kept = {name: t for name, t in model.state_dict().items() if "rotary" not in name and "scale" not in name}
    return {name.replace("codebook.weight", "codebook"): t.contiguous() for name, t in kept.items()}


def drafted(model, tables, rows, token):
    """Return hidden [K, D], the greedy path, a path drawn at temperature 1 and its distributions."""
    embed, head = tables
    block = torch.tensor([[token, *[MASK] * (BLOCK - 1)]])
    positions, first = torch.arange(rows.shape[1] + BLOCK)[None], block[:, 0]
    if isinstance(model, DFlashDraftModel):
        noise = torch.nn.functional.embedding(block, embed)
        hidden = model(position_ids=positions, noise_embedding=noise, target_hidden=rows)[:, 1:]
        if not isinstance(model, DFlash2DraftModel):
            logits = model.compute_logits(hidden, lambda x: x @ head.T)
            q = logits.softmax(-1)
            return hidden, logits.argmax(-1), torch.multinomial(q[0], 1)[None, :, 0], q
        path = model.propose(hidden, first, lambda x: x @ head.T, 0.0)[0]
        tokens, candidates, some = model.propose(hidden, first, lambda x: x @ head.T, 1.0)
        return hidden, path, tokens, torch.zeros(1, BLOCK - 1, V).scatter(-1, candidates, some)
    hidden = model._forward_backbone(
        position_ids=positions, noise_embedding=model.embed_tokens(block), target_hidden_states=rows
    )
    at = {"first_prev_token_ids": first, "hidden_states": hidden}
    path = model.sample_draft_tokens(model.compute_logits(hidden), **at)[0]
    tokens, logits = model.sample_draft_tokens(model.compute_logits(hidden), temperature=1.0, **at)
    return hidden, path, tokens, logits.softmax(-1)


@torch.no_grad()
def main():
    torch.manual_seed(1)
    tables = normal(V, D), normal(V, D) / D**0.5 * 3
    features = normal(1, BEGINS[-1] - 1, len(CAPTURE) * D)
    history = torch.randint(0, V - 1, (BEGINS[-1],), generator=R).tolist()
    golden, cases, weights = {"embed": tables[0], "head": tables[1], "features": features[0]}, {}, {}
    for case, (kind, name, config) in CASES.items():
        model = kind(config)
        if name in weights:
            model.load_state_dict(weights[name])
        else:
            weights[name] = fill(model).state_dict()
            save_file(published(model), HERE / f"{name}.safetensors")
        model.eval()
        for i, begin in enumerate(BEGINS):
            found = drafted(model, tables, features[:, : begin - 1], history[begin - 1])
            for part, array in zip(("hidden", "path", "tokens", "q"), found, strict=True):
                array = array[0].contiguous()
                golden[f"{case}.{part}.{i}"] = array if array.is_floating_point() else array.to(torch.int32)
        written = json.loads(config.to_json_string())
        cases[case] = {"weights": name, "config": {**written, "architectures": [kind.__name__]}}
    save_file(golden, HERE / "golden.safetensors")
    facts = {"history": history, "begins": BEGINS, "cases": cases}
    (HERE / "golden.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
