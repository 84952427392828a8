"""Tokens to text as it streams: whole characters only, and thoughts, tool calls and the answer apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Kind = Literal["answer", "thinking", "call"]
HALF = "\ufffd"  # what a decoder gives for bytes that are no character, or not yet


@dataclass(frozen=True)
class Marks:
    """The tokens around a model's thoughts, or around its tool calls."""

    open: str
    close: str
    header: str = ""  # text behind the opening token that is no thought


class Decoder(Protocol):
    """What reading needs of a tokenizer."""

    eos: frozenset[int]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, without special tokens."""
        ...

    def decode_raw(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, special ones included."""
        ...

    def token_id(self, token: str) -> int | None:
        """The id of a token; None if there is no such token."""
        ...


class Detokenizer:
    """Text of a stream of tokens. Never gives half a character; a token's spaces are those of its place.

    A window of tokens is decoded twice, with the new ones and without: the difference is the new text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []  # the window: given out before `_given`, not yet behind it
        self._given = 0
        self.waiting = False  # whether the last tokens are half a character

    def add(self, tokens: Iterable[int]) -> str:
        """The text that `tokens` complete."""
        self._tokens += tokens
        return self._new(final=False)

    def end(self) -> str:
        """The rest, such as bytes that never became a character."""
        return self._new(final=True)

    def _new(self, *, final: bool) -> str:
        before = self._decode(self._tokens[: self._given])
        after = self._decode(self._tokens)
        self.waiting = len(after) > len(before) and after.endswith(HALF) and not final
        if len(after) <= len(before) or self.waiting:
            return ""
        self._tokens = self._tokens[self._given :]
        self._given = len(self._tokens)
        return after[len(before) :]


class Reader:
    """The tokens of one answer to pieces of text; marks are hidden, and special tokens outside of calls.

    What stands between the marks of `calls` is of kind "call", with special tokens as text. There are calls
    in an answer, not in thoughts, and only where both marks are tokens of the vocabulary.
    """

    def __init__(
        self, text: Decoder, kind: Kind, *, thoughts: Marks | None = None, calls: Marks | None = None
    ) -> None:
        self._text = text
        self._open, self._close = _ids(text, thoughts)
        self._header = thoughts.header if thoughts else ""
        ids = _ids(text, calls)
        self.calls = None if None in ids else calls  # what is read as calls: their raw text stands between
        self._call_open, self._call_close = ids if self.calls else (None, None)
        self._begin(kind, trim=kind == "thinking", header="")

    @property
    def waiting(self) -> bool:
        """Whether the last tokens have text that was not given yet: half a character, half a header."""
        return bool(self._held) or self._decoder.waiting

    def hides(self, token: int) -> bool:
        """Whether `token`, read next, is a mark or an end of text."""
        return self._begun_by(token) is not None or token in self._text.eos

    def read(self, tokens: Sequence[int]) -> list[tuple[str, Kind]]:
        """The pieces that `tokens` complete, none of them empty."""
        pieces: list[tuple[str, Kind]] = []
        run: list[int] = []
        for token in tokens:
            kind = self._begun_by(token)
            if kind is None:
                run += [] if token in self._text.eos else [token]
                continue
            self._give(pieces, run, final=True)
            run = []
            self._begin(kind, trim=kind != "call", header=self._header if kind == "thinking" else "")
        self._give(pieces, run, final=False)
        return pieces

    def end(self) -> list[tuple[str, Kind]]:
        """What was held back."""
        pieces: list[tuple[str, Kind]] = []
        self._give(pieces, [], final=True)
        return pieces

    def _begun_by(self, token: int) -> Kind | None:
        """The kind of text that follows a mark; None if `token` is no mark here."""
        if self.kind == "call":
            return "answer" if token == self._call_close else None
        if token == self._call_open and self.kind == "answer":
            return "call"
        if token == self._open:
            return "thinking"
        return "answer" if token == self._close else None

    def _begin(self, kind: Kind, *, trim: bool, header: str) -> None:
        self.kind, self._trim, self._expected = kind, trim, header
        self._held = ""  # text that may be the header
        self._decoder = Detokenizer(self._text.decode_raw if kind == "call" else self._text.decode)

    def _give(self, pieces: list[tuple[str, Kind]], tokens: list[int], *, final: bool) -> None:
        new = self._decoder.add(tokens) + (self._decoder.end() if final else "")
        new, self._held = self._held + new, ""
        if self._expected.startswith(new) and new != self._expected and not final:
            self._held = new
            return
        if new:
            new, self._expected = new.removeprefix(self._expected), ""
        if self._trim:
            new = new.lstrip()
            self._trim = not new
        if new:
            pieces.append((new, self.kind))


def _ids(text: Decoder, marks: Marks | None) -> tuple[int | None, int | None]:
    return (None, None) if marks is None else (text.token_id(marks.open), text.token_id(marks.close))
