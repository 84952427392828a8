"""Drafts under a grammar: what follows a token that it forbids is not worth a row of the target's pass."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_spec.grammar import Matcher, read_tokens
from mlx_spec.types import Draft, Drafter, Features, Sampler


class Legal:
    """Another drafter, whose tokens are cut behind the first that the grammar does not allow.

    That one stays and is rejected: a policy hears of what drafters had to offer from the verdict alone, and
    would else pay in every round for drafts of which nothing is left.

    Only chains without chance are cut. A token that was drawn must be judged whatever it is: to drop it where
    it is not allowed would leave the drafts that are, drawn from another law than the one they come with.
    """

    def __init__(self, drafter: Drafter, matcher: Matcher, prompt_length: int) -> None:
        self._drafter = drafter
        self._matcher = matcher
        self._prompt_length = prompt_length
        self.needs = drafter.needs

    def observe(self, history: Sequence[int], features: Features) -> None:
        """Passed on."""
        self._drafter.observe(history, features)

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """What the other drafts, up to and with the first token that may not stand there."""
        draft = self._drafter.draft(history, limit, sampler)
        if draft.probs is not None or draft.parents is not None or not draft.tokens.size:
            return draft
        keep = self._matcher.legal(history[self._prompt_length :], read_tokens(draft.tokens)) + 1
        confidence = None if draft.confidence is None else draft.confidence[:keep]
        return Draft(draft.tokens[:keep], confidence=confidence)
