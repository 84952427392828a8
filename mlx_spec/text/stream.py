"""Tokens to text as it streams: whole characters only, and thoughts, tool calls and the answer apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from mlx_spec.errors import InvalidValue
from mlx_spec.text.tokenizer import Marks, Text
from mlx_spec.types import Round, TokenLogprob

Kind = Literal["answer", "thinking", "call"]
HALF = "\ufffd"  # what a decoder gives for bytes that are no character, or not yet


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


@dataclass(frozen=True)
class Span:
    """A piece of text that a token completed, with those before it that were half of a character."""

    text: str
    drafter: int | None  # the one that drafted the token, by index; None: the target drew it
    position: int  # place in the draft, from 1; 0: not drafted


@dataclass(frozen=True)
class Part:
    """More text of one kind. That of a call stands between its marks."""

    kind: Kind
    text: str  # empty where a call only begins or ends
    logprobs: tuple[TokenLogprob, ...] = ()  # of the tokens whose visible text begins here
    spans: tuple[Span, ...] = ()  # their texts make up `text`
    call: int | None = None  # 0, 1, ... for kind "call"
    closed: bool = False  # the call ends here; one that never does was cut off


@dataclass(frozen=True)
class _Token:
    """Where a token came from, and its logprob if there is one."""

    drafter: int | None
    position: int
    logprobs: tuple[TokenLogprob, ...]


class Answer:
    """The answer to `prompt`, its thoughts and the calls between `calls` apart; marks are hidden.

    With no prompt (None) it continues a plain text, in which nothing is marked. Stop strings are looked for
    in the answer text alone, and what may still become one is held back. What stands before one is given,
    and the answer is then finished: no later token counts or is read. Raises InvalidValue for an empty one.
    """

    def __init__(
        self,
        text: Text,
        prompt: Sequence[int] | None,
        *,
        stop: Sequence[str] = (),
        calls: Marks | None = None,
    ) -> None:
        self._reader: Reader = text.plain_reader() if prompt is None else text.reader(prompt, calls=calls)
        self._stops = StopStrings(stop)
        self._unread: list[_Token] = []  # read, their text not yet known
        self._held: list[Part] = []  # of kind answer: may become a stop string
        self._parts: list[Part] = []  # not yet given
        self._call = -1  # the last one opened
        self.finished: str | None = None  # the stop string that was completed
        self.completion_tokens = 0  # emitted, up to and with the one that completed a stop string
        self.reasoning_tokens = 0  # those of thoughts among them, with their marks

    @property
    def kind(self) -> Kind:
        """The kind of text that comes next."""
        return self._reader.kind

    @property
    def calls(self) -> Marks | None:
        """The marks between which calls are read; None where the vocabulary lacks them."""
        return self._reader.calls

    def read(self, round: Round, logprobs: Sequence[TokenLogprob] = ()) -> list[Part]:
        """What a round brought: neighbours of one kind are one part. `logprobs` are those of its tokens."""
        for i, token in enumerate(round.tokens):
            if self.finished is not None:
                break
            drafted = i < round.accepted
            came = (round.drafter, i + 1) if drafted else (None, 0)
            self._read(token, _Token(*came, tuple(logprobs[i : i + 1])))
        return self._taken()

    def end(self) -> list[Part]:
        """What was held back."""
        if self.finished is None:
            self._add(self._reader.end())
            self._release()
        return self._taken()

    def _read(self, token: int, came: _Token) -> None:
        before = self._reader.kind
        self.completion_tokens += 1
        if not self._reader.hides(token):
            self._unread.append(came)
        self._add(self._reader.read([token]))
        if not self._reader.waiting:
            self._unread.clear()  # their text is given, or they have none
        after = self._reader.kind
        self.reasoning_tokens += "thinking" in (before, after)
        if after != before and self.finished is None:
            self._turn(before, after)

    def _turn(self, before: Kind, after: Kind) -> None:
        """A mark was read."""
        self._release()
        if before == "call":
            self._give(Part("call", "", call=self._call, closed=True))
        if after == "call":
            self._call += 1
            self._give(Part("call", "", call=self._call))

    def _add(self, pieces: list[tuple[str, Kind]]) -> None:
        """Text that the unread tokens made."""
        for text, kind in pieces:
            if self.finished is not None:
                return
            last = self._unread[-1] if self._unread else _Token(None, 0, ())
            span = Span(text, last.drafter, last.position)
            logprobs = tuple(each for token in self._unread for each in token.logprobs)
            self._unread.clear()
            part = Part(kind, text, logprobs, (span,))
            if kind == "answer":
                self._held.append(part)
                self._look()
            else:
                self._give(replace(part, call=self._call if kind == "call" else None))

    def _look(self) -> None:
        """Give what no stop string can begin in, or finish at one."""
        text = "".join(part.text for part in self._held)
        found = self._stops.find(text)
        self._release(found.start if found else len(text) - self._stops.open(text))
        if found:
            self._held.clear()
            self.finished = found.string

    def _release(self, count: int | None = None) -> None:
        """Give the first `count` characters that were held back, or all."""
        room = sum(len(part.text) for part in self._held) if count is None else count
        while room > 0:
            part = self._held.pop(0)
            if len(part.text) > room:
                part, rest = _halves(part, room)
                self._held.insert(0, rest)
            room -= len(part.text)
            self._give(part)

    def _give(self, part: Part) -> None:
        """Join a part to the one before, if they are of one kind and one call."""
        parts = self._parts
        if not parts or (parts[-1].kind, parts[-1].call) != (part.kind, part.call):
            parts.append(part)
            return
        last = parts[-1]
        parts[-1] = replace(
            last,
            text=last.text + part.text,
            logprobs=last.logprobs + part.logprobs,
            spans=last.spans + part.spans,
            closed=part.closed,
        )

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts


def _halves(part: Part, at: int) -> tuple[Part, Part]:
    """What one token made, in two; its logprob goes with the first."""
    span = part.spans[0]
    first, rest = replace(span, text=span.text[:at]), replace(span, text=span.text[at:])
    return (
        replace(part, text=first.text, spans=(first,)),
        replace(part, text=rest.text, spans=(rest,), logprobs=()),
    )
