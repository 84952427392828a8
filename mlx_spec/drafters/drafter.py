"""The base of all drafters, their loaded weights, and drafts that are drawn token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_spec.checkpoint.config import Checkpoint
from mlx_spec.policy.ahead_costs import AheadCosts
from mlx_spec.types import (
    CacheState,
    Copy,
    Draft,
    Drafter,
    DraftingSampler,
    EarlierTexts,
    Features,
    FeatureSpec,
    Sampler,
    TargetParts,
)


class DrafterWrapper(Drafter):
    """Passes calls that it does not override on to another drafter."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.needs = inner, inner.needs

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    def missing(self, size: int) -> int:
        return self.inner.missing(size)

    def state(self) -> CacheState:
        return self.inner.state()

    def restore(self, state: CacheState) -> None:
        self.inner.restore(state)

    def follow(self, origin: Drafter) -> list[Copy]:
        assert isinstance(origin, DrafterWrapper)
        return self.inner.follow(origin.inner)

    def copy_from(self, earlier: EarlierTexts | None) -> None:
        self.inner.copy_from(earlier)

    def observe(self, history: Sequence[int], features: Features) -> None:
        self.inner.observe(history, features)

    def prepare(self, history: Sequence[int], draft: Draft, sampler: DraftingSampler) -> None:
        self.inner.prepare(history, draft, sampler)


@dataclass(frozen=True, eq=False)
class DrafterSource:
    """The loaded weights of one drafter. Sequences share them; each gets its own drafter.

    `remake` is set exactly if `network` is a language model: drafting ahead copies it, dense, for a second
    thread, and refuses a recurrent one. Other families leave it None. Their drafters of both threads share
    `network`, such as a table, so they only read it. Those that keep nothing in a module have none.
    """

    name: str  # the family's name in JSON, which programs translate for users
    needs: FeatureSpec  # what its drafters read from the target
    make: Callable[[TargetParts], Drafter]  # returns the drafter of one sequence
    network: Any = None  # its nn.Module, of whatever kind; None without one
    # Returns the expected accepted tokens that each further draft token adds; None if the policy learns them.
    reach: Callable[[], Sequence[float]] | None = None
    drafts_trees: bool = False
    trees: DrafterSource | None = None  # the same weights, drafting trees; None for other families
    checkpoint: Checkpoint | None = None  # if it has one
    remake: Callable[[Any], DrafterSource] | None = None  # returns a source with another copy of `network`
    ahead_costs: AheadCosts | None = None  # costs of its rounds, if its drafters work while a pass runs
    drafts_together: bool = False  # one pass drafts for several sequences
    proposals: tuple[str, ...] = ()  # names of its drafters' proposals; empty if the only one has its name

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of its proposals to a policy."""
        return self.proposals or (self.name,)


class DraftBuilder:
    """Draws one token after the other and collects them with their distributions.

    The device begins with a token while the host prepares the next one; the host never waits. `guess` are
    tokens that are assumed to follow the history.
    """

    def __init__(self, history: Sequence[int], sampler: Sampler, guess: Sequence[int] = ()) -> None:
        self._history = history
        self._sampler = sampler
        self._start = len(guess)
        self._tokens = mx.array(list(guess), dtype=mx.int32)
        self._probs: list[mx.array] = []

    def draw(self, logits: mx.array, *, begin: bool = True) -> mx.array:
        """Draw the next token from logits [1, V] and return it, [1] int32. With `begin` the device begins."""
        token, probs = self._sampler.draw(logits, self._history, self._tokens)
        if begin:
            mx.async_eval(token)
        self._tokens = mx.concatenate([self._tokens, token])
        if probs is not None:
            self._probs.append(probs)
        return token

    def draft(self) -> Draft:
        return Draft(self._tokens[self._start :], mx.concatenate(self._probs) if self._probs else None)


def draw_rows(logits: mx.array, history: Sequence[int], sampler: Sampler, guess: Sequence[int] = ()) -> Draft:
    """Draw one token from each row of logits [K, V] that one pass produced.

    The rows do not see each other's tokens. They are drawn in turn because a sampler's penalties depend on
    the tokens before.
    """
    builder = DraftBuilder(history, sampler, guess)
    for j in range(logits.shape[0]):
        builder.draw(logits[j : j + 1])
    return builder.draft()
