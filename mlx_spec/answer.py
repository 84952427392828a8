"""One answer as it streams: text by kind, cut at stop strings, with the origin and the law of every token.

Tokens are read one by one, so nothing depends on the rounds they came in but where parts begin and end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlx_spec.reading import Kind, Marks, Reader
from mlx_spec.stops import StopStrings
from mlx_spec.text import Text
from mlx_spec.types import Round, TokenLogprob


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
