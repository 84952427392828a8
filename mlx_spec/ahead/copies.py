"""Copies of a drafter that draft ahead, on this machine or on another one."""

from __future__ import annotations

from typing import Protocol

from mlx_spec.drafters.draft_model import BranchCall, Branches, DraftModel
from mlx_spec.grammar import read_tokens
from mlx_spec.types import Drafter, no_draft


class DrafterCopy(Protocol):
    """A copy of a drafter that drafts ahead of one sequence, on this machine or on another one."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of its caches on this machine."""

    def draft_ahead(self, call: BranchCall, /) -> Branches:
        """Return drafts for likely outcomes, or fewer if the call is cancelled meanwhile."""


class LocalCopy:
    """A copy of a drafter on this machine."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    @property
    def nbytes(self) -> int:
        return self._drafter.nbytes

    def draft_ahead(self, call: BranchCall) -> Branches:
        """Return drafts for likely outcomes.

        Draft models serve several outcomes. Other drafters assume that the whole draft is accepted.
        """
        drafter = self._drafter
        if isinstance(drafter, DraftModel) and drafter.can_branch:
            return drafter.draft_branches(call)
        history = [*call.history, *call.drafted]
        guess = read_tokens(drafter.draft(history, 1, call.sampler).tokens)
        draft = drafter.draft([*history, *guess], call.limit, call.sampler) if guess else no_draft()
        return {(*call.drafted, *guess): draft} if draft.tokens.size else {}
