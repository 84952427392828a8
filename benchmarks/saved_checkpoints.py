"""Is a checkpoint that transformers saved read right? Greedy text of tiny models of each type, on both sides.

transformers makes each model from a tiny config, with random weights in float32, and saves it by
`save_pretrained`. It decodes without a cache. mlx_spec loads the folder as users do: without drafts, with
lookup and three draft tokens a round, and again after `mlx-spec convert -q none`. Weights are drawn again
until the text of transformers has several different tokens. A text that differs is compared to mlx-lm's text:
if these two are equal, mlx-lm differs. A model that cannot be loaded is shown with the reason.

Needs transformers and torch. `--types` chooses, `--keep FOLDER` keeps the checkpoints.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import transformers
from mlx_lm.generate import generate_step
from timing import finish, parser, table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

import mlx_spec
from mlx_spec.checkpoint.config import read_checkpoint
from mlx_spec.cli.progress import StageProgress
from mlx_spec.convert.convert import convert
from mlx_spec.convert.options import ConversionOptions
from mlx_spec.errors import SpecError

VOCABULARY = 300
END = (2, 256)  # tokens at which both sides stop: of config.json and of the tokenizer
PROMPTS = ([5, 9, 17, 3, 88, 41, 5, 9, 17, 3, 88], [(i * 7) % 40 + 4 for i in range(45)])
TOKENS, DRAFTS = 20, 3
VARIED = 5  # different tokens that a text should have
TINY: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "max_position_embeddings": 512},
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16, "attention_window_size": 16},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    **{"moe_shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    **{"first_k_dense_replace": 1, "shared_intermediate_size": 48, "intermediate_size_mlp": 96},
    **{
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    **{"state_size": 8, "conv_kernel": 4, "expand": 2, "time_step_rank": 4, "n_groups": 1, "chunk_size": 16},
    **{
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
    },
    **{"mamba_expand": 2, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_dt_rank": 4, "mamba_n_groups": 1},
    **{"mamba_chunk_size": 16, "mamba_d_ssm": 128, "lru_width": 64, "linear_conv_kernel_dim": 4},
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16},
    **{"linear_value_head_dim": 16, "hidden_size_per_layer_input": 8, "query_pre_attn_scalar": 16},
    **{"num_kv_shared_layers": 0, "global_head_dim": 32, "ffn_hidden_size": 96},
    **{"d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": 512, "rotary_dim": 16},
    **{"attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
VISION: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "depth": 2, "num_heads": 2},
    **{
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "image_size": 28,
        "patch_size": 14,
    },
    **{
        "out_hidden_size": 64,
        "embed_dim": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
}
WHOLE = {"sliding_window": None}  # mlx-lm knows no window of these types
TIED, OWN = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
LATENT = {"head_dim": 8, "num_key_value_heads": 4}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
DBRX = {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}}
DBRX |= {"ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2}}
# Model type, and what stands after a comma, -> what its config has beside TINY. "text" is its language model.
TYPES: dict[str, dict[str, Any]] = {
    name: {}
    for name in (
        "afmoe apertus bitnet cohere cohere2 dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon_h1 "
        "falcon_mamba gemma gemma2 gemma4 gemma4_text gemma4_unified glm glm4 glm4_moe gpt2 gpt_oss granite "
        "granitemoe helium hunyuan_v1_dense internlm3 iquestcoder laguna llama llama4 llama4_text llava "
        "mamba mellum mimo_v2_flash minimax minimax_m2 muse_glimmer nanochat nemotron nemotron_h olmo "
        "olmo2 olmo3 olmoe phi qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_5_text qwen3_5_moe_text "
        "qwen3_moe qwen3_next qwen3_vl seed_oss smollm3 solar_open stablelm gptj"
    ).split()
}
TYPES |= {name: WHOLE for name in ("ministral3", "mistral", "mixtral", "phi3", "starcoder2")}
TYPES |= {
    name: LATENT for name in ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "minicpm3")
}
TYPES |= {name: {"text": MROPE} for name in ("qwen2_vl", "qwen2_5_vl")}
TYPES |= {f"{name}, tied": TIED for name in ("phi", "glm4", "stablelm", "llama", "seed_oss")}
TYPES |= {f"{name}, tied": {**TIED, "text": TIED} for name in ("qwen3_vl", "qwen3_5")}
TYPES |= {f"{name}, untied": OWN for name in ("cohere", "cohere2", "gemma")}
TYPES |= {
    "dbrx": DBRX,
    "gemma2, whole": {"sliding_window": 512},
    "gemma2, untied": {"sliding_window": 512, **OWN},
    "gemma3": {"text": {"num_hidden_layers": 6}},
    "gemma3_text": {"num_hidden_layers": 6},
    "gemma3n_text": {"num_hidden_layers": 5},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "gpt_neox": {"intermediate_size": 256},
    "gpt_neox, tied": {"intermediate_size": 256, **TIED},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {
        f"{kind}_layer_{key}": n for kind in ("attn", "expert") for key, n in (("period", 2), ("offset", 1))
    },
    "kimi_k25": {"text": LATENT},
    "kimi_linear": {
        **{"num_key_value_heads": 4, "q_lora_rank": None, "linear_num_heads": 4, "linear_head_dim": 16},
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "lfm2": CONVOLUTIONS,
    "lfm2, untied": {**CONVOLUTIONS, **OWN},
    "lfm2_moe": CONVOLUTIONS,
    "llama, linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "llama, llama3": {"rope_parameters": LLAMA3},
    "llama, yarn": {"rope_parameters": YARN},
    "qwen3, yarn": {"rope_parameters": YARN},
    "mamba2": {"num_heads": 8},
    "mistral3": {"text": WHOLE},
    "mistral3, tied": {**TIED, "text": {**WHOLE, **TIED}},
    "olmo_hybrid": {"linear_value_head_dim": 8},  # transformers saves wrong convolutions for unequal widths
    "phimoe": {"attention_bias": True, "lm_head_bias": True, **WHOLE},
    "qwen3_vl_moe": {"text": {"moe_intermediate_size": 48}},
    "qwen3_vl_moe, tied": {**TIED, "text": {"moe_intermediate_size": 48, **TIED}},
    "recurrent_gemma": {"num_key_value_heads": 1},
}
QUICK = ("llama", "qwen3_vl, tied")
EQUAL, OF_MLX_LM, WRONG, REFUSED, UNMADE = "equal", "mlx-lm differs", "DIFFERS", "refused", "not made"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--types", nargs="+", choices=sorted(TYPES), metavar="TYPE")
    options.add_argument("--keep", type=Path, help="a folder for the checkpoints")
    settings = options.parse_args()
    import torch

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    mx.set_default_device(mx.cpu)
    started, found = time.time(), {}
    with tempfile.TemporaryDirectory() as place:
        root = settings.keep or Path(place)
        for name in sorted(settings.types or (QUICK if settings.quick else TYPES)):
            found[name] = one(name, root / name.replace(", ", "-"), settings.seed)
            print(name, *found[name].values(), sep=" | ", file=sys.stderr, flush=True)
    report(found)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    finish("saved_checkpoints", {"types": found, "versions": versions}, settings, started)


def one(name: str, folder: Path, seed: int) -> dict[str, str]:
    """Return the results of one type: plain, with drafts, converted, and the reason."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    result = dict.fromkeys(("plain", "drafts", "converted", "why"), "")
    try:
        expected = save(name, folder, seed)
    except Exception as error:  # of transformers, whose classes have no common one
        return result | {"plain": UNMADE, "why": brief(error, folder)}
    try:
        plain = texts(folder, "none", None)
        result["plain"] = verdict(plain, expected, folder)
        result["drafts"] = verdict(texts(folder, "lookup", DRAFTS), plain)
        out = folder / "pair"
        options = ConversionOptions(
            str(folder), out, drafter="none", quantization="none", drafter_bits="none"
        )
        convert(options, StageProgress(io.StringIO()))
        result["converted"] = verdict(texts(out / "target", "none", None), plain)
    except SpecError as error:
        step = next((key for key, value in result.items() if not value), "why")
        result |= {step: REFUSED, "why": brief(error, folder)}
    return result


def save(name: str, folder: Path, seed: int) -> list[list[int]]:
    """Write a checkpoint by transformers. Return its greedy texts."""
    import torch

    best: list[list[int]] = []
    for attempt in range(seed, seed + 6):
        torch.manual_seed(attempt)
        config = config_of(name.partition(",")[0], TYPES[name])
        try:
            model = AutoModelForCausalLM.from_config(config)
        except ValueError:
            model = AutoModelForImageTextToText.from_config(config)
        model = model.float().eval()
        spread(model)
        found = [greedy(model, prompt) for prompt in PROMPTS]
        if not best or variety(found) > variety(best):
            best = found
            model.save_pretrained(folder)
        if variety(best) >= VARIED:
            break
    byte_level = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(byte_level)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    return best


def config_of(kind: str, extra: dict[str, Any]) -> Any:
    """Return a tiny config of transformers: of the class, and of the parts of a composite one."""
    cls = CONFIG_MAPPING[kind]
    top = {key: value for key, value in extra.items() if key != "text"}
    parts = cls.sub_configs or {}
    if "text_config" not in parts:
        return cls(**{**fitting(cls, TINY), **top})
    default = cls()
    for key in parts:
        if (part := getattr(default, key, None)) is not None:
            own = {**fitting(type(part), TINY), **extra.get("text", {})}
            sizes = own if key == "text_config" else fitting(type(part), VISION)
            top[key] = type(part)(**sizes).to_dict()
    return cls(**top)


def fitting(cls: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of `sizes` that a class of configs knows."""
    known = {*cls().to_dict(), *cls.attribute_map}
    if cls.model_type in ("gpt_bigcode", "recurrent_gemma"):
        known.discard("num_key_value_heads")
    return {key: value for key, value in sizes.items() if key in known}


def spread(model: Any) -> None:
    """Draw weights so large that the text depends on all of them."""
    import torch

    configs = model.config.to_dict(), model.config.get_text_config().to_dict()
    tied = any(config.get("tie_word_embeddings") for config in configs)
    with torch.no_grad():
        for name, array in model.named_parameters():
            if array.ndim >= 2:
                is_table = any(part in name for part in ("embed", "wte"))
                array.normal_(0, (0.05 if tied else 0.5) if is_table else 1.2 / array.shape[-1] ** 0.5)
            elif not name.endswith(("A_log", "dt_bias", "D", "a_param")):
                array.add_(torch.randn_like(array) * 0.1)


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """Return the text of transformers, which reads everything again for each token."""
    import torch

    ids = list(prompt)
    with torch.no_grad():
        while len(ids) < len(prompt) + TOKENS and not (len(ids) > len(prompt) and ids[-1] in END):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def texts(folder: Path, drafter: str, num_draft_tokens: int | None) -> list[list[int]]:
    """Return the texts of mlx_spec."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        pair = mlx_spec.load(folder, drafter, num_draft_tokens=num_draft_tokens)
        rounds = [list(pair.generate(prompt, max_tokens=TOKENS)) for prompt in PROMPTS]
    return [[token for round in each for token in round.tokens] for each in rounds]


def verdict(found: list[list[int]], expected: list[list[int]], folder: Path | None = None) -> str:
    """Compare texts. A difference is mlx-lm's own if its text is the same as `found`."""
    if found == expected:
        return EQUAL
    return OF_MLX_LM if folder is not None and found == of_mlx_lm(folder) else WRONG


def of_mlx_lm(folder: Path) -> list[list[int]]:
    """Return the texts of mlx-lm's own classes and loop, with config.json repaired."""
    try:
        model, _ = mlx_lm.utils.load_model(folder, model_config=read_checkpoint(folder).changes)
    except Exception:  # it cannot load tensors as transformers 5 names them
        return []
    result = []
    for prompt in PROMPTS:
        tokens: list[int] = []
        for token, _ in generate_step(mx.array(prompt), model, max_tokens=TOKENS):
            tokens.append(int(token))
            if tokens[-1] in END:
                break
        result.append(tokens)
    return result


def variety(found: list[list[int]]) -> int:
    return min(len(set(text)) for text in found)


def brief(error: Exception, folder: Path) -> str:
    return " ".join(f"{error}".replace(str(folder), "it").split())[:120] or type(error).__name__


def report(found: dict[str, dict[str, str]]) -> None:
    table(
        ["type", "plain", "drafts", "converted", "why"],
        [[name, *row.values()] for name, row in found.items()],
    )
    rows = []
    for column in ("plain", "drafts", "converted"):
        counts = Counter(row[column] for row in found.values())
        rows.append([column, *(counts[key] for key in (EQUAL, OF_MLX_LM, WRONG, REFUSED, UNMADE))])
    table(["text", EQUAL, OF_MLX_LM, WRONG, REFUSED, UNMADE], rows)


if __name__ == "__main__":
    main()
