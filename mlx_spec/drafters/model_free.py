"""Drafts without a model: lookup in the text, predicted output, tokens that a grammar forces.

`GrammarFilter` does not draft: it cuts another drafter's tokens at the first illegal one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from mlx_spec.drafters.drawing import DrafterSource, DrafterWrapper, SequenceDrafter
from mlx_spec.grammar import Grammar, Matcher, read_tokens
from mlx_spec.tokenizer import common_prefix
from mlx_spec.types import Draft, Drafter, Features, FeatureSpec, RequestDrafter, Sampler, no_draft

MIN_MATCH = 2  # tokens that must match before anything is copied
MAX_MATCH = 32  # tokens of a match that are compared
MAX_PLACES = 256  # earlier places compared in one draft, latest first
MAX_TAIL = 64  # tokens compared to notice that the history was replaced


class Lookup(SequenceDrafter):
    """Copies what followed the longest earlier match of the last tokens.

    Prompt lookup (github.com/apoorvumang/prompt-lookup-decoding) with matches of any length, found as in
    LZ77 compressors: a table from the last few tokens to the latest place after them, and a chain from every
    place to the one before. A draft is no longer than its match, as in suffix decoding (arXiv:2411.04975):
    two equal tokens say little about the next one, twenty say nearly everything.

    A place is the index of the token that followed a match.
    """

    needs = FeatureSpec()

    def __init__(self, min_match: int = MIN_MATCH, max_match: int = MAX_MATCH) -> None:
        self._min_match, self._max_match = min_match, max_match
        self._forget()

    def observe(self, history: Sequence[int], features: Features) -> None:
        """Index many new tokens at once; the next draft indexes a few."""
        if not 0 <= len(history) - len(self._before) <= MAX_TAIL:
            self._index(history)

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """Copy at most `limit` tokens that followed the longest match, the latest of equals.

        A copy that reaches the end of the history goes on with its own beginning.
        """
        self._index(history)
        place, length = self._longest_match(history)
        if limit < 1 or not length:
            return no_draft()
        period, count = len(history) - place, min(limit, length)
        return Draft(mx.array([history[place + i % period] for i in range(count)], dtype=mx.int32))

    def available(self, history: Sequence[int]) -> int:
        """Return the most tokens that would be drafted: the length of the longest match, or 0."""
        self._index(history)
        return self._longest_match(history)[1]

    def _forget(self) -> None:
        self._latest: dict[tuple[int, ...], int] = {}  # the last tokens before a place -> the latest place
        self._before = [0] * self._min_match  # place -> the place before it with the same tokens, or 0
        self._tail: list[int] = []  # the last tokens indexed, as far as places can be taken back

    def _index(self, history: Sequence[int]) -> None:
        """Enter all places up to the last token: a continuation can be copied from them."""
        start = len(self._before) - len(self._tail)
        if (kept := common_prefix(self._tail, history[start : len(self._before)])) < len(self._tail):
            self._take_back(start, kept)
        new = len(self._before) if self._tail else 0
        for place in range(len(self._before), len(history)):
            key = tuple(history[place - self._min_match : place])
            self._before.append(self._latest.get(key, 0))
            self._latest[key] = place
        # Not from the history: what comes before the tail may differ from what was indexed.
        self._tail = [*self._tail, *history[new : len(self._before)]][-MAX_TAIL:]

    def _take_back(self, start: int, kept: int) -> None:
        """Forget the places after the first `kept` tokens of the tail, which begins at `start`."""
        if kept < self._min_match:
            self._forget()
            return
        for place in reversed(range(start + kept, len(self._before))):
            key = tuple(self._tail[place - start - self._min_match : place - start])
            if before := self._before.pop():
                self._latest[key] = before
            else:
                del self._latest[key]
        del self._tail[kept:]

    def _longest_match(self, history: Sequence[int]) -> tuple[int, int]:
        """Return the place after the longest match and its length, or two zeros."""
        place = self._latest.get(tuple(history[-self._min_match :]), 0)
        if not place:
            return 0, 0
        last = list(history[-self._max_match :])[::-1]
        best, length = 0, self._min_match - 1
        for _ in range(MAX_PLACES):
            if not place or length == len(last):
                break
            if length < place and history[place - 1 - length] == last[length]:
                found = _match_length(history, place, last)
                if found > length:
                    best, length = place, found
            place = self._before[place]
        return (best, length) if best else (0, 0)


def _match_length(history: Sequence[int], place: int, last: list[int]) -> int:
    """Return how many tokens before `place` equal the last ones of the history, given backwards."""
    before = history[max(place - len(last), 0) : place][::-1]
    return next((i for i, (a, b) in enumerate(zip(before, last, strict=False)) if a != b), len(before))


def lookup_source() -> DrafterSource:
    """Return the source of lookup in any text."""
    return DrafterSource("lookup", Lookup.needs, lambda parts: Lookup())


# --- drafters of one request


class Prediction(Lookup):
    """Lookup in the text that a client expects, then in the prompt and the answer so far.

    The predicted text is put before the conversation, after a copy of the prompt's last tokens, like an
    earlier answer to the same prompt. So the first tokens of an answer find its beginning, and after a
    difference the longest match leads back into it.
    """

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
    of an integer is token i of the prediction, so a token of the output takes a few operations (Hyyrö,
    Bit-parallel LCS-length computation revisited, 2004).
    """
    places: dict[int, int] = {}
    for i, token in enumerate(prediction):
        places[token] = places.get(token, 0) | 1 << i
    everything = (1 << len(prediction)) - 1
    unmatched = everything
    for token in output:
        found = unmatched & places.get(token, 0)
        unmatched = (unmatched + found | unmatched - found) & everything
    accepted = len(prediction) - unmatched.bit_count()
    return accepted, len(prediction) - accepted


class Forced(SequenceDrafter):
    """Drafts the tokens that a grammar leaves no choice about.

    The history belongs to one answer and starts with a prompt.
    """

    needs = FeatureSpec()
    prior = 0.995  # acceptance expected of one token: only a stop token of the request can come instead

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
            self._tokens = self._matcher.forced(history[self._prompt_length :])
        return self._tokens


class GrammarFilter(DrafterWrapper):
    """Another drafter, whose tokens are cut after the first one that the grammar forbids.

    The tokens after it would waste rows of the target's pass. The forbidden token stays and is rejected: a
    policy learns only from verdicts, and would otherwise pay in every round for empty drafts.

    Only chains without probabilities are cut. Dropping a drawn token because it is forbidden would change
    the distribution of the drafts, and then the acceptance rule would no longer be exact.
    """

    def __init__(self, inner: Drafter, matcher: Matcher, prompt_length: int) -> None:
        super().__init__(inner)
        self._matcher = matcher
        self._prompt_length = prompt_length

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        draft = self.inner.draft(history, limit, sampler)
        if draft.probs is not None or draft.parents is not None or not draft.tokens.size:
            return draft
        keep = self._matcher.legal(history[self._prompt_length :], read_tokens(draft.tokens)) + 1
        return replace(draft, tokens=draft.tokens[:keep])


def for_request(
    drafters: Sequence[Drafter],
    prompt: Sequence[int],
    *,
    grammar: Grammar | None = None,
    prediction: Sequence[int] = (),
) -> tuple[tuple[Drafter, ...], tuple[RequestDrafter, ...]]:
    """Return the drafters of a sequence under the grammar of a request, and those that the request brings.

    Both are proposals of the sequence's own policy. Those of a request draft in no time, so the policy weighs
    only the rows that their tokens add to a pass of the target.
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
