"""A text in the tokens of two models: a history of the target for a drafter, and a draft back again.

Text passes between the two as bytes, because a token may be half a character. Where tokens of one history
end, tokens of the other need not: what is given back is only what begins exactly where the history ends.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from mlx_spec.drafters.draft_model import common_prefix

PIECE = 32  # tokens of the target, after which a piece of text is closed at the next word
LONGEST = 4 * PIECE  # ... and at the next character
SPACES = (b" ", b"\n")  # what a new word begins with, in all tokenizers that keep words apart


class Writing(Protocol):
    """What is needed of a tokenizer."""

    @property
    def controls(self) -> frozenset[int]:
        """Tokens that are no text."""
        ...

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`, none added."""
        ...

    def prompt_tokens(self, text: str) -> list[int]:
        """The tokens of `text`, with those that every text begins with."""
        ...

    def written(self, token: int) -> bytes:
        """The bytes of a token, of a special one its name."""
        ...

    def token_id(self, token: str) -> int | None:
        """The id of a token; None if there is no such token."""
        ...


def encoded(writing: Writing, before: bytes, text: bytes) -> list[int] | None:
    """The tokens of `text` as they go on behind `before`.

    None where no token ends between the two, or the tokenizer does not write the same bytes. What some
    tokenizers put before every text is left out: it would stand in the middle here.
    """
    anchor = b"x" if (before + text)[:1].isspace() else b"\n"  # one that does not grow into a token with it
    expected = anchor + before + text
    try:
        tokens = writing.encode(expected.decode())
    except UnicodeDecodeError:
        return None
    ends = [0, *accumulate(len(writing.written(token)) for token in tokens)]
    bytes_written = b"".join(writing.written(token) for token in tokens)
    added = len(bytes_written) - len(expected)
    if bytes_written != b" " * added + expected:
        return None
    start = len(expected) - len(text) + added
    index = bisect_left(ends, start)
    return tokens[index:] if ends[index] == start else None


def whole(text: bytes) -> bytes:
    """`text` up to the first byte that is not part of a whole character."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start]
    return text


def parted(text: bytes) -> tuple[str, bytes]:
    """The characters of `text`, and the bytes behind them that may become one."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return decoder.decode(text), decoder.getstate()[0]


@dataclass(frozen=True)
class Place:
    """The end of a history, for a drafter to go on from."""

    tokens: list[int]  # the drafter's, of all whole characters
    before: bytes  # the last piece of text
    pending: bytes  # the end of `before`: half a character, which `tokens` do not hold


@dataclass(frozen=True)
class _Border:
    """Where a closed piece ends."""

    target: int  # tokens
    drafter: int  # tokens


class Translation:
    """The history of one sequence in the drafter's tokens.

    It is cut into pieces, and where they end depends on nothing that comes later: a closed piece is encoded
    once, however the history goes on, and only the last one again with every token. A control token is a
    piece of its own: the drafter's of the same name, or nothing.
    """

    def __init__(self, target: Writing, drafter: Writing) -> None:
        self._target = target
        self._drafter = drafter
        self._opening = drafter.prompt_tokens("")
        self._history: list[int] = []
        self._tokens = list(self._opening)  # of closed pieces
        self._borders = [_Border(0, len(self._tokens))]

    def read(self, history: Sequence[int]) -> Place:
        """The place behind `history`."""
        shared = common_prefix(self._history, history)
        while len(self._borders) > 1 and self._borders[-1].target >= shared:
            self._borders.pop()
        self._history = list(history)
        start = self._borders[-1].target
        del self._tokens[self._borders[-1].drafter :]
        for end in self._ends(start):
            self._tokens += self._piece(start, end)
            self._borders.append(_Border(end, len(self._tokens)))
            start = end
        before = self._bytes(start, len(history))
        text, pending = parted(before)
        return Place([*self._tokens, *self._encoded(text)], before, pending)

    def _ends(self, start: int) -> Iterator[int]:
        """Where the pieces from `start` on end, but for the last one."""
        for i in range(start, len(self._history)):
            token, length = self._history[i], i - start
            control = token in self._target.controls
            word = length >= PIECE and self._target.written(token).startswith(SPACES)
            if length and (control or word or (length >= LONGEST and not parted(self._bytes(start, i))[1])):
                yield i
                start = i
            if control:
                yield i + 1
                start = i + 1

    def _piece(self, start: int, end: int) -> list[int]:
        token = self._history[start]
        if token not in self._target.controls:
            return self._encoded(parted(self._bytes(start, end))[0])
        same = named(self._target, token, self._drafter)
        return [] if start == 0 and same == self._opening[-1:] else same

    def _encoded(self, text: str) -> list[int]:
        found = encoded(self._drafter, b"", text.encode())
        return self._drafter.encode(text) if found is None else found

    def _bytes(self, start: int, end: int) -> bytes:
        return b"".join(self._target.written(token) for token in self._history[start:end])


def named(writing: Writing, token: int, other: Writing) -> list[int]:
    """The control token of `other` that has the name of `token`, if there is one."""
    same = other.token_id(writing.written(token).decode(errors="replace"))
    return [] if same is None or same not in other.controls else [same]


def continuation(target: Writing, place: Place, drafted: bytes) -> list[int]:
    """The target's tokens of a drafted text; none where they would not begin at the end of its history."""
    text = whole(drafted)
    if not text.startswith(place.pending):
        return []
    text = text[len(place.pending) :]
    found = encoded(target, place.before, text)
    if found is None and not place.pending:  # the last token and the text are written as one elsewhere
        found = encoded(target, b"", text)
    return found or []
