"""Stop strings in a text that streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_spec.errors import InvalidValue


@dataclass(frozen=True)
class Found:
    """A stop string, and where in the text it begins."""

    start: int
    string: str


class StopStrings:
    """Strings that end an answer, wherever in it they stand. Raises InvalidValue for an empty one."""

    def __init__(self, strings: Sequence[str]) -> None:
        if "" in strings:
            raise InvalidValue("a stop string is empty: leave it out")
        self._strings = tuple(strings)

    def find(self, text: str) -> Found | None:
        """The one that is complete first, and of those that end there the longest."""
        starts = [(text.find(string), string) for string in self._strings]
        found = [(start + len(string), start, string) for start, string in starts if start >= 0]
        return Found(min(found)[1], min(found)[2]) if found else None

    def open(self, text: str) -> int:
        """The length of the longest end of `text` with which one of them may begin."""
        longest = max((len(string) - 1 for string in self._strings), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(string.startswith(text[-length:]) for string in self._strings):
                return length
        return 0
