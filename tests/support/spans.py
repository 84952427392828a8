"""Prompts with pictures for tiny targets, and what transformers says after them (`tests/golden/vision`)."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.checkpoint.config import read_checkpoint
from mlx_spec.drafters import DrafterSource, open_drafter
from mlx_spec.drafters.draft_model import VocabularySizes, draft_model_source
from mlx_spec.drafters.lookup import lookup_source
from mlx_spec.model.read import read_model
from mlx_spec.pair import Pair, PairInfo
from mlx_spec.policy import FixedPolicy
from mlx_spec.prompt import Prompt, Sight
from mlx_spec.tokenizer import Tokenizer, read_tokenizer
from mlx_spec.vision.pictures import read_picture
from mlx_spec.vision.vision import Picture, Vision, read_vision
from support.checkpoints import read
from support.drafting import GOLDEN, converted

ROOT = GOLDEN / "vision"
VARIANTS = ("e2b", "26b", "31b", "12b", "gemma3", "qwen")
VOCAB = 512
CASES = ("one.0", "other.0", "two.0", "later.0", "later.1", "later.2", "again.0", "again.1")


@dataclass(frozen=True)
class Golden:
    """A prompt whose rows have not been computed, and what follows it."""

    prompt: Prompt
    greedy: list[int]
    logits: mx.array  # [V] after the prompt


@cache
def facts(variant: str) -> tuple[dict[str, Any], dict[str, mx.array]]:
    return read(ROOT / variant, "golden.json"), mx.load(str(ROOT / variant / "golden.safetensors"))


def file(name: str) -> bytes:
    return (ROOT / f"{name}.png").read_bytes()


@cache
def picture(variant: str, name: str) -> Picture:
    return vision_of(variant).prepare(read_picture(file(name)))


def golden(variant: str, case: str) -> Golden:
    found, arrays = facts(variant)
    name, turn = case.split(".")
    told, vision = found[name][int(turn)], vision_of(variant)
    pictures = [picture(variant, each) for each in told["pictures"]]
    return Golden(vision.prompt(told["ids"], pictures), told["greedy"], arrays[f"logits.{case}"])


@cache
def vision_of(variant: str) -> Vision:
    vision = read_vision(read_checkpoint(ROOT / variant), tokenizer_of(variant))
    vision.load()
    vision._tower.set_dtype(mx.float32)
    return vision


def changed(
    variant: str,
    out: Path,
    rename: Callable[[str, mx.array], tuple[str, mx.array]] = lambda name, array: (name, array),
    more: Mapping[str, mx.array] | None = None,
    **config: Any,
) -> Path:
    """Copy a checkpoint. Its tower has other names and forms or `more` tensors, its config other values."""
    folder = Path(shutil.copytree(ROOT / variant, out / "copy", ignore=shutil.ignore_patterns("golden.*")))
    stored = mx.load(str(folder / "model-vision.safetensors"))
    tensors = dict(rename(name, array) for name, array in stored.items()) | dict(more or {})
    mx.save_safetensors(str(folder / "model-vision.safetensors"), tensors, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(read(folder) | config))
    return folder


def with_sight(variant: str, sight: Sight) -> Vision:
    vision = copy.copy(vision_of(variant))
    vision.sight = sight
    return vision


@cache
def tokenizer_of(variant: str) -> Tokenizer:
    return read_tokenizer(read_checkpoint(ROOT / variant))


@cache
def model_of(variant: str) -> nn.Module:
    model, _ = read_model(read_checkpoint(ROOT / variant))
    model.set_dtype(mx.float32)
    return model


@cache
def sources(variant: str, drafter: str) -> list[DrafterSource]:
    if drafter == "lookup":
        return [lookup_source()]
    if drafter == "text":  # a draft model that reads placeholders as tokens
        return [draft_model_source("text", model_of("e2b"), VocabularySizes(VOCAB, VOCAB))]
    if drafter == "assistant":
        pair = GOLDEN / f"{variant}-trained"
        source: Any = open_drafter(
            read_checkpoint(pair / "assistant"), read(pair / "assistant"), read(pair / "target")
        )
        source.network.set_dtype(mx.float32)
        return [source]
    if drafter == "mtp":  # the head inside the checkpoint
        with TemporaryDirectory() as out:
            converted(ROOT / variant, "auto", Path(out, "pair"))
            folder = Path(out, "pair", "drafter")
            source = open_drafter(read_checkpoint(folder), read(folder), read(ROOT / variant))
            mx.eval(source.network.parameters())
        return [source]
    return []


def pair_of(variant: str, drafter: str = "none", *, K: int = 3, **options: Any) -> Pair:
    """Return a pair that reads pictures."""
    drafters, facts = sources(variant, drafter), PairInfo(variant, drafter, VOCAB, None, 0, 0)
    given = (tokenizer_of(variant), model_of(variant), drafters, FixedPolicy(K if drafters else 0))
    return Pair(facts, *given, **{"vision": vision_of(variant)} | options)
