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


def logits_after(target: LMTarget, token: int) -> mx.array:
    """Return the logits after `token`, which the target does not keep."""
    logits = target.verify(mx.array([token]))
    mx.eval(logits)
    target.commit(0)
    return logits


def assert_same_logits(target: LMTarget, expected: mx.array, token: int) -> None:
    """Compare the logits after `token`, which the target does not keep."""
    got = logits_after(target, token)
    assert mx.abs(got - expected).max().item() < 2e-3 * mx.abs(expected).max().item()


# What new targets say, by model, bits of K/V and text. With its model, whose id is not given to another one.
_expected: dict[tuple[int, int | None, tuple[int, ...]], tuple[nn.Module, mx.array]] = {}


def assert_goes_on(
    target: LMTarget,
    model: nn.Module,
    text: Sequence[int],
    rest: Sequence[int],
    kv_bits: int | None = None,
) -> None:
    """Let a target that should hold `text` read `rest`, and compare it with a new one that reads both."""
    assert target.size == len(text)
    if rest[:-1]:
        target.prefill(rest[:-1], ends_prompt=False)
    key = id(model), kv_bits, (*text, *rest)
    if key not in _expected:
        fresh = read(model, key[2][:-1], kv_bits=kv_bits)
        _expected[key] = model, logits_after(fresh, rest[-1])
    assert_same_logits(target, _expected[key][1], rest[-1])
