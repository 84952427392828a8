"""Requests for drafts ahead, and the copies of a drafter that serve them, here or on another machine."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Protocol

import mlx.core as mx

from mlx_spec.drafters.draft_model import Branches, DraftModel, Outcome
from mlx_spec.drafters.drawing import SequenceDrafter
from mlx_spec.grammar import read_tokens
from mlx_spec.types import Draft, DraftingSampler, no_draft


@dataclass(eq=False)
class AheadRequest:
    """A request for drafts after the likely outcomes of a draft that is being verified."""

    history: list[int]
    draft: Draft  # the draft that is verified after `history`
    limit: int  # of each draft
    guesses: Sequence[int]  # [K + 1] how many next tokens to guess, by the number of accepted tokens
    sampler: DraftingSampler  # has counted no tokens
    branches: Future[Branches] = field(default_factory=Future)  # cancelled once no draft waits for it

    @property
    def is_cancelled(self) -> bool:
        """Return True if no draft waits for these drafts."""
        return self.branches.cancelled()

    @cached_property
    def drafted(self) -> list[int]:
        """Return the tokens of the draft. Waits for the drafter."""
        return read_tokens(self.draft.tokens)

    def outcomes(self, logits: mx.array) -> list[Outcome]:
        """Return the likely outcomes by the drafter's logits [K + 1, V] after each prefix of its draft.

        Only the logits choose them, never tokens that are drawn for them. So the distribution of a draft does
        not depend on the choice of outcomes. Waits for the logits.
        """
        count = min(max(self.guesses) + 1, logits.shape[1])
        ranked = self.sampler.rank(logits, self.history, self.draft.tokens, count)
        tokens, found = iter(read_tokens(ranked.flatten())), list[Outcome]()
        for k, guesses in enumerate(self.guesses):
            # Without the next draft token, which would count as accepted.
            others = [t for t in islice(tokens, count) if [t] != self.drafted[k : k + 1]]
            found += [(*self.drafted[:k], token) for token in others[:guesses]]
        return found

    def outcome(self, history: Sequence[int]) -> Outcome | None:
        """Return the outcome that led to `history`, after verification; None if it is another text."""
        start = len(self.history)
        outcome = tuple(history[start:])
        accepted = list(outcome[:-1])
        follows = outcome and accepted == self.drafted[: len(accepted)]
        return outcome if follows and history[:start] == self.history else None


class DrafterCopy(Protocol):
    """A copy of a drafter that drafts ahead of one sequence, on this machine or on another one."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of its caches on this machine."""

    def draft_ahead(self, request: AheadRequest, /) -> Branches:
        """Return drafts for likely outcomes, or fewer if the request is cancelled meanwhile."""


class LocalCopy:
    """A copy of a drafter on this machine."""

    def __init__(self, drafter: SequenceDrafter) -> None:
        self._drafter = drafter

    @property
    def nbytes(self) -> int:
        return self._drafter.nbytes

    def draft_ahead(self, request: AheadRequest) -> Branches:
        """Return drafts for likely outcomes.

        Draft models serve several outcomes. Other drafters assume that the whole draft is accepted.
        """
        drafter = self._drafter
        if isinstance(drafter, DraftModel) and drafter.can_branch:
            return drafter.draft_branches(request)
        history = [*request.history, *request.drafted]
        guess = read_tokens(drafter.draft(history, 1, request.sampler).tokens)
        found = drafter.draft([*history, *guess], request.limit, request.sampler) if guess else no_draft()
        return {(*request.drafted, *guess): found} if found.tokens.size else {}
