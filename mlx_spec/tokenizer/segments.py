"""Tell answer, thinking and calls apart, and find stop strings: a state machine whose states are values.

A stream runs it over the text of an answer, a grammar over the bytes of tokens. A state needs no rollback: a
grammar keeps the states of a draft, and forgets them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

TextKind = Literal["answer", "thinking", "call"]
SegmentText = tuple[TextKind | None, str]  # a text and its kind; None if it is hidden, such as a tag


@dataclass(frozen=True)
class TextTag:
    """A tag of ordinary text, at which another kind of text begins."""

    text: str
    kind: TextKind | None  # of the text after it; None if only space may follow
    first: bool  # True if the tag counts only before any other text


@dataclass(frozen=True)
class Segment:
    """The state at a token of an answer: the kind of its text, and what may come next."""

    kind: TextKind | None  # None in a header, and between two messages
    fresh: bool = False  # True while there is only space, so that thinking may begin, perhaps once more
    header: tuple[int, ...] = ()  # tokens of a header so far; if `kind` is "answer", they were text after all
    trim: bool = False  # True if space is hidden until other text comes
    tags: tuple[TextTag, ...] | None = None  # that may come, in this order; None if no text was read
    undecided: str = ""  # text that may be a tag, or space before thinking
    held: str = ""  # text of the answer before it, which may become a stop string
    finished: str | None = None  # the stop string that was completed
    after_call: bool = False  # True until text comes that cannot be the separator of calls


class Marks:
    """The marks of one model. Without any, all text is answer."""

    opening: int | None = None  # the token that begins thinking in an answer without headers
    closing: int | None = None  # the token that ends thinking
    names: tuple[str, ...] = ()  # what a chat template that knows them has
    named: bool = False  # True if the chat template has these names
    marks_calls: bool = False  # True if the header of a message says that it is a call
    stops: tuple[str, ...] = ()  # tokens that end an answer, even if no configuration says so
    tag_tokens: frozenset[int | None] = frozenset()  # tags that are tokens
    text_tags: tuple[TextTag, ...] = ()  # that open and close thinking, if they are not tokens
    answer_tags: tuple[TextTag, ...] = ()  # around an answer that follows thinking

    def begin(self, prompt: Sequence[int]) -> Segment:
        """Return the segment of the first token after a prompt."""
        return Segment("answer")

    def after(self, segment: Segment, token: int) -> Segment | None:
        """Return the segment after a token that is a mark, or in a header; None if it is text."""
        return None

    def leaving(self, segment: Segment) -> int | None:
        """Return the token that ends the thinking; None if several can, or at another segment."""
        return self.closing if segment.kind == "thinking" else None

    def allowed(self, segment: Segment) -> frozenset[int] | None:
        """Return the tokens that may follow in a mark or a header; None if any may."""
        return None

    def forbidden(self, segment: Segment) -> frozenset[int]:
        """Return tokens that would begin the answer within thinking, or another message."""
        return frozenset()


class Segmenter:
    """Follows answers of one model. It has no state: methods take a segment and return the next one.

    `after` reads a token, and `read` the text of tokens that are text. `calls` are the tokens that open and
    close a call: None if a header opens it, or if it ends with the answer or the next call. Without `calls`
    all text outside of thinking is answer. A `separator` between two calls is hidden, like space. `ends` have
    no text. `spell` writes tags as the text has them.
    """

    def __init__(
        self,
        marks: Marks | None,
        *,
        calls: tuple[int | None, int | None] | None = None,
        separator: str = "",
        ends: Collection[int] = (),
        stop: Sequence[str] = (),
        spell: Callable[[str], str] = str,
    ) -> None:
        self.marks = marks or Marks()
        self._calls, self._ends, self._stop = calls, ends, stop
        self._separator = separator.strip()
        self._text_tags, self._answer_tags = (
            tuple(replace(tag, text=spell(tag.text)) for tag in tags)
            for tags in (self.marks.text_tags, self.marks.answer_tags)
        )

    def begin(self, prompt: Sequence[int]) -> Segment:
        segment = self.marks.begin(prompt)
        return replace(segment, trim=segment.kind == "thinking")

    def after(self, segment: Segment, token: int) -> Segment | None:
        """Return the segment after a token: `segment` if nothing changes, None if the token is text."""
        opening, closing = self._calls or (None, None)
        if token == opening and (segment.kind == "answer" or (segment.kind == "call" and closing is None)):
            return Segment("call")
        if token == closing and segment.kind == "call":
            return Segment("answer", fresh=True, trim=True, after_call=True)
        if token in self._ends:
            return Segment("answer") if segment.kind == "call" and closing is None else segment
        if segment.kind == "call" and opening is not None:
            return None
        after = self.marks.after(segment, token)
        is_unread = after is not None and after.kind == "call" and self._calls is None
        return Segment("answer") if is_unread else after

    def may_open(self, segment: Segment) -> bool:
        """Return True if the last token may belong to a header, or to a tag that opens thinking."""
        return segment.kind is None or any(tag.kind == "thinking" for tag in self._expected(segment)[:1])

    def turn(self, segment: Segment, after: Segment) -> tuple[Segment, list[SegmentText]]:
        """End the text of a segment, and go on with the one `after` it. Return that and the pieces."""
        is_same = (segment.kind or "answer") == (after.kind or "answer")
        is_space = segment.fresh and segment.kind == "answer" and after.kind == "thinking"
        follows = segment.after_call and after.kind == "call"
        is_separator = follows and segment.undecided.strip() == self._separator
        if is_space or is_separator:
            pieces: list[SegmentText] = [(None, segment.undecided)]
        else:
            segment, pieces = self.read(segment, "", final=True) if is_same else self.end(segment)
        return replace(after, held=segment.held, finished=segment.finished), pieces

    def read(self, segment: Segment, text: str, *, final: bool = False) -> tuple[Segment, list[SegmentText]]:
        """Return the segment after a text, and the pieces that are decided. If it is `final`, all of it is.

        Pieces are in the order of the text, and nothing is missing. A stop string and what follows it are.
        """
        kind, fresh, trim, tags = segment.kind, segment.fresh, segment.trim, self._expected(segment)
        if not (tags or fresh or trim):  # nothing is undecided then
            return self._stopped(segment, [(kind, text)])
        pieces: list[SegmentText] = []
        text = segment.undecided + text

        def take(count: int, kind: TextKind | None) -> None:
            nonlocal text
            pieces.append((kind, text[:count]))
            text = text[count:]

        if trim:
            take(_space(text), None)
            trim = not text
        # What may be a separator waits for the token after it.
        after_call = segment.after_call and not final and self._separator.startswith(text.rstrip())
        after_call = after_call and not any(string in text for string in self._stop)
        while text and not after_call:
            lead, tag = _space(text), tags[0] if tags else None
            if tag is None:
                fresh = fresh and lead == len(text)
                if fresh and kind == "answer" and not any(string in text for string in self._stop):
                    break
                take(len(text), kind)
                continue
            start = text.find(tag.text)
            if tag.first and start != lead:
                if tag.text.startswith(text[lead:]):
                    break
                tags = ()  # the tag is missing, and later ones do not come without it
            elif start < 0:
                take(len(text) - _pending_length(text, [tag.text]), kind)
                break
            elif tag.kind is None:
                take(start, kind)
                if not text[len(tag.text) :].strip():
                    break
                take(len(tag.text), kind)  # the tag was text
            else:
                take(start, None if tag.first else kind)
                take(len(tag.text), None)
                take(_space(text), None)
                kind, fresh, trim, tags = tag.kind, False, not text, tags[1:]
        if final:
            closes = bool(tags) and tags[0].kind is None and text.startswith(tags[0].text)
            take(len(text), None if closes else kind)
        segment = replace(segment, kind=kind, fresh=fresh, trim=trim, tags=tags, undecided=text)
        return self._stopped(replace(segment, after_call=after_call), pieces)

    def end(self, segment: Segment) -> tuple[Segment, list[SegmentText]]:
        """End the text of a segment, and with it the answer. Return the segment and the pieces held back."""
        segment, pieces = self.read(segment, "", final=True)
        return replace(segment, held=""), [*pieces, ("answer", segment.held)]

    def _expected(self, segment: Segment) -> tuple[TextTag, ...]:
        """Return the tags that may come. Tags of the answer come after thinking."""
        if segment.tags is not None:
            return segment.tags
        if segment.kind == "answer" and not segment.fresh:
            return self._answer_tags
        tags = self._text_tags[segment.kind == "thinking" :] if segment.kind in ("answer", "thinking") else ()
        return tags + self._answer_tags if tags else ()

    def _stopped(self, segment: Segment, pieces: list[SegmentText]) -> tuple[Segment, list[SegmentText]]:
        """Hold back text of the answer in which a stop string may begin, and finish at one."""
        if not self._stop:
            return segment, pieces
        held, shown = segment.held, list[SegmentText]()
        for kind, text in pieces:
            if kind != "answer":
                shown += [("answer", held), (kind, text)] if text else []
                held = "" if text else held
                continue
            held += text
            starts = [(held.find(string), string) for string in self._stop]
            complete = [(start + len(string), start, string) for start, string in starts if start >= 0]
            if complete:  # take the string that ends first, the longest if several end there
                _, start, string = min(complete)
                return replace(segment, held="", finished=string), [*shown, ("answer", held[:start])]
            count = len(held) - _pending_length(held, self._stop)
            shown.append(("answer", held[:count]))
            held = held[count:]
        return replace(segment, held=held), shown


def _space(text: str) -> int:
    return len(text) - len(text.lstrip())


def _pending_length(text: str, strings: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that may begin one of the strings."""
    longest = max((len(string) - 1 for string in strings), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(string.startswith(text[-length:]) for string in strings):
            return length
    return 0
