"""Write two tiny PARD drafters as they are published, and what transformers computes with them.

python tests/golden/pard/make.py        needs torch 2.13.0 and transformers 5.22.2

    {llama,qwen3}/config.json, model.safetensors    norm weights spread, three query heads to one of K and V
    {llama,qwen3}/golden.safetensors                logits.{i} [K, V]: of round i, float32
    {llama,qwen3}/golden.json                       history, and how many tokens of it each round begins with

The logits of a round are the last K of one pass without a cache over the history and K - 1 mask tokens. Of
its K drafts 2, none, all, 1 and 3 are accepted in turn, and another token follows: the next round's history.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

HERE = Path(__file__).parent
V, K, MASK, PROMPT = 48, 4, 47, 11
ACCEPTED = (2, 0, 4, 1, 3)
SIZES = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "vocab_size": V,
    "max_position_embeddings": 512,
    "rope_theta": 5e3,
}
MODELS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False, rms_norm_eps=1e-5),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=True, rms_norm_eps=1e-6),
}


def spread(model: torch.nn.Module) -> None:
    """Other weights than those of a new model, norms as well."""
    for parameter in model.parameters():
        noise = 0.3 * torch.randn_like(parameter)
        parameter.data = noise if parameter.ndim > 1 else 1 + noise


@torch.no_grad()
def make(name: str) -> None:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(MODELS[name], dtype=torch.float32).eval()
    spread(model)
    history, begins, golden = torch.randint(0, MASK, (PROMPT,)).tolist(), [], {}
    for i, accepted in enumerate(ACCEPTED):
        begins.append(len(history))
        ids = torch.tensor([[*history, *[MASK] * (K - 1)]])
        golden[f"logits.{i}"] = model(ids, use_cache=False).logits[0, -K:].contiguous()
        drafts = golden[f"logits.{i}"].argmax(dim=-1).tolist()
        other = (drafts[min(accepted, K - 1)] + 1) % MASK
        history += [*drafts[:accepted], other]
    folder = HERE / name
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config |= {"pard_token": MASK, "spd_type": "pard"}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(golden, folder / "golden.safetensors")
    (folder / "golden.json").write_text(json.dumps({"history": history, "begins": begins}) + "\n")


if __name__ == "__main__":
    for name in MODELS:
        make(name)
