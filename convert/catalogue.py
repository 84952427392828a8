"""Published checkpoints, as data: short names to pull them by, and which drafter was made for which target.

Sources: the repositories' own pages and config.json files as public code and issues cite them, read in 2026;
shapes of the Gemma 4 family from its conversion script in transformers. mlx-community holds targets quantized
by mlx-lm. What is not in here can be given as owner/name.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from mlx_spec.errors import NotFound
from mlx_spec.known import DRAFTERS, drafter_of


@dataclass(frozen=True)
class Shape:
    """What a drafter needs of its target, or what a target has. None: does not matter, or is not known."""

    hidden_size: int | None = None
    vocab_size: int | None = None
    layers: int | None = None
    window: int | None = None
    kv_heads: int | None = None  # of sliding layers, or of all
    head_dim: int | None = None
    global_kv_heads: int | None = None  # of full layers
    global_head_dim: int | None = None


@dataclass(frozen=True)
class Model:
    """A target in several precisions, and its drafter."""

    drafter: str
    targets: Mapping[str, str]  # precision -> repository; the first is what the bare alias means


@dataclass(frozen=True)
class Ready:
    """Two repositories that go together."""

    target: str
    drafter: str | None


def _gemma(official: str, community: str) -> Model:
    return Model(
        f"google/{official}-assistant",
        {
            "4bit": f"mlx-community/{community}-4bit",
            "8bit": f"mlx-community/{community}-8bit",
            "bf16": f"google/{official}",
        },
    )


def _qwen3(size: str) -> Model:
    """A dense target with a small one of its kind as draft model: they share the tokenizer."""
    targets = {bits: f"mlx-community/Qwen3-{size}-{bits}" for bits in ("4bit", "8bit")}
    return Model("mlx-community/Qwen3-0.6B-4bit", targets)


ALIASES: dict[str, Model] = {
    "gemma-4-e2b": _gemma("gemma-4-E2B-it", "gemma-4-e2b-it"),
    "gemma-4-e4b": _gemma("gemma-4-E4B-it", "gemma-4-e4b-it"),
    "gemma-4-12b": _gemma("gemma-4-12B-it", "gemma-4-12B-it"),
    "gemma-4-26b-a4b": _gemma("gemma-4-26B-A4B-it", "gemma-4-26b-a4b-it"),
    "gemma-4-31b": _gemma("gemma-4-31B-it", "gemma-4-31b-it"),
    "qwen3-8b": _qwen3("8B"),
    "qwen3-14b": _qwen3("14B"),
    "qwen3-32b": _qwen3("32B"),
}

# Base name of a target, as in `known.DRAFTERS` -> its shape.
SHAPES: dict[str, Shape] = {
    "gemma-4-e2b-it": Shape(1536, 262144, 35, 512, 1, 256, 1, 512),
    "gemma-4-e4b-it": Shape(2560, 262144, 42, 512, 2, 256, 2, 512),
    "gemma-4-12b-it": Shape(3840, 262144, 48, 1024, 8, 256, 1, 512),
    "gemma-4-26b-a4b-it": Shape(2816, 262144, 30, 1024, 8, 256, 2, 512),
    "gemma-4-31b-it": Shape(5376, 262144, 60, 1024, 16, 256, 4, 512),
}

# Repository of a drafter -> that of the target it was trained for.
MADE_FOR: dict[str, str] = {
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


def aliases() -> dict[str, Ready]:
    """Every short name, precisions included."""
    return {
        name: Ready(target, model.drafter)
        for alias, model in ALIASES.items()
        for name, target in _variants(alias, model)
    }


def ready(alias: str) -> Ready | None:
    """The pair that an alias stands for, None for an unknown one."""
    return aliases().get(alias.lower().replace(":", "-").replace("-it-", "-").removesuffix("-it"))


def resolve(name: str) -> Ready:
    """The pair that an alias or a repository stands for; `-it` and `:8bit` may be written.

    Raises NotFound for an alias that is not known, with those that look like it.
    """
    if name.count("/") == 1:
        return Ready(name, drafter_for(name))
    found = ready(name)
    if found is not None:
        return found
    close = difflib.get_close_matches(name.lower(), aliases(), n=3) or sorted(ALIASES)
    raise NotFound(
        f"{name} is no known model: there are {', '.join(close)}, and any repository given as owner/name"
    )


def drafter_for(repository: str) -> str | None:
    """The drafter of a target repository: the one that `load` takes by itself, or the one of an alias."""
    own = drafter_of(repository)
    if own is not None:
        return own
    pairs = (pair for pair in aliases().values() if pair.target.lower() == repository.lower())
    return next((pair.drafter for pair in pairs), None)


def _variants(alias: str, model: Model) -> list[tuple[str, str]]:
    first = next(iter(model.targets.values()))
    return [(alias, first), *((f"{alias}-{bits}", target) for bits, target in model.targets.items())]
