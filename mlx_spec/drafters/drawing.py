"""The base of all drafters, their loaded weights, and drafts that are drawn token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_spec.errors import InvalidValue
from mlx_spec.types import (
    CacheState,
    Draft,
    Drafter,
    DraftRequest,
    FeatureSpec,
    Sampler,
    TargetParts,
)


class SequenceDrafter:
    """Defaults for a drafter that has no caches and needs nothing that it cannot compute by itself."""

    @property
    def nbytes(self) -> int:
        return 0

    def missing(self, size: int) -> int:
        return 0

    def state(self) -> CacheState:
        """Return what its caches hold between two answers. Raises InvalidValue if that cannot be exact."""
        if self.nbytes:
            raise InvalidValue(f"the drafter {type(self).__name__} cannot save its caches")
        return CacheState()

    def restore(self, state: CacheState) -> None:
        """Take over a state of the same drafter; this one is new."""

    def draft_batch(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return the drafts of several sequences, one after the other."""
        return [r.drafter.draft(r.history, r.limit, r.sampler) for r in requests]


@dataclass(frozen=True, eq=False)
class DrafterSource:
    """The loaded weights of one drafter. Sequences share them; each gets a drafter of its own."""

    name: str  # the family, for the user
    needs: FeatureSpec  # what its drafters read from the target
    vocab_size: int | None  # number of token ids it knows, padding included; None if it knows any
    make: Callable[[TargetParts], Drafter]  # returns the drafter of one sequence
    network: Any = None  # its nn.Module; None without weights
    gains: Callable[[], Sequence[float]] | None = None  # see `policy`; None if it learns them by itself
    drafts_trees: bool = False
    trees: DrafterSource | None = None  # the same weights, drafting trees; None for other families
    folder: Path | None = None  # of its checkpoint, if it has one


class DraftBuilder:
    """Draws one token after the other and collects them with their distributions.

    The device begins with a token while the host prepares the next one; the host never waits.
    """

    def __init__(self, history: Sequence[int], sampler: Sampler) -> None:
        self._history = history
        self._sampler = sampler
        self._tokens = mx.array([], dtype=mx.int32)
        self._probs: list[mx.array] = []

    def draw(self, logits: mx.array) -> mx.array:
        """Draw the next token from logits [1, V] and return it, [1] int32."""
        token, probs = self._sampler.draw(logits, self._history, self._tokens)
        mx.async_eval(token)
        self._tokens = mx.concatenate([self._tokens, token])
        if probs is not None:
            self._probs.append(probs)
        return token

    def draft(self) -> Draft:
        """Return all tokens drawn so far."""
        return Draft(self._tokens, mx.concatenate(self._probs) if self._probs else None)


def draw_rows(logits: mx.array, history: Sequence[int], sampler: Sampler) -> Draft:
    """Draw one token from each row of logits [K, V] that one pass produced.

    The rows do not see each other's tokens. They are drawn in turn because a sampler's penalties depend on
    the tokens before.
    """
    builder = DraftBuilder(history, sampler)
    for j in range(logits.shape[0]):
        builder.draw(logits[j : j + 1])
    return builder.draft()
