"""Make tiny Gemma 4 target + assistant pairs in the Hugging Face format.

python tests/golden/make_tiny.py --out tests/golden              # random weights
python tests/golden/make_tiny.py --out tests/golden --trained    # fitted, as <variant>-trained
"""

import argparse
import json
import math
import shutil
from pathlib import Path

import torch
from tokenizer import make_tokenizer
from torch import nn
from train import distil_drafter, fit_target
from transformers import (
    Gemma4AssistantForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedAssistantForCausalLM,
    Gemma4UnifiedForConditionalGeneration,
    GenerationConfig,
    PreTrainedTokenizerFast,
)
from variants import VARIANTS, Spec, assistant_config, target_config, text_values

# The one assistant folder that keeps its tokenizer, as all published ones do; elsewhere the target's will do.
COMPLETE = "e2b-trained"


def build(spec: Spec, seed: int) -> tuple[nn.Module, nn.Module]:
    if spec["unified"]:
        classes = Gemma4UnifiedForConditionalGeneration, Gemma4UnifiedAssistantForCausalLM
    else:
        classes = Gemma4ForConditionalGeneration, Gemma4AssistantForCausalLM
    target, assistant = classes[0](target_config(spec)), classes[1](assistant_config(spec))
    randomize(target.float().eval(), seed)
    randomize(assistant.float().eval(), seed + 1)
    return target, assistant


@torch.no_grad()
def randomize(model: nn.Module, seed: int) -> None:
    """Well-spread values everywhere: a forgotten scale or norm shows, and greedy margins are wide."""
    gen = torch.Generator().manual_seed(seed)
    tensors = dict(model.named_parameters())
    tensors |= {n: b for n, b in model.named_buffers() if n.endswith(("layer_scalar", "token_ordering"))}
    for name in sorted(tensors):
        t = tensors[name]
        mean, std = spread(name, t)
        if name.endswith("token_ordering"):
            t.copy_(torch.randperm(t.numel(), generator=gen))
        elif name.endswith("layer_scalar"):
            t.copy_(0.6 + 0.5 * torch.rand(t.shape, generator=gen))
        else:
            t.copy_(mean + std * torch.randn(t.shape, generator=gen))
        if name in ("model.norm.weight", "model.language_model.norm.weight"):
            # With tied embeddings and a positive final norm every model would just repeat its input.
            t.mul_(torch.sign(torch.randn(t.shape, generator=gen)))
    model.tie_weights()


def spread(name: str, t: torch.Tensor) -> tuple[float, float]:
    """Mean and standard deviation."""
    if "embed_tokens" in name or name == "lm_head.weight":
        return 0.0, 0.35
    if t.ndim >= 2:
        return 0.0, 1 / math.sqrt(t.shape[-1])
    if name.endswith("router.scale"):
        return 1.0, 0.3
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return 0.9, 0.15
    return 1.0, 0.15


def save(
    target: nn.Module, assistant: nn.Module, tok: PreTrainedTokenizerFast, root: Path, spec: Spec
) -> None:
    stop = [1, tok.convert_tokens_to_ids("<turn|>")]
    # As published: the generation config adds <|tool_response>, where the model hands over to a tool.
    stop_generation = [*stop, tok.convert_tokens_to_ids("<|tool_response>")]
    ids = dict(bos_token_id=2, pad_token_id=0)
    target.generation_config = GenerationConfig(
        eos_token_id=stop_generation, do_sample=True, temperature=1.0, top_k=64, top_p=0.95, **ids
    )
    assistant.generation_config = GenerationConfig(
        eos_token_id=stop, num_assistant_tokens=3, num_assistant_tokens_schedule="constant", **ids
    )
    for name, model in (("target", target), ("assistant", assistant)):
        folder = root / name
        shutil.rmtree(folder, ignore_errors=True)
        model.config.eos_token_id = stop
        model.to(torch.bfloat16).save_pretrained(folder)
        write_published_keys(folder / "config.json", text_values(spec))
        if name == "target" or root.name == COMPLETE:
            tok.save_pretrained(folder)


def write_published_keys(path: Path, values: Spec) -> None:
    """Rewrite ``text_config`` to the keys of the published checkpoints, the ones that mlx-lm reads.

    Recent transformers write a ``per_layer_config`` instead of the global head dimension and KV heads.
    """
    config = json.loads(path.read_text())
    text = config["text_config"]
    text.pop("per_layer_config", None)
    text["global_head_dim"] = values["global_head_dim"]
    text["num_global_key_value_heads"] = values["num_global_key_value_heads"]
    # The unified classes leave these out, and mlx-lm's defaults are those of E2B.
    defaults = dict(hidden_size_per_layer_input=0, num_kv_shared_layers=0, use_double_wide_mlp=False)
    for key, default in defaults.items():
        text.setdefault(key, values.get(key, default))
    if "backbone_hidden_size" not in config:
        # mlx-lm takes the top-level value, and 262144 if there is none.
        config["vocab_size"] = values["vocab_size"]
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("tests/golden"))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--trained", action="store_true")
    parser.add_argument("--target-steps", type=int, default=400)
    parser.add_argument("--assistant-steps", type=int, default=250)
    parser.add_argument("--seed", type=int, help="instead of the variant's own")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tok = make_tokenizer()
    for name in args.variants.split(","):
        spec = VARIANTS[name]
        seed = args.seed or spec["trained_seed" if args.trained else "seed"]
        target, assistant = build(spec, seed)
        if args.trained:
            print(name, "seed", seed, flush=True)
            fit_target(target, tok, args.target_steps, seed)
            distil_drafter(assistant, target, tok, args.assistant_steps, seed + 5)
        root = args.out / (f"{name}-trained" if args.trained else name)
        save(target, assistant, tok, root, spec)


if __name__ == "__main__":
    main()
