"""Targets that have read a text, and what they say beside a target that read it at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.model.target import LMTarget
from mlx_spec.types import Features, FeatureSpec


class Foreign(nn.Module):
    """A model with caches of its own."""

    def __init__(self, *caches: object) -> None:
        super().__init__()
        self.caches = caches

    def make_cache(self) -> list[object]:
        return list(self.caches)


def read(
    model: nn.Module, tokens: Sequence[int], needs: FeatureSpec | None = None, **options: Any
) -> LMTarget:
    """Return a new target that holds these tokens."""
    target = LMTarget(model, needs, **options)
    if tokens:
        target.prefill(tokens)
    return target


def write(target: LMTarget, tokens: Sequence[int], keep: int | None = None) -> Features:
    """Verify tokens and commit the first `keep`, all by default."""
    mx.eval(target.verify(mx.array(tokens)))
    return target.commit(len(tokens) if keep is None else keep)


def assert_same_logits(target: LMTarget, fresh: LMTarget, token: int) -> None:
    """Compare the logits after `token`, which neither of the two keeps."""
    got, expected = (each.verify(mx.array([token])) for each in (target, fresh))
    assert mx.abs(got - expected).max().item() < 2e-3 * mx.abs(expected).max().item()
    for each in (target, fresh):
        each.commit(0)


def assert_goes_on(
    target: LMTarget, model: nn.Module, text: Sequence[int], rest: Sequence[int], **options: Any
) -> None:
    """Let a target that should hold `text` read `rest`, and compare it with a new one that reads both."""
    assert target.size == len(text)
    if rest[:-1]:
        target.prefill(rest[:-1], ends_prompt=False)
    assert_same_logits(target, read(model, [*text, *rest[:-1]], **options), rest[-1])
