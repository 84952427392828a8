"""Make the tiny checkpoints with a vision tower: inputs of golden.py, with random weights.

python tests/golden/vision/make.py [--variants e2b,gemma3]

The text weights of Gemma 4 are those of the trained pairs, by a link. Every tensor of a tower has values that
show a forgotten scale, norm, range or transposition.
"""

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

HERE = Path(__file__).parent
SEEDS = {"e2b": 50, "e4b": 51, "12b": 52, "26b": 53, "31b": 54, "gemma3": 77, "qwen": 60}
PATCH, POOL, SOFT_TOKENS = 4, 3, 70  # the published ones have 16, 3 and 280
WORDS = {"boi": "<|image>", "eoi": "<image|>", "image": "<|image|>"}
SHARED = ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json")

# Contents may be texts or lists of parts.
TEMPLATE = """{{- bos_token -}}
{%- for m in messages -%}
{{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' -}}
{%- if m.content is string -%}{{- m.content | trim -}}
{%- else -%}{%- for p in m.content -%}
{%- if p.type == 'image' -%}{{- 'PLACEHOLDER' -}}{%- endif -%}
{%- if p.type == 'text' -%}{{- p.text | trim -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{- '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>model\\n' -}}{%- endif -%}
"""


@torch.no_grad()
def spread(tensors: dict[str, Tensor], seed: int) -> None:
    """Fill tensors at random, each in a range that suits it; all are exact in bfloat16."""
    gen = torch.Generator().manual_seed(seed)

    def normal(t: Tensor, std: float, mean: float = 0.0) -> None:
        t.copy_(torch.randn(t.shape, generator=gen) * std + mean)

    for name, t in sorted(tensors.items()):
        if name.endswith(("input_min", "output_min")):
            t.fill_(-1.5 - 0.5 * torch.rand((), generator=gen).item())
        elif name.endswith(("input_max", "output_max")):
            t.fill_(1.5 + 0.5 * torch.rand((), generator=gen).item())
        elif "std_bias" in name:
            normal(t, 0.3)
        elif "std_scale" in name:
            normal(t, 0.1, 0.5)
        elif "position_embedding" in name or "pos_embed" in name:
            normal(t, 0.5)
        elif "embed_tokens" in name:
            normal(t, 0.35)
        elif name.endswith("language_model.norm.weight"):  # random signs: else a tied model repeats its input
            normal(t, 0.15, 1.0)
            t.mul_(torch.sign(torch.randn(t.shape, generator=gen)))
        elif t.ndim == 1 and name.endswith("bias"):
            normal(t, 0.2)
        elif t.ndim == 1:
            normal(t, 0.15, 1.0 if "language_model" not in name else 0.0)
        elif name.endswith("merger.linear_fc2.weight"):
            normal(t, 2.0 / math.sqrt(t[0].numel()))
        elif name.endswith(("embedding_projection.weight", "mm_input_projection_weight")):
            normal(t, 1.0)  # rows of a picture are as large as those of tokens
        else:
            normal(t, 1.0 / math.sqrt(t[0].numel()))
        t.copy_(t.bfloat16())


def tower_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the tower under the names of transformers' class."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {
        name: t
        for name, t in tensors.items()
        if any(part in name for part in ("vision", "visual", "multi_modal_projector"))
        and not name.endswith(("inv_freq", "position_ids"))
    }


def published(name: str) -> str:
    """Return a name as checkpoints have it."""
    if "embed_vision." not in name or ".embedding_projection" in name:
        return name.replace("embed_vision.multimodal_embedder.", "embed_vision.")
    return name.replace("embed_vision.", "vision_embedder.")


def write(
    out: Path,
    model: nn.Module,
    config: dict[str, Any],
    processor: dict[str, Any],
    word: str,
    template: str = TEMPLATE,
) -> None:
    """Write all but the text weights and the tokenizer of a checkpoint."""
    tower = {published(name): t.bfloat16().contiguous() for name, t in tower_of(model).items()}
    save_file(tower, out / "model-vision.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    (out / "processor_config.json").write_text(json.dumps({"image_processor": processor}, indent=1) + "\n")
    (out / "chat_template.jinja").write_text(template.replace("PLACEHOLDER", word))


def link(out: Path, source: str, names: tuple[str, ...]) -> None:
    for name in names:
        (out / name).unlink(missing_ok=True)
        os.symlink(f"../../{source}/{name}", out / name)


def gemma4(name: str, out: Path) -> None:
    pair = HERE.parent / f"{name}-trained" / "target"
    link(out, f"{name}-trained/target", SHARED)
    config = json.loads((pair / "config.json").read_text())
    tok = AutoTokenizer.from_pretrained(pair)
    config |= {f"{key}_token_id": tok.convert_tokens_to_ids(word) for key, word in WORDS.items()}
    cut = {"patch_size": PATCH, "pooling_kernel_size": POOL}
    if name == "12b":
        config["vision_config"] = {
            **cut, "model_type": "gemma4_unified_vision", "mm_embed_dim": 48, "mm_posemb_size": 128,
            "output_proj_dims": 48,
        }  # fmt: skip
        model = Gemma4UnifiedForConditionalGeneration(Gemma4UnifiedConfig.from_dict(config)).float()
    else:
        is_small = name.startswith("e")
        config["vision_config"] = {
            **cut, "model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8,
            "position_embedding_size": 256, "use_clipped_linears": is_small, "standardize": not is_small,
        }  # fmt: skip
        model = Gemma4ForConditionalGeneration(Gemma4Config.from_dict(config)).float()
    spread(tower_of(model), SEEDS[name])
    write(out, model, config, {**cut, "max_soft_tokens": SOFT_TOKENS}, WORDS["image"])


def gemma3(name: str, out: Path) -> None:
    link(out, "e2b-trained", ("tokenizer.json", "tokenizer_config.json", "generation_config.json"))
    tok = AutoTokenizer.from_pretrained(HERE.parent / "e2b-trained" / "target")
    S, G = "sliding_attention", "full_attention"
    ropes = {S: {"rope_type": "default", "rope_theta": 1e4}, G: {"rope_type": "default", "rope_theta": 1e6}}
    text = {
        "model_type": "gemma3_text", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "sliding_window": 24, "layer_types": [S, S, G] * 2, "query_pre_attn_scalar": 16,
        "max_position_embeddings": 4096,
        "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "rope_parameters": ropes,
    }  # fmt: skip
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 5, "num_attention_heads": 4, "image_size": 56, "patch_size": 7,
        "vision_use_head": False,
    }  # fmt: skip
    config = {
        "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "dtype": "bfloat16",
        "text_config": text, "vision_config": vision, "mm_tokens_per_image": 16, "eos_token_id": [1, 15],
    }  # fmt: skip
    config |= {f"{key}_token_index": tok.convert_tokens_to_ids(word) for key, word in WORDS.items()}
    model = Gemma3ForConditionalGeneration(Gemma3Config.from_dict(config)).float()
    language = {n: t for n, t in model.named_parameters() if "language_model" in n and "vision" not in n}
    spread(language, SEEDS[name])
    spread(tower_of(model), SEEDS[name] + 1)
    names = {n.replace("model.language_model.", "language_model.model."): t for n, t in language.items()}
    save_file(
        {n: t.bfloat16().contiguous() for n, t in names.items()}, out / "model.safetensors", {"format": "pt"}
    )
    write(out, model, config, {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}, WORDS["boi"])


def qwen(name: str, out: Path) -> None:
    """The text weights, with an MTP head, are those of the trained pair."""
    link(out, "trained/qwen", SHARED)
    pair = HERE.parent / "trained" / "qwen"
    config = json.loads((pair / "config.json").read_text())
    tok = AutoTokenizer.from_pretrained(pair)
    words = {"image": "image", "vision_start": "boi", "vision_end": "eoi"}
    config |= {f"{key}_token_id": tok.convert_tokens_to_ids(WORDS[word]) for key, word in words.items()}
    config["text_config"]["rope_parameters"] = {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 1], "mrope_interleaved": True,
    }  # fmt: skip
    config["vision_config"] = {
        "model_type": "qwen3_5_vision", "depth": 3, "hidden_size": 32, "intermediate_size": 48,
        "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "num_position_embeddings": 64,
        "out_hidden_size": config["text_config"]["hidden_size"],
    }  # fmt: skip
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config.from_dict(config)).float()
    spread(tower_of(model), SEEDS[name])
    processor = {
        "patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2, "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3, "size": {"shortest_edge": 16 * 64, "longest_edge": 64 * 64},
    }  # fmt: skip
    # Its texts have no turns: after one, the trained model stops at once.
    lines = [line for line in TEMPLATE.splitlines() if "turn" not in line]
    template = (
        "\n".join(lines).replace("{%- endfor -%}{%- endif -%}", "{%- endfor -%}{%- endif -%}{{- ' ' -}}")
        + "\n"
    )
    write(out, model, config, processor, WORDS["boi"] + WORDS["image"] + WORDS["eoi"], template)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variants", default=",".join(SEEDS))
    for name in parser.parse_args().variants.split(","):
        out = HERE / name
        out.mkdir(exist_ok=True)
        {"gemma3": gemma3, "qwen": qwen}.get(name, gemma4)(name, out)
        print(name, {file.name: file.stat().st_size for file in out.glob("*.safetensors")})


if __name__ == "__main__":
    main()
