"""Text that arrives in pieces, read by recursive descent: a parser is a generator that yields None to wait.

What a parser gives does not depend on where the pieces are cut, only when it gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

SPACE = " \t\r\n"


class Malformed(Exception):
    """The text is no call, or none in this format."""


@dataclass(frozen=True)
class Named:
    """A call begins, and its name is complete."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """More of the JSON text of the arguments; what has been given is always the beginning of valid JSON."""

    text: str


@dataclass(frozen=True)
class Completed:
    """The call is complete: its arguments add up to a JSON object."""


Delta = Named | Arguments | Completed
T = TypeVar("T")
Steps = Generator[Delta | None, None, T]  # None: more text is needed


class Source:
    """The text so far, and how much of it has been read."""

    def __init__(self) -> None:
        self._text, self._at, self._begun, self._ended = "", 0, 0, False

    @property
    def unread(self) -> str:
        """What came behind the last complete call."""
        return self._text[self._begun :]

    def add(self, text: str) -> None:
        """More text."""
        self._text += text

    def end(self) -> None:
        """No more will come."""
        self._ended = True

    def completed(self) -> None:
        """What has been read so far is a complete call, or space."""
        self._begun = self._at

    def peek(self) -> Steps[str]:
        """The next character; "" at the end."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield None
        return self._text[self._at]

    def space(self) -> Steps[None]:
        """Past white space."""
        while (character := (yield from self.peek())) and character in SPACE:
            self._at += 1

    def expect(self, literal: str) -> Steps[None]:
        """Past `literal`. Raises Malformed where something else comes."""
        for character in literal:
            if (yield from self.peek()) != character:
                raise Malformed(f"{literal!r} expected")
            self._at += 1

    def found(self, literal: str) -> Steps[bool]:
        """Past `literal` if it comes next; else nowhere, and False. Waits only while it may still come.

        Raises Malformed where the text ends before that is known: it is asked for within calls.
        """
        while not self._text.startswith(literal, self._at):
            if not literal.startswith(self._text[self._at :]):
                return False
            if self._ended:
                raise Malformed("the text ends within a call")
            yield None
        self._at += len(literal)
        return True

    def run(self, fits: Callable[[str], bool]) -> Steps[str]:
        """The characters that are here and fit, at least one; "" where the next one does not."""
        if not (yield from self.peek()):
            return ""
        end = self._at
        while end < len(self._text) and fits(self._text[end]):
            end += 1
        found, self._at = self._text[self._at : end], end
        return found

    def all(self, fits: Callable[[str], bool]) -> Steps[str]:
        """All characters up to one that does not fit, or to the end."""
        found = ""
        while part := (yield from self.run(fits)):
            found += part
        return found


class Parser:
    """The calls between two marks, as they come. After a malformed one it gives nothing more."""

    def __init__(self, source: Source, call: Callable[[], Steps[None]]) -> None:
        self._source, self._call = source, call
        self._steps = self._calls()
        self._broken = False

    @property
    def rest(self) -> str:
        """Text that belongs to no complete call; white space alone is none."""
        return self._source.unread if self._source.unread.strip() else ""

    def feed(self, text: str) -> list[Delta]:
        """What `text` adds."""
        self._source.add(text)
        return self._advance()

    def end(self) -> list[Delta]:
        """What is certain only now. `rest` is then what no call came of."""
        self._source.end()
        return self._advance()

    def _advance(self) -> list[Delta]:
        deltas: list[Delta] = []
        while not self._broken:
            try:
                delta = next(self._steps, None)
            except Malformed:
                self._broken = True
                break
            if delta is None:
                break
            _append(deltas, delta)
        return deltas

    def _calls(self) -> Steps[None]:
        yield from self._source.space()
        while (yield from self._source.peek()):
            yield from self._call()
            self._source.completed()
            yield Completed()
            yield from self._source.space()


def collected(steps: Steps[None]) -> Steps[str]:
    """The arguments that `steps` gives, as one text, when they are complete."""
    found = ""
    for step in steps:
        if step is None:
            yield None
        if isinstance(step, Arguments):
            found += step.text
    return found


def _append(deltas: list[Delta], delta: Delta) -> None:
    last = deltas[-1] if deltas else None
    if isinstance(delta, Arguments) and isinstance(last, Arguments):
        deltas[-1] = Arguments(last.text + delta.text)
    else:
        deltas.append(delta)
