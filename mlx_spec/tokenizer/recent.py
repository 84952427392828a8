"""Prompts of the last conversations, so that the next turn costs what is new in it.

A conversation is sent whole at every turn. What was found out about its beginning still holds as far as the
text of its prompt is the same: which texts are in it (`history.py`), and which tokens it has.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from tokenizers import AddedToken, Encoding


class HasText(Protocol):
    """An entry of a `Recent`."""

    @property
    def text(self) -> str: ...


Entry = TypeVar("Entry", bound=HasText)


class Recent(Generic[Entry]):
    """The last entries, at most `most`, with at most `characters` in all. The longest match counts as used.

    An entry is found with its own scope alone, such as the API key of a request. Else the time that a prompt
    takes would tell whether another key has sent its beginning.
    """

    def __init__(self, most: int = 16, characters: int = 2**23) -> None:
        self._most, self._characters = most, characters
        self._entries: list[tuple[Hashable, Entry]] = []  # the last used one last
        self._lock = threading.Lock()  # several threads prepare requests

    def add(self, scope: Hashable, entry: Entry) -> None:
        """Keep an entry, and drop those that have not been used for the longest time."""
        with self._lock:
            self._entries.append((scope, entry))
            total = sum(len(each.text) for _, each in self._entries)
            while len(self._entries) > self._most or total > self._characters:
                total -= len(self._entries.pop(0)[1].text)

    def longest(self, scope: Hashable, text: str) -> tuple[Entry | None, int]:
        """Return the entry with the longest common beginning, and its length in characters."""
        with self._lock:
            entries = [entry for its_scope, entry in self._entries if its_scope == scope]
        lengths = [common_prefix(entry.text, text) for entry in entries]
        if not lengths:
            return None, 0
        best = max(range(len(lengths)), key=lengths.__getitem__)
        with self._lock:
            self._entries.sort(key=lambda pair: pair[1] is entries[best])
        return entries[best], lengths[best]


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the length of the common prefix of two texts, or of two sequences of tokens."""
    length, step = min(len(a), len(b)), 1024
    for low in range(0, length, step):
        one, other = a[low : min(low + step, length)], b[low : min(low + step, length)]
        if one != other and list(one) != list(other):  # they may be of different types
            return low + next(i for i, (x, y) in enumerate(zip(one, other, strict=True)) if x != y)
    return length


@dataclass(frozen=True)
class Encoded:
    """A text and its tokens."""

    text: str
    tokens: array[int]
    offsets: Sequence[int]  # in the text, of tokens that cut it; ascending
    indices: Sequence[int]  # of the same tokens

    def size_after(self, offset: int) -> int | None:
        """Return the number of tokens up to the first cutting one after a place, with it; None if none is."""
        index = bisect_left(self.offsets, offset)
        return self.indices[index] + 1 if index < len(self.offsets) else None


class RecentEncodings:
    """Encodes a text from the last place on at which a recent text can be cut.

    A tokenizer takes the added tokens that are not normalized out of a text first, from left to right, and
    encodes what is between them piece by piece. So what follows such a token does not depend on what precedes
    it. Whether it is a token there is decided by the text up to `reach` characters later, because a longer
    added token may begin at the same place. A token that takes spaces before it, or that asks for a boundary
    there, does not cut.
    """

    def __init__(self, encode: Callable[[str], Encoding], added: Iterable[tuple[int, AddedToken]]) -> None:
        self._encode, self._recent = encode, Recent[Encoded]()
        tokens = [(i, token) for i, token in added if not token.normalized]
        self._reach = 1 + max((len(token.content) for _, token in tokens), default=0)
        self._cutting = frozenset(i for i, token in tokens if not (token.lstrip or token.single_word))

    def encode(self, text: str, scope: Hashable) -> Encoded:
        """Return a text with its tokens, as encoding all of it gives them."""
        known, common = self._recent.longest(scope, text)
        cut = 0 if known is None else bisect_right(known.offsets, common - self._reach)
        if known is None or not cut:
            start, tokens, offsets, indices = 0, array("I"), list[int](), list[int]()
        else:
            start, index = known.offsets[cut - 1], known.indices[cut - 1]
            tokens, offsets, indices = (
                known.tokens[:index],
                [*known.offsets[: cut - 1]],
                [*known.indices[: cut - 1]],
            )
        encoding = self._encode(text[start:])
        ids, before = encoding.ids, len(tokens)
        for i in (i for i, token in enumerate(ids) if token in self._cutting):
            span = encoding.token_to_chars(i)
            if span is not None:
                offsets.append(start + span[0])
                indices.append(before + i)
        tokens.extend(ids)
        encoded = Encoded(text, tokens, offsets, indices)
        self._recent.add(scope, encoded)
        return encoded
