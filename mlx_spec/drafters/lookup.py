"""Lookup in the text so far: copy what followed the longest earlier match of its last tokens.

Prompt lookup (github.com/apoorvumang/prompt-lookup-decoding) with matches of any length, found as in LZ77
compressors: a table from the last few tokens to the latest place they occurred at, and a chain from every
place to the one before. A draft is no longer than the match it follows, as in suffix decoding
(arXiv:2411.04975): what follows two equal tokens is a guess, what follows twenty is nearly certain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_spec.types import Draft, Features, FeatureSpec, Sampler, TargetParts, no_draft

PLACES = 256  # earlier places compared in one draft, latest first
TAIL = 64  # tokens compared to notice that the history was replaced


class Lookup:
    """Drafts one sequence without a model. A place is the index of the token that followed a match."""

    needs = FeatureSpec()

    def __init__(self, min_match: int, max_match: int) -> None:
        self._min_match, self._max_match = min_match, max_match
        self._forget()

    def observe(self, history: Sequence[int], features: Features) -> None:
        """Index the new tokens; few of them are left for the next draft."""
        if not 0 <= len(history) - len(self._before) <= TAIL:
            self._index(history)

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """At most `limit` tokens copied from behind the longest match, the latest of equals.

        A copy that reaches the end of the history goes on with what it copied. The confidence is that of a
        rule of succession: n / (n + 1) behind a match of n tokens.
        """
        self._index(history)
        place, length = self._longest_match(history)
        if limit < 1 or not length:
            return no_draft()
        period, count = len(history) - place, min(limit, length)
        tokens = mx.array([history[place + i % period] for i in range(count)], dtype=mx.int32)
        return Draft(tokens, confidence=mx.full((count,), length / (length + 1)))

    def match(self, history: Sequence[int]) -> int:
        """Tokens of the longest match, and the most that would be drafted; 0: there is none."""
        self._index(history)
        return self._longest_match(history)[1]

    def _forget(self) -> None:
        self._latest: dict[tuple[int, ...], int] = {}  # the last tokens before a place -> the latest place
        self._before = [0] * self._min_match  # place -> the place before it with the same tokens; 0: none
        self._tail: list[int] = []  # the last tokens indexed

    def _index(self, history: Sequence[int]) -> None:
        """Enter all places up to the last token: the ones that a continuation can be copied from."""
        indexed = len(self._before)
        if len(history) < indexed or list(history[indexed - len(self._tail) : indexed]) != self._tail:
            self._forget()
            indexed = len(self._before)
        for place in range(indexed, len(history)):
            key = tuple(history[place - self._min_match : place])
            self._before.append(self._latest.get(key, 0))
            self._latest[key] = place
        self._tail = list(history[max(len(self._before) - TAIL, 0) : len(self._before)])

    def _longest_match(self, history: Sequence[int]) -> tuple[int, int]:
        """The place behind the longest match and its length; 0 and 0 if there is none."""
        place = self._latest.get(tuple(history[-self._min_match :]), 0)
        if not place:
            return 0, 0
        last = list(history[-self._max_match :])[::-1]
        best, length = 0, self._min_match - 1
        for _ in range(PLACES):
            if not place or length == len(last):
                break
            if length < place and history[place - 1 - length] == last[length]:
                found = _match_length(history, place, last)
                if found > length:
                    best, length = place, found
            place = self._before[place]
        return (best, length) if best else (0, 0)


def _match_length(history: Sequence[int], place: int, last: list[int]) -> int:
    """How many tokens before `place` equal the last ones of the history, given backwards."""
    before = history[max(place - len(last), 0) : place][::-1]
    return next((i for i, (a, b) in enumerate(zip(before, last, strict=False)) if a != b), len(before))


@dataclass(frozen=True)
class LookupSource:
    """The settings of lookup, shared by all sequences."""

    min_match: int = 2  # tokens that must match
    max_match: int = 32  # tokens of a match that count
    name: str = "lookup"
    needs: FeatureSpec = Lookup.needs
    vocab_size: None = None

    def make(self, parts: TargetParts) -> Lookup:
        """The drafter of one sequence."""
        return Lookup(self.min_match, self.max_match)
