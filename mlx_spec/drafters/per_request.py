"""Drafters of one request: predicted output, tokens that a grammar forces.

`GrammarFilter` does not draft: it cuts another drafter's tokens at the first illegal one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from mlx_spec.drafters.drafter import DrafterWrapper
from mlx_spec.drafters.lookup import MAX_MATCH, Lookup
from mlx_spec.grammar import Grammar, Matcher, read_tokens
from mlx_spec.types import Draft, Drafter, Features, FeatureSpec, RequestDrafter, Sampler, no_draft


class Prediction(Lookup):
    """Lookup in the text that a client expects, then in the prompt and the answer so far.

    The predicted text is put before the conversation, like an earlier answer to the same prompt. Before it is
    a copy of the prompt's last tokens. So the first tokens of an answer find its beginning, and after a
    difference the longest match leads back into it.
    """

    source = "prediction"
    # Acceptance expected of one token: clients predict texts that stay the same for the most part.
    prior = 0.75

    def __init__(self, prediction: Sequence[int], prompt: Sequence[int]) -> None:
        super().__init__()
        self._text = [*prompt[-MAX_MATCH:], *prediction]
        self._offset = len(self._text)  # of the conversation in the text

    def observe(self, history: Sequence[int], features: Features) -> None:
        super().observe(self._extended(history), features)

    def available(self, history: Sequence[int]) -> int:
        return super().available(self._extended(history))

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        return super().draft(self._extended(history), limit, sampler)

    def _extended(self, history: Sequence[int]) -> list[int]:
        """Return the text with the new tokens of the conversation, which only grows."""
        self._text += history[len(self._text) - self._offset :]
        return self._text


def prediction_counts(prediction: Sequence[int], output: Sequence[int]) -> tuple[int, int]:
    """Return how many tokens of a prediction appear in the output, in its order, and how many do not.

    The first number is the length of a longest common subsequence; it does not depend on the drafts. Bit i
    of an integer is token i of the prediction. So a token of the output takes a few operations (Hyyrö,
    Bit-parallel LCS-length computation revisited, 2004).
    """
    bits_of: dict[int, int] = {}
    for i, token in enumerate(prediction):
        bits_of[token] = bits_of.get(token, 0) | 1 << i
    everything = (1 << len(prediction)) - 1
    unmatched = everything
    for token in output:
        matching = unmatched & bits_of.get(token, 0)
        unmatched = (unmatched + matching | unmatched - matching) & everything
    accepted = len(prediction) - unmatched.bit_count()
    return accepted, len(prediction) - accepted


class Forced(Drafter):
    """Drafts the tokens that a grammar forces.

    The history belongs to one answer and starts with a prompt.
    """

    needs = FeatureSpec()
    prior = 0.995  # expected acceptance of one token: only a stop token of the request can replace it

    def __init__(self, matcher: Matcher, prompt_length: int) -> None:
        self._matcher = matcher
        self._prompt_length = prompt_length
        self._known = (-1, 0)  # length and last token of the history that `_tokens` follow
        self._tokens: list[int] = []

    def observe(self, history: Sequence[int], features: Features) -> None:
        """Do nothing: a draft depends on its history only."""

    def available(self, history: Sequence[int]) -> int:
        return len(self._following(history))

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        tokens = self._following(history)[:limit]
        return Draft(mx.array(tokens, dtype=mx.int32)) if tokens else no_draft()

    def _following(self, history: Sequence[int]) -> list[int]:
        known = (len(history), history[-1])
        if known != self._known:
            self._known = known
            self._tokens = self._matcher.forced(history, start=self._prompt_length)
        return self._tokens


class GrammarFilter(DrafterWrapper):
    """Cuts another drafter's tokens after the first one that the grammar forbids.

    Later tokens would waste rows of the target's pass. The forbidden token stays and is rejected: a policy
    learns only from verdicts. Without one it would pay for an empty draft in every round.

    Only chains without probabilities are cut. Dropping a drawn token because it is forbidden would change the
    distribution of the drafts. Then the acceptance rule would no longer be exact.
    """

    def __init__(self, inner: Drafter, matcher: Matcher, prompt_length: int) -> None:
        super().__init__(inner)
        self._matcher = matcher
        self._prompt_length = prompt_length

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        draft = self.inner.draft(history, limit, sampler)
        if draft.probs is not None or draft.parents is not None or not draft.tokens.size:
            return draft
        keep = self._matcher.legal(history, read_tokens(draft.tokens), start=self._prompt_length) + 1
        return replace(draft, tokens=draft.tokens[:keep])


def for_request(
    drafters: Sequence[Drafter],
    prompt: Sequence[int],
    *,
    grammar: Grammar | None = None,
    prediction: Sequence[int] = (),
) -> tuple[tuple[Drafter, ...], tuple[RequestDrafter, ...]]:
    """Return the drafters of a sequence, filtered by its grammar, and the drafters that its request brings.

    The policy chooses among both. A request's drafters draft in no time, so the policy weighs only the rows
    that their tokens add to a pass of the target.
    """
    matcher = None if grammar is None else grammar.matcher(prompt)
    extras: list[RequestDrafter] = []
    if matcher is not None:
        drafters = [GrammarFilter(drafter, matcher, len(prompt)) for drafter in drafters]
        forced = Forced(matcher, len(prompt))
        extras.append(RequestDrafter("grammar", forced, forced.available, forced.prior))
    if prediction:
        predicted = Prediction(prediction, prompt)
        checked = predicted if matcher is None else GrammarFilter(predicted, matcher, len(prompt))
        extras.append(RequestDrafter("prediction", checked, predicted.available, predicted.prior))
    return tuple(drafters), tuple(extras)
