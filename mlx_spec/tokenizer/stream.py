"""Split the text of a streaming answer into thinking, tool calls and answer, and cut it at stop strings.

Every piece of text keeps the drafter and the log-probability of its tokens, so tokens are read one by one.
mlx-lm's detokenizers are not used: they need transformers' tokenizer objects, and do not say whether a token
waits for its text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from mlx_spec.errors import InvalidValue
from mlx_spec.tokenizer.detokenizer import Detokenizer, half_character
from mlx_spec.tokenizer.thinking import AnswerPlace, Markers, MessageMarks, TagMarks, TextKind, TextTagMarks
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


@dataclass(frozen=True)
class _Read:
    """A token of the answer."""

    token: int
    span: TokenText
    logprobs: Sequence[TokenLogprob]


@dataclass(frozen=True)
class _TextTag:
    """A tag of ordinary text, at which another kind of text begins."""

    tag: str
    kind: TextKind | None  # of the text after it; None if only space may follow
    first: bool  # True if the tag counts only before any other text


class AnswerStream:
    """Splits the answer to `prompt` into kinds of text, and cuts it at stop strings.

    The marks of thinking (`thinking.py`) are hidden in the places where the model uses them; elsewhere tags
    are text. Special tokens outside of tool calls are hidden. Text between `calls` markers is of kind "call",
    with special tokens as text. Calls stand in the answer, never in thinking. Both markers must be tokens of
    the vocabulary. Without a closing marker a call ends with the answer, or at the next opening marker. If
    headers mark calls, the text of a call begins with its header. Without a prompt (None) all text is answer
    and nothing is marked. Tokens in `ends` have no text, like the end-of-text tokens. A text that continues
    the tokens `before` keeps the space between them.

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
        before: Sequence[int] = (),
        last_call: Callable[[str], bool] | None = None,
    ) -> None:
        if "" in stop:
            raise InvalidValue("a stop string is empty: leave it out")
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ends = tokenizer.eos | frozenset(ends)
        self._marks = None if prompt is None else tokenizer.marks
        self._reads_calls = prompt is not None and calls is not None
        tags = self._marks.tags if isinstance(self._marks, TagMarks) else None
        self._literal = tokenizer.controls.intersection(
            map(tokenizer.token_id, (tags.open, tags.close) if tags else ())
        )
        self._opening, self._closing = self._call_tokens(calls if self._reads_calls else None)
        # Tokens whose text is not known yet, and tokens of a header that the answer has begun.
        self._without_text: list[_Read] = []
        self._header_read: list[_Read] = []
        self._undecided: list[TextPart] = []  # may be a tag of ordinary text, or space before thinking
        self._held: list[TextPart] = []  # of kind answer: may become a stop string
        self._parts: list[TextPart] = []  # not returned yet
        self._call = -1  # index of the last call opened
        self._call_text = ""  # its text so far
        self._last_call = last_call
        self._called_last = False
        self._unsorted = 0  # tokens of what may be the opening of thinking
        self._detokenizer: Detokenizer
        self._place: AnswerPlace
        self.kind: TextKind  # of the text that comes next
        self.finished: str | None = None  # the stop string that was completed
        self.completion_tokens = 0  # tokens emitted, up to and with the one that completed a stop string
        self.reasoning_tokens = 0  # tokens of thinking among them, with their markers
        self._offset = 0  # characters of the answer so far
        place = AnswerPlace("answer") if self._marks is None or prompt is None else self._marks.begin(prompt)
        self._begin(place, trim=place.kind == "thinking", header="", before=before)

    def count_in_front(self, text: str) -> None:
        """Count a text in front of the answer, such as its prompt, in the offsets of tokens."""
        self._offset += len(text)

    def read(self, round: Round, logprobs: Sequence[TokenLogprob] = ()) -> list[TextPart]:
        """Return the text of a round, joined by kind. `logprobs` belong to its tokens."""
        for i, token in enumerate(round.tokens):
            if self.ended:
                break
            source, position = (round.source, i + 1) if i < round.accepted else (None, 0)
            self._read_token(_Read(token, TokenText("", source, position), logprobs[i : i + 1]))
        return self._take_parts()

    @property
    def ended(self) -> bool:
        """Return True after a stop string or the last call: no more text is read."""
        return self.finished is not None or self._called_last

    def end(self) -> list[TextPart]:
        """Return the text that was held back."""
        if not self.ended:
            self._end_kind()
            self._release()
        return self._take_parts()

    # --- tokens

    def _read_token(self, read: _Read) -> None:
        before, token = self._place.kind and self.kind, read.token
        self.completion_tokens += 1
        if before == "call" and self._opening is not None:
            if token == self._closing:
                self._go_to(AnswerPlace("answer", fresh=True), trim=True)
            elif token == self._opening and self._closing is None:
                self._go_to(AnswerPlace("call"))
            elif token not in self._ends:
                self._read_text(read)
            elif self._closing is None:
                self._go_to(AnswerPlace("answer"))
        elif before == "answer" and token == self._opening:
            self._go_to(AnswerPlace("call"))
        elif token not in self._ends:
            self._follow(read)
        elif before == "call":
            self._go_to(AnswerPlace("answer"))
        self._count_reasoning(before)

    def _call_tokens(self, calls: Markers | None) -> tuple[int | None, int | None]:
        """Return the tokens around a call; None if there are none, or if headers mark calls."""
        if calls is None or (isinstance(self._marks, MessageMarks) and self._marks.marks_calls):
            return None, None
        opening, closing = self._tokenizer.token_id(calls.open), self._tokenizer.token_id(calls.close)
        return (opening, closing) if closing is not None or not calls.close else (None, None)

    def _follow(self, read: _Read) -> None:
        """Read a token that may be a mark of thinking, or part of the header of a message."""
        before = place = self._place
        if self._marks is not None and not isinstance(self._marks, TextTagMarks):
            place = self._marks.after(before, read.token)
        if place.kind is None:
            if before.kind is not None:
                self._go_to(place)
            self._header_read = [*self._header_read, read] if len(place.header) > 1 else [read]
            self._place = place
        elif before.kind is None:
            header, self._header_read = [*self._header_read, read], []
            is_call = place.kind == "call" and self._reads_calls
            self._go_to(place if is_call or place.kind != "call" else AnswerPlace("answer"))
            if is_call:
                self._add_header(self._tokenizer.decode_raw((*before.header, read.token)), header)
            elif not place.hidden:  # it is not a header
                for each in header:
                    self._read_text(each)
        elif place.hidden:
            header_text = self._marks.tags.header if isinstance(self._marks, TagMarks) else ""
            self._go_to(place, trim=True, header=header_text if place.kind == "thinking" else "")
        else:
            self._place = place
            self._read_text(read)

    def _count_reasoning(self, before: TextKind | None) -> None:
        may_open = self._place.kind is None or (self._text_tags and self._text_tags[0].kind == "thinking")
        if "thinking" in (before, self._place.kind and self.kind):
            self.reasoning_tokens += 1 + self._unsorted
            self._unsorted = 0
        else:
            self._unsorted = self._unsorted + 1 if may_open else 0

    def _read_text(self, read: _Read) -> None:
        """Read a token that is text."""
        self._without_text.append(read)
        if read.token in self._literal and self.kind != "call":  # the decoder leaves special tokens out
            self._without_text.pop()
            self._add_text(self._detokenizer.end())
            self._without_text.append(read)
            self._add_text(self._tokenizer.decode_raw([read.token]))
        else:
            self._add_text(self._detokenizer.add(read.token))

    # --- kinds of text

    def _go_to(self, place: AnswerPlace, *, trim: bool = False, header: str = "") -> None:
        """Begin another kind of text, or the header of a message."""
        before = self.kind
        if self._holds_space and place.kind == "thinking":
            self._undecided.clear()
        self._end_kind()
        self._begin(place, trim=trim, header=header)
        if self.finished is not None or before == self.kind != "call":
            return
        self._release()
        if before == "call":
            self._add_part(TextPart("call", "", call=self._call, closed=True))
            self._called_last = self._last_call is not None and self._last_call(self._call_text)
        if self.kind == "call" and not self._called_last:
            self._call, self._call_text = self._call + 1, ""
            self._add_part(TextPart("call", "", call=self._call))

    def _begin(self, place: AnswerPlace, *, trim: bool, header: str, before: Sequence[int] = ()) -> None:
        self._place, self.kind = place, place.kind or "answer"
        self._trim, self._expected_header, self._may_be_header = trim, header, ""
        decode = self._tokenizer.decode_raw if self.kind == "call" else self._tokenizer.decode
        self._detokenizer = Detokenizer(decode, before, half_character(self._tokenizer, before))
        self._text_tags: list[_TextTag] = []
        self._holds_space = place.kind == "answer" and place.fresh
        if self._marks is None or place.kind in (None, "call"):
            return
        around = self._marks.answer_tags
        if isinstance(self._marks, TextTagMarks) and (place.fresh or place.kind == "thinking"):
            tags = self._marks.tags
            opening = [_TextTag(tags.open, "thinking", first=True)] if place.kind == "answer" else []
            self._text_tags = [*opening, _TextTag(tags.close, "answer", first=False)]
        if around is not None and (self._text_tags or not (place.fresh or place.kind == "thinking")):
            self._text_tags += [
                _TextTag(around.open, "answer", first=True),
                _TextTag(around.close, None, first=False),
            ]

    def _end_kind(self) -> None:
        """Add the rest of this kind of text."""
        self._add_text(self._detokenizer.end(), final=True)
        whole = _joined(self._undecided)
        if self._text_tags and self._text_tags[0].kind is None and whole.startswith(self._text_tags[0].tag):
            self._undecided.clear()
        self._pass(len(whole))

    def _add_header(self, written: str, read: Sequence[_Read]) -> None:
        """Add the header of a call."""
        logprobs = tuple(each for token in read for each in token.logprobs)
        span = replace(read[-1].span, text=written)
        self._add_part(TextPart("call", written, logprobs, (span,), self._call))

    def _add_text(self, new: str, *, final: bool = False) -> None:
        """Add text that the tokens without text completed."""
        text = self._visible(new, final=final)
        if text:
            last = self._without_text[-1].span if self._without_text else TokenText("", None, 0)
            span = replace(last, text=text)
            found = (each for read in self._without_text for each in read.logprobs)
            logprobs = tuple(replace(each, offset=self._offset) for each in found)
            part = TextPart(self.kind, text, logprobs, (span,), self._call if self.kind == "call" else None)
            self._offset += len(text) if self.kind == "answer" else 0
            self._undecided.append(part)
            self._decide()
        if text or not (self._may_be_header or self._detokenizer.waiting):
            self._without_text.clear()  # their text is given, or they have none

    def _visible(self, new: str, *, final: bool) -> str:
        """Return new text without the header of its kind and the space before it."""
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

    # --- tags of ordinary text

    def _decide(self) -> None:
        """Add the text that can be neither a tag of ordinary text nor space before thinking."""
        while self._undecided:
            text = _joined(self._undecided)
            lead = text.lstrip()
            if not self._text_tags:
                if self._holds_space and not lead and not any(string in text for string in self._stop):
                    return
                self._holds_space = False
                self._pass(len(text))
                return
            expected = self._text_tags[0]
            at = text.find(expected.tag)
            if expected.first and at != len(text) - len(lead):
                if expected.tag.startswith(lead):
                    return
                self._text_tags = []  # the tag is missing, and later ones do not come without it
            elif at < 0:
                self._pass(len(text) - _pending_length(text, [expected.tag]))
                return
            elif expected.kind is None:
                self._pass(at)
                if not text[at + len(expected.tag) :].strip():
                    return
                self._pass(len(expected.tag))  # the tag was text
            else:
                self._pass(at if not expected.first else 0)
                self._take_tag(expected, at + len(expected.tag) if expected.first else len(expected.tag))

    def _take_tag(self, expected: _TextTag, dropped: int) -> None:
        """Drop the `dropped` characters of a tag and the space after it, and begin the next kind."""
        self._drop(dropped)
        self._release()
        rest = _joined(self._undecided)
        self._drop(len(rest) - len(rest.lstrip()))
        self._trim = not self._undecided
        self._text_tags, self._holds_space = self._text_tags[1:], False
        self.kind = expected.kind or self.kind
        self._place = AnswerPlace(self.kind)

    def _pass(self, count: int) -> None:
        """Add the first `count` undecided characters as text of this kind."""
        for part in _take(self._undecided, count):
            if self.kind == "answer":
                self._held.append(replace(part, kind="answer"))
                self._check_stops()
            else:
                self._add_part(replace(part, kind=self.kind))
            if self.finished is not None:
                self._undecided.clear()
                return

    def _drop(self, count: int) -> None:
        """Drop the first `count` undecided characters. The rest of a token gets its logprobs."""
        taken = _take(self._undecided, count)
        if taken and self._undecided and not self._undecided[0].logprobs:
            self._undecided[0] = replace(self._undecided[0], logprobs=taken[-1].logprobs)

    # --- stop strings

    def _check_stops(self) -> None:
        """Release the text in which no stop string can begin, or finish at one."""
        text = _joined(self._held)
        starts = [(text.find(string), string) for string in self._stop]
        complete = [(start + len(string), start, string) for start, string in starts if start >= 0]
        if complete:  # take the string that ends first, the longest if several end there
            _, start, self.finished = min(complete)
            self._release(start)
            self._held.clear()
        else:
            self._release(len(text) - _pending_length(text, self._stop))

    def _release(self, count: int | None = None) -> None:
        """Release the first `count` characters that were held back; None for all."""
        for part in _take(self._held, len(_joined(self._held)) if count is None else count):
            self._add_part(part)

    def _add_part(self, part: TextPart) -> None:
        """Add a part, joined to the last one if both are of one kind and one call."""
        parts = self._parts
        self._call_text += part.text if part.kind == "call" else ""
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


def _pending_length(text: str, strings: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that may begin one of the strings."""
    longest = max((len(string) - 1 for string in strings), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(string.startswith(text[-length:]) for string in strings):
            return length
    return 0


def _joined(parts: Sequence[TextPart]) -> str:
    return "".join(part.text for part in parts)


def _take(parts: list[TextPart], count: int) -> list[TextPart]:
    """Remove the first `count` characters. Return their parts."""
    taken: list[TextPart] = []
    while count > 0 and parts:
        part = parts.pop(0)
        if len(part.text) > count:
            part, rest = _split(part, count)
            parts.insert(0, rest)
        count -= len(part.text)
        taken.append(part)
    return taken


def _split(part: TextPart, at: int) -> tuple[TextPart, TextPart]:
    """Split the text of one token; its logprob goes with the first half."""
    span = part.spans[0]
    first, rest = replace(span, text=span.text[:at]), replace(span, text=span.text[at:])
    return (
        replace(part, text=first.text, spans=(first,)),
        replace(part, text=rest.text, spans=(rest,), logprobs=()),
    )
