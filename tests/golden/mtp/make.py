"""Makes the golden files of native MTP heads: tiny checkpoints as published, and what they should draft.

Targets and heads are transformers' own (`MtpModel`), randomized, norms included. A draft is computed without
caches, each token from all rows anew; a head's own output stands in for the hidden of later rows, which is
how DeepSeek, vLLM and SGLang use one head for several tokens. Run in this folder, with torch and
transformers as in ../README.md: `python make.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "families"))
import make_names  # noqa: E402

K, PROMPT, KEPT, LAYERS = 4, 13, (3, 1, 5, 2), make_names.LAYERS
HEAD = 12  # rotated by half: an even number
KINDS = ("qwen3_5_text", "qwen3_next", "glm4_moe", "deepseek_v3", "glm4_moe_lite")
THETA = 1e4


def random(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Matrices that matter, norms far from where they begin; as bfloat16 holds them."""
    if tensor.ndim == 1 and "A_log" not in name and "dt_bias" not in name:
        noise = torch.randn(tensor.shape)
        # Below 0, the bias of a group that is left out (0 in mlx-lm) could choose an expert of it.
        noise = 0.3 * (noise.abs() if "correction_bias" in name else noise)
        centre = 0 if name.startswith("mtp.") else tensor  # of the layer's and of the head's own
        changed = centre + (64 * noise).round() / 64  # 1 + w is exact in bfloat16, too
    elif "conv1d" in name or tensor.ndim == 1:
        changed = tensor
    else:
        changed = torch.randn(tensor.shape) / tensor.shape[-1] ** 0.5
    return changed.to(torch.bfloat16)


def config_of(kind: str) -> dict:
    config = make_names.config_of(kind, LAYERS).to_dict()
    rope = {"rope_type": "default", "rope_theta": THETA}
    if "kv_lora_rank" not in config:
        config["head_dim"], rope["partial_rotary_factor"] = HEAD, 0.5
    else:  # latent attention has no groups
        config["num_key_value_heads"] = config["num_attention_heads"]
    config["rms_norm_eps"] = 1e-6  # which mlx-lm has fixed in latent attention
    config["rope_parameters"] = rope
    # Published configs have these as well, and mlx-lm reads them.
    config |= {"rope_theta": THETA, "rope_scaling": None}
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if kind.startswith("qwen"):
        config["full_attention_interval"] = LAYERS
    config["torch_dtype"] = config["dtype"] = "float32"
    if not kind.startswith("qwen"):
        config["num_nextn_predict_layers"] = 1
    return config


def resized(kind: str) -> dict[str, torch.Tensor]:
    """The tensors of the published layout, randomized."""
    changes = make_names.MODELS[kind]
    if "head_dim" in changes:
        make_names.MODELS[kind] = {**changes, "head_dim": HEAD}
    return {name: random(name, tensor) for name, tensor in make_names.checkpoint(kind).items()}


def load(kind: str, folder: Path, config: dict) -> tuple[torch.nn.Module, MtpModel]:
    (folder / "config.json").write_text(
        json.dumps({**config, **make_names.AMBIGUOUS.get(kind, {})}, default=str)
    )
    main = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    if not kind.startswith("qwen"):
        main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS}.*"]
    main.config.num_mtp_layers = 1
    return main, MtpModel.from_pretrained(main, dtype=torch.float32).eval()


def draft(main: torch.nn.Module, head: MtpModel, hidden: torch.Tensor, history: list[int]):
    """K tokens after `history` and their logits [K, V]. Row i reads hidden i and token i + 1."""
    rows, tokens, found = hidden[:, : len(history) - 1], list(history[1:]), []
    for _ in range(K):
        positions = torch.arange(1, len(tokens) + 1)[None]
        out = head.forward_layer(0, rows, positions, None, input_ids=torch.tensor([tokens]))
        logits = main.lm_head(out[0, -1])
        found.append(logits)
        tokens.append(int(logits.argmax()))
        rows = torch.cat([rows, out[:, -1:]], dim=1)
    return tokens[-K:], torch.stack(found)


def make(kind: str) -> None:
    torch.manual_seed(11)
    folder, config = HERE / kind, config_of(kind)
    folder.mkdir(exist_ok=True)
    tensors = resized(kind)
    for name in tensors:  # copies stay copies
        if name.endswith((f".{LAYERS}.embed_tokens.weight", "shared_head.head.weight")):
            tensors[name] = tensors[
                "model.embed_tokens.weight" if "embed" in name else "lm_head.weight"
            ].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    main, head = load(kind, folder, config)
    history = torch.randint(0, 64, (PROMPT,)).tolist()
    with torch.no_grad():
        for _ in range(sum(KEPT)):
            history.append(int(main(torch.tensor([history])).logits[0, -1].argmax()))
        hidden = main.model(torch.tensor([history])).last_hidden_state
        golden = {"hidden": hidden[0].contiguous(), "target_logits": main.lm_head(hidden)[0].contiguous()}
        drafts = []
        for number in range(len(KEPT) + 1):
            end = PROMPT + sum(KEPT[:number])
            tokens, golden[f"draft.{number}"] = draft(main, head, hidden, history[:end])
            drafts.append(tokens)
    save_file(golden, folder / "golden.safetensors")
    if kind.startswith("qwen3_5"):  # as published: a language model inside one that sees
        config = {
            "model_type": kind.removesuffix("_text"),
            "text_config": config,
            "tie_word_embeddings": False,
        }
        tensors = {name.replace("model.", "model.language_model.", 1): t for name, t in tensors.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=str) + "\n")
    facts = {"history": history, "prompt": PROMPT, "kept": KEPT, "drafts": drafts}
    (folder / "golden.json").write_text(json.dumps(facts) + "\n")
    print(kind, drafts)


if __name__ == "__main__":
    for one in sys.argv[1:] or KINDS:
        make(one)
