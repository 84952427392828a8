"""The text of an answer as it streams: thinking, tool calls and answer apart, cut at stop strings.

Every piece of text keeps the drafter and the log-probability of its tokens, so tokens are read one by one.
mlx-lm's detokenizers need transformers' tokenizer objects and do not tell whether a token waits for its text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mlx_spec.errors import InvalidValue
from mlx_spec.text.tokenizer import Markers, Text
from mlx_spec.types import Round, TokenLogprob

TextKind = Literal["answer", "thinking", "call"]
REPLACEMENT = "\ufffd"  # a decoder writes it for bytes that are no character, or not yet


class Detokenizer:
    """The text of a stream of tokens. It never gives half a character.

    A window of tokens is decoded twice, with the new token and without: the difference is the new text. So
    the spaces of a token are those of its place.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []  # the window: tokens given last, then tokens not given yet
        self._given = 0
        self.waiting = False  # True if the last tokens are half a character

    def add(self, token: int) -> str:
        """Return the text that `token` completes."""
        self._tokens.append(token)
        return self._new_text(final=False)

    def end(self) -> str:
        """Return the rest, such as bytes that never became a character."""
        return self._new_text(final=True)

    def _new_text(self, *, final: bool) -> str:
        before = self._decode(self._tokens[: self._given])
        after = self._decode(self._tokens)
        self.waiting = len(after) > len(before) and after.endswith(REPLACEMENT) and not final
        if len(after) <= len(before) or self.waiting:
            return ""
        self._tokens = self._tokens[self._given :]
        self._given = len(self._tokens)
        # A broken character makes some decoders write the ones before it anew, byte by byte.
        return after[len(before) :] if after.startswith(before) else self._decode(self._tokens)


@dataclass(frozen=True)
class Span:
    """A piece of text that one token completed, with the tokens before it that were half a character."""

    text: str
    drafter: int | None  # index of the drafter that drafted the token; None if the target drew it
    position: int  # place in the draft, from 1; 0 if not drafted


@dataclass(frozen=True)
class TextPart:
    """More text of one kind. The text of a call stands between its markers."""

    kind: TextKind
    text: str  # empty if a call only begins or ends
    logprobs: tuple[TokenLogprob, ...] = ()  # of the tokens whose visible text begins here
    spans: tuple[Span, ...] = ()  # their texts make up `text`
    call: int | None = None  # 0, 1, ... for kind "call"
    closed: bool = False  # True if the call ends here; a call that never does was cut off


class AnswerStream:
    """The text of the answer to `prompt`, its kinds apart, cut at stop strings.

    Markers are hidden, and so are special tokens outside of tool calls. Text between `calls` markers is of
    kind "call", with special tokens as text. An answer has calls, thinking has none, and both markers must be
    tokens of the vocabulary. Without a prompt (None) all text is answer and nothing is marked. Tokens in
    `ends` have no text, like the end-of-text tokens.

    Stop strings are looked for in the answer text alone. Text that may become one is held back. The text
    before a stop string is given, then the answer is finished: later tokens are not read. Raises InvalidValue
    for an empty stop string.
    """

    def __init__(
        self,
        text: Text,
        prompt: Sequence[int] | None,
        *,
        stop: Sequence[str] = (),
        ends: Collection[int] = (),
        calls: Markers | None = None,
    ) -> None:
        if "" in stop:
            raise InvalidValue("a stop string is empty: leave it out")
        self._text = text
        self._stop = tuple(stop)
        self._ends = text.eos | frozenset(ends)
        thinking = None if prompt is None else text.thinking_markers
        self._header = thinking.header if thinking else ""
        self._kind_after = _kinds(text, thinking, None if prompt is None else calls)
        # Tokens read whose text is not known yet.
        self._without_text: list[tuple[Span, Sequence[TokenLogprob]]] = []
        self._held: list[TextPart] = []  # of kind answer: may become a stop string
        self._parts: list[TextPart] = []  # not returned yet
        self._call = -1  # index of the last call opened
        self.kind: TextKind  # of the text that comes next
        self.finished: str | None = None  # the stop string that was completed
        self.completion_tokens = 0  # tokens emitted, up to and with the one that completed a stop string
        self.reasoning_tokens = 0  # tokens of thinking among them, with their markers
        opened = prompt is not None and text.opens_thinking(prompt)
        self._begin("thinking" if opened else "answer", trim=opened, header="")

    def read(self, round: Round, logprobs: Sequence[TokenLogprob] = ()) -> list[TextPart]:
        """Return the text of a round; neighbours of one kind are one part. `logprobs` are of its tokens."""
        for i, token in enumerate(round.tokens):
            if self.finished is not None:
                break
            drafter, position = (round.drafter, i + 1) if i < round.accepted else (None, 0)
            self._read_token(token, Span("", drafter, position), logprobs[i : i + 1])
        return self._take_parts()

    def end(self) -> list[TextPart]:
        """Return the text that was held back."""
        if self.finished is None:
            self._end_kind()
            self._release()
        return self._take_parts()

    def _read_token(self, token: int, span: Span, logprobs: Sequence[TokenLogprob]) -> None:
        before, after = self.kind, self._kind_after.get((self.kind, token))
        self.completion_tokens += 1
        self.reasoning_tokens += "thinking" in (before, after)
        if after is None:
            if token not in self._ends:
                self._without_text.append((span, logprobs))
                self._add_text(self._detokenizer.add(token))
            return
        self._end_kind()
        self._begin(after, trim=after != "call", header=self._header if after == "thinking" else "")
        if after == before or self.finished is not None:
            return
        self._release()
        if before == "call":
            self._add_part(TextPart("call", "", call=self._call, closed=True))
        if after == "call":
            self._call += 1
            self._add_part(TextPart("call", "", call=self._call))

    def _begin(self, kind: TextKind, *, trim: bool, header: str) -> None:
        self.kind, self._trim, self._expected_header = kind, trim, header
        self._may_be_header = ""
        self._detokenizer = Detokenizer(self._text.decode_raw if kind == "call" else self._text.decode)

    def _end_kind(self) -> None:
        """Add the rest of the text of this kind."""
        self._add_text(self._detokenizer.end(), final=True)

    def _add_text(self, new: str, *, final: bool = False) -> None:
        """Add text that the tokens without text completed."""
        text = self._visible(new, final=final)
        if text:
            last = self._without_text[-1][0] if self._without_text else Span("", None, 0)
            span = replace(last, text=text)
            logprobs = tuple(each for _, given in self._without_text for each in given)
            part = TextPart(self.kind, text, logprobs, (span,), self._call if self.kind == "call" else None)
            if self.kind == "answer":
                self._held.append(part)
                self._check_stops()
            else:
                self._add_part(part)
        if text or not (self._may_be_header or self._detokenizer.waiting):
            self._without_text.clear()  # their text is given, or they have none

    def _visible(self, new: str, *, final: bool) -> str:
        """Return new text without the header and the space before the text of its kind."""
        new, self._may_be_header = self._may_be_header + new, ""
        if self._expected_header.startswith(new) and new != self._expected_header and not final:
            self._may_be_header = new
            return ""
        if new:
            new, self._expected_header = new.removeprefix(self._expected_header), ""
        if self._trim:
            new = new.lstrip()
            self._trim = not new
        return new

    def _check_stops(self) -> None:
        """Release the text in which no stop string can begin, or finish at one."""
        text = "".join(part.text for part in self._held)
        starts = [(text.find(string), string) for string in self._stop]
        complete = [(start + len(string), start, string) for start, string in starts if start >= 0]
        if complete:  # the string that is complete first, the longest if several end there
            _, start, self.finished = min(complete)
            self._release(start)
            self._held.clear()
        else:
            self._release(len(text) - _pending_length(text, self._stop))

    def _release(self, count: int | None = None) -> None:
        """Release the first `count` characters that were held back; None for all."""
        left = sum(len(part.text) for part in self._held) if count is None else count
        while left > 0:
            part = self._held.pop(0)
            if len(part.text) > left:
                part, rest = _split(part, left)
                self._held.insert(0, rest)
            left -= len(part.text)
            self._add_part(part)

    def _add_part(self, part: TextPart) -> None:
        """Add a part, joined to the last one if both are of one kind and one call."""
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

    def _take_parts(self) -> list[TextPart]:
        parts, self._parts = self._parts, []
        return parts


def _kinds(
    text: Text, thinking: Markers | None, calls: Markers | None
) -> dict[tuple[TextKind, int | None], TextKind]:
    """Return the kind of text after each marker, by the kind before it."""
    found: dict[tuple[TextKind, int | None], TextKind] = {}
    if thinking is not None:
        opening, closing = text.token_id(thinking.open), text.token_id(thinking.close)
        found["answer", opening] = found["thinking", opening] = "thinking"
        found["answer", closing] = found["thinking", closing] = "answer"
    if calls is not None:
        opening, closing = text.token_id(calls.open), text.token_id(calls.close)
        if opening is not None and closing is not None:
            found["answer", opening] = "call"
            found["call", closing] = "answer"
    return found


def _pending_length(text: str, strings: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that may begin one of the strings."""
    longest = max((len(string) - 1 for string in strings), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(string.startswith(text[-length:]) for string in strings):
            return length
    return 0


def _split(part: TextPart, at: int) -> tuple[TextPart, TextPart]:
    """Split the text of one token; its logprob goes with the first half."""
    span = part.spans[0]
    first, rest = replace(span, text=span.text[:at]), replace(span, text=span.text[at:])
    return (
        replace(part, text=first.text, spans=(first,)),
        replace(part, text=rest.text, spans=(rest,), logprobs=()),
    )
