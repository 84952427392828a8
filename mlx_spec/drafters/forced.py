"""Text that a grammar leaves no choice about: drafted without a model, and right."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_spec.grammar import Matcher
from mlx_spec.types import Draft, Features, FeatureSpec, Sampler, no_draft


class Forced:
    """Drafts the tokens that must follow in one answer, whose history starts with a prompt."""

    needs = FeatureSpec()

    def __init__(self, matcher: Matcher, prompt_length: int) -> None:
        self._matcher = matcher
        self._prompt_length = prompt_length
        self._known = (-1, 0)  # length and last token of the history that `_tokens` follow
        self._tokens: list[int] = []

    def observe(self, history: Sequence[int], features: Features) -> None:
        """What must follow is read from the history when it is asked for."""

    def available(self, history: Sequence[int]) -> int:
        """How many tokens there are to draft."""
        return len(self._following(history))

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """At most `limit` tokens that must follow `history`. Their confidence is 1."""
        tokens = self._following(history)[:limit]
        if not tokens:
            return no_draft()
        return Draft(mx.array(tokens, dtype=mx.int32), confidence=mx.ones((len(tokens),)))

    def _following(self, history: Sequence[int]) -> list[int]:
        known = (len(history), history[-1])
        if known != self._known:
            self._known = known
            self._tokens = self._matcher.forced(history[self._prompt_length :])
        return self._tokens
