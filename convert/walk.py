"""How often drafters are right about a target, position by position.

A drafter is asked at every position of the target's own greedy continuation of built-in prompts, so that
several drafters, or one in several variants, are measured in one pass. The engine has no part in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_spec.convert.measure import Floats, difference
from mlx_spec.model.target import LMTarget
from mlx_spec.sampling import Greedy, LogitsProcessor, Sampling
from mlx_spec.types import Drafter, FeatureSpec, TargetParts

K = 3
GENERATED = 32  # tokens after each prompt
GREEDY = Sampling()


class Makes(Protocol):
    """What sequences share; makes a drafter for each of them."""

    @property
    def needs(self) -> FeatureSpec:
        """What its drafters read from the target."""
        ...

    def make(self, parts: TargetParts) -> Drafter:
        """The drafter of one sequence."""
        ...


@dataclass(frozen=True)
class Acceptance:
    """How often a drafter guessed what the target said."""

    positions: int  # where it drafted anything
    first: float  # share of positions whose next token it had right
    length: float  # tokens of a round with K draft tokens, the recovered or bonus token included


@dataclass(frozen=True)
class Walk:
    """The target's greedy continuations and the drafters that followed them."""

    continuations: list[list[int]]
    acceptances: list[Acceptance]  # by drafter
    differences: list[
        float
    ]  # by drafter: of its logits from the first one's, in standard deviations of those

    @property
    def chance(self) -> float:
        """What a drafter that always guesses the most common token would get right."""
        tokens = Counter(token for continuation in self.continuations for token in continuation)
        return max(tokens.values()) / tokens.total()


def walk(
    model: nn.Module,
    sources: Sequence[Makes],
    prompts: Sequence[list[int]],
    eos: Collection[int],
    *,
    vocab_size: int,
    limit: int = K,
) -> Walk:
    """Continue `prompts` greedily with `model` and ask each drafter for `limit` tokens at every position.

    The drafters must all need the same features.
    """
    setting = _Setting(frozenset(eos), vocab_size, limit)
    paths = [_path(model, sources, prompt, setting) for prompt in prompts]
    return Walk(
        [path.tokens for path in paths],
        [acceptance([(path.tokens, path.drafts[i]) for path in paths]) for i in range(len(sources))],
        [max(path.differences[i] for path in paths) for i in range(len(sources))],
    )


@dataclass(frozen=True)
class _Setting:
    """What all continuations of a walk share."""

    eos: frozenset[int]
    vocab_size: int
    limit: int


@dataclass(frozen=True)
class _Path:
    """One continuation."""

    tokens: list[int]
    drafts: list[list[list[int]]]  # by drafter and position: up to K tokens
    differences: list[float]  # by drafter


class _Watching(Greedy):
    """Draws greedily and remembers the logits of the first draft token."""

    def __init__(self, law: LogitsProcessor) -> None:
        super().__init__(law)
        self.first: mx.array | None = None

    def draw(
        self, logits: mx.array, history: Sequence[int], drafted: mx.array
    ) -> tuple[mx.array, mx.array | None]:
        """The most likely tokens."""
        self.first = logits if drafted.size == 0 else self.first
        return super().draw(logits, history, drafted)


def _path(model: nn.Module, sources: Sequence[Makes], prompt: list[int], setting: _Setting) -> _Path:
    target = LMTarget(model, sources[0].needs if sources else None)
    drafters = [source.make(target.parts) for source in sources]
    samplers = [_Watching(LogitsProcessor(GREEDY, len(prompt), setting.vocab_size)) for _ in sources]
    path = _Path([], [[] for _ in sources], [0.0 for _ in sources])
    history = list(prompt)
    if len(history) > 1:
        features = target.prefill(history[:-1])
        for drafter in drafters:
            drafter.observe(history, features)
    while len(path.tokens) < GENERATED and not setting.eos.intersection(path.tokens[-1:]):
        for i, (drafter, sampler) in enumerate(zip(drafters, samplers, strict=True)):
            path.drafts[i].append(_tokens(drafter.draft(history, setting.limit, sampler).tokens))
            path.differences[i] = max(path.differences[i], _distance(sampler, samplers[0]))
        token = _tokens(target.verify(mx.array(history[-1:])).argmax(axis=-1))
        features = target.commit(1)
        history += token
        path.tokens.extend(token)
        for drafter in drafters:
            drafter.observe(history, features)
    return path


def _tokens(array: mx.array) -> list[int]:
    return [int(token) for token in np.array(array)]


def _distance(sampler: _Watching, reference: _Watching) -> float:
    if sampler is reference or sampler.first is None or reference.first is None:
        return 0.0
    return difference(_row(sampler.first), _row(reference.first))


def _row(logits: mx.array) -> Floats:
    return np.array(logits.astype(mx.float32))


def acceptance(paths: Sequence[tuple[list[int], list[list[int]]]]) -> Acceptance:
    """From continuations and the drafts at each of their positions."""
    runs = [
        (_run(draft, tokens[i : i + K]), len(tokens) - i)
        for tokens, drafts in paths
        for i, draft in enumerate(drafts)
        if draft
    ]
    if not runs:
        return Acceptance(0, 0.0, 1.0)
    whole = [run for run, left in runs if left >= K] or [run for run, _ in runs]
    first = sum(run > 0 for run, _ in runs) / len(runs)
    return Acceptance(len(runs), first, 1 + sum(whole) / len(whole))


def _run(draft: Sequence[int], truth: Sequence[int]) -> int:
    """How many tokens of `draft` are right before the first that is not."""
    wrong = (i for i, (a, b) in enumerate(zip(draft, truth, strict=False)) if a != b)
    return next(wrong, min(len(draft), len(truth)))
