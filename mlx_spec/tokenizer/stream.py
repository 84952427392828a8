"""Split the text of a streaming answer into thinking, tool calls and answer, and cut it at stop strings.

Every piece of text keeps the drafter and the log-probability of its tokens, so tokens are read one by one.
mlx-lm's detokenizers are not used: they need transformers' tokenizer objects, and do not say whether a token
waits for its text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from mlx_spec.errors import InvalidValue
from mlx_spec.tokenizer.detokenizer import Detokenizer, half_character
from mlx_spec.tokenizer.segments import Segment, Segmenter, SegmentText, TextKind
from mlx_spec.tokenizer.thinking import Markers
from mlx_spec.tokenizer.tokenizer import Tokenizer
from mlx_spec.types import Round, TokenLogprob


@dataclass(frozen=True)
class TokenText:
    """A piece of text that one token completed, with the tokens before it that were half a character."""

    text: str
    source: str | None  # name of the drafter that drafted the token; None if the target drew it
    position: int  # place in the draft, from 1; 0 if not drafted


@dataclass(frozen=True)
class TextPart:
    """A piece of text of one kind. The text of a call excludes its markers."""

    kind: TextKind
    text: str  # empty if a call only begins or ends
    logprobs: tuple[TokenLogprob, ...] = ()  # of the tokens whose visible text begins in this part
    spans: tuple[TokenText, ...] = ()  # their texts make up `text`
    call: int | None = None  # index of the call, for kind "call"
    closed: bool = False  # True if the call ends in this part; a call without such a part was cut off


@dataclass(eq=False)
class _Read:
    """A token of the answer."""

    token: int
    source: str | None
    position: int
    logprobs: Sequence[TokenLogprob]  # they go with its first character that is shown


class AnswerStream:
    """Splits the answer to `prompt` into kinds of text, and cuts it at stop strings.

    The marks of thinking (`thinking.py`) are hidden in the places where the model uses them; elsewhere tags
    are text. Special tokens outside of tool calls are hidden. Text between `calls` markers is of kind "call",
    with special tokens as text. Calls stand in the answer, never in thinking. Both markers must be tokens of
    the vocabulary. Without a closing marker a call ends with the answer, or at the next opening marker. A
    `separator` between two calls is hidden. If headers mark calls, the text of a call begins with its header.
    Without a prompt (None) all text is answer and nothing is marked. Tokens in `ends` have no text, like the
    end-of-text tokens. A text that continues the tokens `before` keeps the space between them.

    Stop strings are searched in the answer text only. Text that may become one is held back. The text before
    a stop string is returned, then the answer is finished: later tokens are not read. It also ends with a
    call whose text `last_call` accepts. Raises InvalidValue for an empty stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] | None,
        *,
        stop: Sequence[str] = (),
        ends: Collection[int] = (),
        calls: Markers | None = None,
        separator: str = "",
        before: Sequence[int] = (),
        last_call: Callable[[str], bool] | None = None,
    ) -> None:
        if "" in stop:
            raise InvalidValue("a stop string is empty: leave it out")
        self._tokenizer = tokenizer
        marks = None if prompt is None else tokenizer.marks
        self._segmenter = Segmenter(
            marks,
            calls=_call_tokens(tokenizer, calls) if calls is not None and prompt is not None else None,
            separator=separator,
            ends=tokenizer.eos | frozenset(ends),
            stop=tuple(stop),
        )
        self._literal = tokenizer.controls & self._segmenter.marks.tag_tokens
        self._segment = self._segmenter.begin(prompt or ())
        self._detokenizer = Detokenizer(tokenizer.decode, before, half_character(tokenizer, before))
        self._without_text: list[_Read] = []  # tokens whose text is not known yet
        self._header: list[_Read] = []  # tokens of a header that the answer has begun
        self._undecided: list[_Read] = []  # the token of each character that the segmenter holds back
        self._parts: list[TextPart] = []  # not returned yet
        self._call = -1  # index of the last call opened
        self._call_text = ""  # its text so far
        self._last_call = last_call
        self._called_last = False
        self._unsorted = 0  # tokens of what may be the opening of thinking
        self._offset = 0  # characters of the answer so far
        self.completion_tokens = 0  # tokens emitted, up to and with the one that completed a stop string
        self.reasoning_tokens = 0  # tokens of thinking among them, with their markers

    @property
    def kind(self) -> TextKind:
        """Return the kind of text that comes next."""
        return self._segment.kind or "answer"

    @property
    def finished(self) -> str | None:
        """Return the stop string that was completed, if one was."""
        return self._segment.finished

    @property
    def ended(self) -> bool:
        """Return True after a stop string or the last call: no more text is read."""
        return self.finished is not None or self._called_last

    def count_in_front(self, text: str) -> None:
        """Count a text in front of the answer, such as its prompt, in the offsets of tokens."""
        self._offset += len(text)

    def read(self, round: Round, logprobs: Sequence[TokenLogprob] = ()) -> list[TextPart]:
        """Return the text of a round, joined by kind. `logprobs` belong to its tokens."""
        for i, token in enumerate(round.tokens):
            if self.ended:
                break
            source, position = (round.source, i + 1) if i < round.accepted else (None, 0)
            self._read_token(_Read(token, source, position, logprobs[i : i + 1]))
        return self._take_parts()

    def end(self) -> list[TextPart]:
        """Return the text that was held back."""
        if not self.ended:
            self._add_text(self._detokenizer.end())
            self._segment, pieces = self._segmenter.end(self._segment)
            self._show(pieces)
        return self._take_parts()

    def _read_token(self, read: _Read) -> None:
        before = self._segment
        self.completion_tokens += 1
        after = self._segmenter.after(before, read.token)
        if after is None:
            self._read_text(read)
        elif after is not before:
            header, self._header = [*self._header, read], []
            self._go_to(after)
            if after.kind is None:
                self._header = header[-max(len(after.header), 1) :]
            elif before.kind is None and after.kind == "call":
                written = self._tokenizer.decode_raw((*before.header, read.token))
                logprobs = [logprob for token in header for logprob in token.logprobs]
                self._add("call", written, [replace(read, logprobs=logprobs)] * len(written))
            elif after.header:  # it is not a header
                for token in header:
                    if not self.ended:
                        self._read_text(token)
        if "thinking" in (before.kind, self._segment.kind):
            self.reasoning_tokens += 1 + self._unsorted
            self._unsorted = 0
        else:
            self._unsorted = self._unsorted + 1 if self._segmenter.may_open(self._segment) else 0

    def _read_text(self, read: _Read) -> None:
        if read.token in self._literal and self.kind != "call":  # the decoder leaves special tokens out
            self._add_text(self._detokenizer.end())
            self._without_text.append(read)
            self._add_text(self._tokenizer.decode_raw([read.token]))
        else:
            self._without_text.append(read)
            self._add_text(self._detokenizer.add(read.token))

    def _go_to(self, segment: Segment) -> None:
        """Begin another kind of text, or the header of a message."""
        before = self.kind
        self._add_text(self._detokenizer.end())
        self._segment, pieces = self._segmenter.turn(self._segment, segment)
        self._show(pieces)
        is_call = self.kind == "call"
        self._detokenizer = Detokenizer(self._tokenizer.decode_raw if is_call else self._tokenizer.decode)
        if self.finished is not None or before == self.kind != "call":
            return
        if before == "call":
            self._add_part(TextPart("call", "", call=self._call, closed=True))
            self._called_last = self._last_call is not None and self._last_call(self._call_text)
        if is_call and not self._called_last:
            self._call, self._call_text = self._call + 1, ""
            self._add_part(TextPart("call", "", call=self._call))

    def _add_text(self, text: str) -> None:
        """Add text that the tokens without text completed."""
        if text:
            last = self._without_text[-1] if self._without_text else _Read(-1, None, 0, ())
            last.logprobs = [logprob for token in self._without_text for logprob in token.logprobs]
            self._undecided += [last] * len(text)
        if text or not self._detokenizer.waiting:
            self._without_text = []  # their text is given, or they have none
        self._segment, pieces = self._segmenter.read(self._segment, text)
        self._show(pieces)

    def _show(self, pieces: Sequence[SegmentText]) -> None:
        for kind, text in pieces:
            tokens, self._undecided = self._undecided[: len(text)], self._undecided[len(text) :]
            if kind is not None and text:
                self._add(kind, text, tokens)

    def _add(self, kind: TextKind, text: str, tokens: Sequence[_Read]) -> None:
        """Add a text, given the token of each of its characters."""
        spans, logprobs, start = list[TokenText](), list[TokenLogprob](), 0
        for read, characters in groupby(tokens):
            end = start + len(list(characters))
            spans.append(TokenText(text[start:end], read.source, read.position))
            offset = self._offset + (start if kind == "answer" else 0)
            logprobs += [replace(logprob, offset=offset) for logprob in read.logprobs]
            read.logprobs, start = (), end
        self._offset += len(text) if kind == "answer" else 0
        self._call_text += text if kind == "call" else ""
        call = self._call if kind == "call" else None
        self._add_part(TextPart(kind, text, tuple(logprobs), tuple(spans), call))

    def _add_part(self, part: TextPart) -> None:
        """Add a part, joined to the last one if both are of one kind and one call."""
        if self._parts and (self._parts[-1].kind, self._parts[-1].call) == (part.kind, part.call):
            last = self._parts.pop()
            part = replace(
                last,
                text=last.text + part.text,
                logprobs=last.logprobs + part.logprobs,
                spans=last.spans + part.spans,
                closed=part.closed,
            )
        self._parts.append(part)

    def _take_parts(self) -> list[TextPart]:
        parts, self._parts = self._parts, []
        return parts


def _call_tokens(tokenizer: Tokenizer, calls: Markers) -> tuple[int | None, int | None]:
    """Return the tokens around a call: None if there are none, or if headers mark calls."""
    opening, closing = tokenizer.token_id(calls.open), tokenizer.token_id(calls.close)
    in_headers = tokenizer.marks is not None and tokenizer.marks.marks_calls
    return (None, None) if in_headers or (calls.close and closing is None) else (opening, closing)
