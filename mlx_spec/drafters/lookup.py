"""Lookup: suffix decoding (arXiv:2411.04975) in the conversation and in earlier answers.

`Lookup` finds the longest match. A policy has a separate belief for each range of match lengths: one equal
token says little about the next, six say nearly all.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_spec.drafters.drafter import DrafterSource
from mlx_spec.tokenizer import common_prefix
from mlx_spec.types import (
    MAX_DRAFT_TOKENS,
    Draft,
    Drafter,
    EarlierTexts,
    Features,
    FeatureSpec,
    Sampler,
    no_draft,
)

MAX_MATCH = 32  # tokens of a match that are compared
# The proposals of lookup, and the match lengths that each drafts from.
RANGES = {"lookup": (6, MAX_MATCH), "lookup, a few tokens": (2, 5), "lookup, one token": (1, 1)}
MAX_TAIL = 64  # tokens compared to notice that the history was replaced


class Lookup(Drafter):
    """Copies what followed the longest earlier match of the last tokens.

    In the conversation it is found as in LZ77 compressors. A table has the latest place after the last few
    tokens, and a chain leads from every place to the one before. An earlier answer is copied if its match is
    longer. A draft is at most as long as its match, as in suffix decoding.

    A place is the index of the token that followed a match. At least `min_match` tokens must match, at least
    2; with 1, a match of a single token is copied, too.
    """

    needs = FeatureSpec()
    source = "lookup"  # of drafts from the conversation

    def __init__(self, min_match: int = 2, max_match: int = MAX_MATCH) -> None:
        self._min_match, self._max_match = max(min_match, 2), max_match
        self._copies_after_one = min_match == 1
        self._earlier: EarlierTexts | None = None
        # The last match, with the length and the last tokens of its history.
        self._last_match: tuple[int, list[int], tuple[EarlierTexts | None, int, int]] | None = None
        self._forget()

    def proposals(self) -> tuple[Drafter, ...]:
        return tuple(MatchRange(self, *lengths) for lengths in RANGES.values())

    def copy_from(self, earlier: EarlierTexts | None) -> None:
        """Copy these texts, too. If they belong to another key, forget the conversation of the last one."""
        if earlier is not self._earlier:
            self._forget()
        self._earlier, self._last_match = earlier, None

    def observe(self, history: Sequence[int], features: Features) -> None:
        """Index a prompt while it is read. The few tokens of a round are indexed by the next draft."""
        if not 0 <= len(history) - len(self._before) <= MAX_DRAFT_TOKENS + 1:
            self._index(history)

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """Copy at most `limit` tokens that followed the longest match, the latest one if several are equal.

        A copy that reaches the end of the history continues with its own first tokens.
        """
        earlier, place, length = self._find(history)
        count = min(limit, length)
        if count < 1:
            return no_draft()
        if earlier is not None:
            copied = earlier.copy(place, count)
            return Draft(mx.array(copied, dtype=mx.int32), source="earlier") if copied else no_draft()
        period = len(history) - place
        copied = [history[place + i % period] for i in range(count)]
        return Draft(mx.array(copied, dtype=mx.int32), source=self.source)

    def available(self, history: Sequence[int]) -> int:
        """Return how many tokens it would draft at most: the length of the longest match, or 0."""
        return self._find(history)[2]

    def _find(self, history: Sequence[int]) -> tuple[EarlierTexts | None, int, int]:
        """Return the text of the longest match (None for the conversation), its place and its length."""
        last = list(history[-self._max_match :])
        if self._last_match is not None and self._last_match[:2] == (len(history), last):
            return self._last_match[2]
        self._index(history)
        place, length = self._longest_match(history)
        match: tuple[EarlierTexts | None, int, int] = None, place, length
        if self._earlier is not None and length < len(last):
            place, other = self._earlier.find(last)
            match = (self._earlier, place, other) if other > length else match
        self._last_match = len(history), last, match
        return match

    def _forget(self) -> None:
        self._latest: dict[tuple[int, ...], int] = {}  # the last tokens before a place -> the latest place
        self._after_one: dict[int, int] = {}  # a token -> the latest place after it; may be out of date
        self._before = [0] * self._min_match  # place -> the place before it with the same tokens, or 0
        self._tail: list[int] = []  # the last indexed tokens, whose places can be taken back
        self._last_match = None

    def _index(self, history: Sequence[int]) -> None:
        """Enter all places up to the last token, from which a continuation can be copied."""
        start = len(self._before) - len(self._tail)
        if (kept := common_prefix(self._tail, history[start : len(self._before)])) < len(self._tail):
            self._take_back(start, kept)
        new = len(self._before) if self._tail else 0
        self._after_one.setdefault(history[0], 1)
        for place in range(len(self._before), len(history)):
            key = tuple(history[place - self._min_match : place])
            self._before.append(self._latest.get(key, 0))
            self._latest[key] = self._after_one[key[-1]] = place
        # Not from the history: its tokens before the tail may differ from those that were indexed.
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
            place = self._after_one.get(history[-1], 0) if self._copies_after_one else 0
            is_match = 0 < place < len(history) and history[place - 1] == history[-1]
            return (place, 1) if is_match else (0, 0)
        last = list(history[-self._max_match :])[::-1]
        best, length = 0, self._min_match - 1
        for _ in range(128):  # only the latest places: a draft must not wait for a search of a long text
            if not place or length == len(last):
                break
            if length < place and history[place - 1 - length] == last[length]:
                matched = _match_length(history, place, last)
                if matched > length:
                    best, length = place, matched
            place = self._before[place]
        return (best, length) if best else (0, 0)


def _match_length(history: Sequence[int], place: int, last: list[int]) -> int:
    """Return how many tokens before `place` equal the last ones of the history, given backwards."""
    before = history[max(place - len(last), 0) : place][::-1]
    return next((i for i, (a, b) in enumerate(zip(before, last, strict=False)) if a != b), len(before))


class MatchRange(Drafter):
    """Drafts from matches of `low` to `high` tokens. All ranges of a sequence share one lookup."""

    needs = FeatureSpec()

    def __init__(self, lookup: Lookup, low: int, high: int) -> None:
        self._lookup, self._low, self._high = lookup, low, high

    def copy_from(self, earlier: EarlierTexts | None) -> None:
        self._lookup.copy_from(earlier)

    def observe(self, history: Sequence[int], features: Features) -> None:
        self._lookup.observe(history, features)

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        return self._lookup.draft(history, limit, sampler) if self.available(history) else no_draft()

    def available(self, history: Sequence[int]) -> int:
        """Return the length of the longest match, or 0 if that is not in the range."""
        length = self._lookup.available(history)
        return length if self._low <= length <= self._high else 0


def lookup_source() -> DrafterSource:
    """Return the source of lookup in any text."""
    return DrafterSource("lookup", Lookup.needs, lambda parts: Lookup(min_match=1), proposals=tuple(RANGES))
