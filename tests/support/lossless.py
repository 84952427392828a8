"""The check everything hangs on: the same tokens as plain decoding by mlx-lm."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step

from mlx_spec.decode.loop import generate
from mlx_spec.model.target import LMTarget
from mlx_spec.policy import FixedPolicy
from mlx_spec.sampling import Sampling
from mlx_spec.types import (
    Decision,
    Draft,
    DraftChoice,
    Drafter,
    DraftLengthPolicy,
    Features,
    FeatureSpec,
    Reason,
    RequestDrafter,
    Round,
    Sampler,
)

GREEDY = Sampling()


class Scripted:
    """Drafts the truth and spoils every n-th in its middle, with the `wrong` tokens in turn if given."""

    def __init__(
        self,
        truth: Sequence[int],
        spoil: int = 0,
        needs: FeatureSpec | None = None,
        wrong: Sequence[int] = (),
    ) -> None:
        self.truth, self.spoil, self.needs = list(truth), spoil, needs or FeatureSpec()
        self.wrong = wrong
        self.seen: list[Features] = []
        self.histories: list[int] = []
        self.drafts = 0

    def observe(self, history: Sequence[int], features: Features) -> None:
        self.seen.append(features)
        self.histories.append(len(history))

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        tokens = self.truth[len(history) : len(history) + limit]
        self.drafts += 1
        if self.spoil and self.drafts % self.spoil == 0 and tokens:
            middle = len(tokens) // 2
            choices = self.wrong or [(tokens[middle] + 1) % 256]
            tokens[middle] = choices[self.drafts // self.spoil % len(choices)]
        return Draft(mx.array(tokens, dtype=mx.int32))


class Guided(Scripted):
    """Asks a drafter, and of three drafts gives its own, the truth, and the truth with a wrong token."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__([], 3, drafter.needs)
        self.drafter, self.observe, self.own = drafter, drafter.observe, 0

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        own, scripted = self.drafter.draft(history, limit, sampler), super().draft(history, limit, sampler)
        self.own += own.tokens.size
        return own if self.drafts % 3 == 1 and own.tokens.size else scripted


class Listed:
    """A policy that takes its decisions from a list, over and over, and keeps the rounds."""

    def __init__(self, *decisions: Decision) -> None:
        self.decisions = decisions
        self.rounds: list[Round] = []

    def begin(self, request_drafters: Sequence[RequestDrafter] = ()) -> None:
        pass

    def decide(self, history: Sequence[int]) -> Decision:
        return self.decisions[len(self.rounds) % len(self.decisions)]

    def observe(self, round: Round) -> None:
        self.rounds.append(round)

    def settle(self) -> None:
        pass


def lengths(*limits: int) -> Listed:
    """Draft with the first drafter up to these numbers of tokens in turn; 0 is a plain round."""
    return Listed(*(Decision((DraftChoice(0, K, "drafter"),) if K else (), Reason.PROBE) for K in limits))


def mlx_lm_greedy(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of mlx-lm's own loop with mlx-lm's own caches."""
    steps = generate_step(mx.array(prompt), model, max_tokens=count)
    return [int(token) for token, _ in itertools.islice(steps, count)]


def rounds(
    target: LMTarget,
    drafter: Drafter | Sequence[Drafter],
    K: int | DraftLengthPolicy,
    prompt: list[int],
    count: int,
    vocab: int = 256,
    sampling: Sampling = GREEDY,
    stop: Collection[int] = (),
    extras: Sequence[RequestDrafter] = (),
) -> list[Round]:
    """All rounds of a generation, greedy if nothing else is said."""
    drafters = drafter if isinstance(drafter, Sequence) else [drafter]
    policy = FixedPolicy(K) if isinstance(K, int) else K
    sampler = sampling.sampler(len(prompt), vocab)
    done = generate(
        target, drafters, policy, sampler, prompt, max_tokens=count, stop=stop, request_drafters=extras
    )
    return list(done)


def count_calls(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[tuple[str, int]]:
    """Return a list to which every call of these methods of targets is added, with its number of tokens."""
    calls: list[tuple[str, int]] = []

    def count(name: str) -> None:
        method = getattr(LMTarget, name)

        def counted(self: LMTarget, tokens: Any, *others: Any, **options: Any) -> Any:
            calls.append((name, len(tokens)))
            return method(self, tokens, *others, **options)

        monkeypatch.setattr(LMTarget, name, counted)

    for name in names:
        count(name)
    return calls


def emitted(done: Iterable[Round]) -> list[int]:
    """The tokens of all rounds."""
    return [token for round in done for token in round.tokens]


def texts(results: Iterable[tuple[int, Round | Exception]]) -> dict[int, list[int]]:
    """Return the tokens of each sequence of a batch, none of which may fail."""
    found: dict[int, list[int]] = {}
    for id, result in results:
        assert isinstance(result, Round), result
        found.setdefault(id, []).extend(result.tokens)
    return found


def plain(
    model: nn.Module,
    prompt: list[int],
    count: int,
    kv_bits: int | None = None,
    sampling: Sampling = GREEDY,
    stop: Collection[int] = (),
) -> list[int]:
    """Tokens of our engine without drafts, with fresh caches."""
    target = LMTarget(model, kv_bits=kv_bits)
    return emitted(rounds(target, (), 0, prompt, count, sampling=sampling, stop=stop))


def first_difference(a: list[int], b: list[int]) -> str:
    """Where two token lists part, for assertion messages."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"differ at {at}: {a[at : at + 3]} and {b[at : at + 3]}, lengths {len(a)} and {len(b)}"
