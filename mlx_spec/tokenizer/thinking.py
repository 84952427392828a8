"""How models mark their thinking: the tables of marks, and classes that follow an answer token by token.

Most models write tags around their thinking, at the beginning of an answer. Others write an answer as several
messages, whose headers tell thinking, answer and calls apart.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

TextKind = Literal["answer", "thinking", "call"]
HEADER_TOKENS = 48  # last tokens of a prompt that are searched for the header of a message


@dataclass(frozen=True)
class Markers:
    """The tags around a model's thinking, or around its tool calls."""

    open: str
    close: str
    header: str = ""  # text after the opening token that is not part of the thinking
    anywhere: bool = False  # True if thinking may come later in an answer, too, so the tags are never text


@dataclass(frozen=True)
class MessageFormat:
    """The format of an answer of several messages. Each header goes from a start token to a body token."""

    starts: tuple[str, ...]
    bodies: tuple[str, ...]
    end: str  # token after a message that others follow
    role: str  # how the text of a header begins, after the first start token
    kinds: Mapping[str, TextKind | None]  # of a message, by a pattern in its header; the first match counts
    headers: tuple[str, ...]  # of thinking and answer, for answers under a grammar
    others: tuple[str, ...] = ()  # further tokens of a header
    stops: tuple[str, ...] = ()  # tokens that end an answer, even if no configuration says so


# If a vocabulary has the tokens of several, the first one that the chat template names counts.
MESSAGES = (
    MessageFormat(  # gpt-oss
        starts=("<|start|>", "<|channel|>"),
        bodies=("<|message|>",),
        end="<|end|>",
        role="assistant to=",
        kinds={r"to=functions\.": "call", r"<\|channel\|>\s*analysis": "thinking", "": "answer"},
        headers=tuple(
            f"<|start|>assistant<|channel|>{name}<|message|>"
            for name in ("analysis", "final", "final json", "final <|constrain|>json")
        ),
        others=("<|constrain|>",),
        stops=("<|return|>", "<|call|>"),
    ),
    MessageFormat(  # Muse
        starts=("<|start|>",),
        bodies=("<|message|>",),
        end="<|eom|>",
        role="assistant to=",
        kinds={r"to=self\b": "thinking", "": "answer"},
        headers=tuple(f"<|start|>assistant to={name}<|message|>" for name in ("self", "user")),
    ),
    MessageFormat(  # Solar Open
        starts=("<|begin|>",),
        bodies=("<|think|>", "<|content|>"),
        end="<|end|>",
        role="assistant",
        kinds={r"<\|think\|>": "thinking", "": "answer"},
        headers=("<|begin|>assistant<|think|>", "<|begin|>assistant<|content|>"),
    ),
    MessageFormat(  # Kimi K3
        starts=("<|open|>", "<|close|>"),
        bodies=("<|sep|>",),
        end="<|close|>",
        role="",
        kinds={r"<\|open\|>think\b": "thinking", r"<\|open\|>response\b": "answer", "": None},
        headers=("<|open|>think<|sep|>", "<|open|>response<|sep|>", "<|close|>think<|sep|>"),
        stops=("<|end_of_msg|>",),
    ),
)
TAGS = (
    Markers("<|channel>", "<channel|>", "thought\n", anywhere=True),  # Gemma 4
    Markers("<think>", "</think>"),  # Qwen, DeepSeek, GLM, Kimi K2, MiniMax M2 and most others
    Markers("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    Markers("<seed:think>", "</seed:think>"),  # Seed-OSS
    Markers("<think:opensource>", "</think:opensource>"),  # Hunyuan 3
    Markers("<mm:think>", "</mm:think>"),  # MiniMax M3
    Markers("<longcat_think>", "</longcat_think>"),
    Markers("<|think:start|>", "<|think:end|>"),
    Markers("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    Markers("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    Markers("<thought>", "</thought>"),  # EXAONE Deep
    Markers("<thinking>", "</thinking>"),
    Markers("<reasoning>", "</reasoning>"),
    Markers("◁think▷", "◁/think▷"),  # Kimi-VL
    Markers("<|begin_of_thought|>", "<|end_of_thought|>"),  # OpenThinker
    Markers("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),  # Apriel
)
# Tags of ordinary text around an answer that follows thinking, where the chat template names them.
ANSWER_TAGS = (
    Markers("<answer>", "</answer>"),  # Hunyuan
    Markers("<response>", "</response>"),  # Granite 3.3, ERNIE
    Markers("<|begin_of_solution|>", "<|end_of_solution|>"),  # OpenThinker
)


class Tokens(Protocol):
    """The part of a tokenizer that marks need."""

    controls: frozenset[int]  # tokens that are not text

    def token_id(self, token: str) -> int | None: ...
    def encode(self, text: str) -> list[int]: ...
    def decode_raw(self, tokens: Sequence[int]) -> str: ...
    def vocabulary(self) -> dict[str, int]: ...
    @property
    def token_bytes(self) -> Callable[[int], bytes]: ...


@dataclass(frozen=True)
class AnswerPlace:
    """The place of the next token in an answer."""

    kind: TextKind | None  # of its text; None in a header, and between two messages
    fresh: bool = False  # True while there is only space, so that thinking may begin, perhaps once more
    hidden: bool = False  # True if the token before is not text
    header: tuple[int, ...] = ()  # tokens of a header so far; if `kind` is "answer", they were text after all
    tail: bytes = b""  # the end of the thinking, which may be the beginning of the closing tag


class Marks(ABC):
    """The marks of one model. Places are values, so a rejected draft needs no rollback here."""

    opening: int | None = None  # the token that begins thinking in an answer without headers
    answer_tags: Markers | None = None  # tags of text around an answer that follows thinking
    named: bool = False  # True if the chat template names them

    @abstractmethod
    def begin(self, prompt: Sequence[int]) -> AnswerPlace:
        """Return the place of the first token after a prompt."""

    @abstractmethod
    def after(self, place: AnswerPlace, token: int) -> AnswerPlace:
        """Return the place after a token."""

    def leaving(self, place: AnswerPlace) -> int | None:
        """Return the token that ends the thinking; None if several can."""
        return None

    def allowed(self, place: AnswerPlace) -> frozenset[int] | None:
        """Return the tokens that lead to thinking or to an answer; None if the place does not limit them."""
        return None

    def forbidden(self, place: AnswerPlace) -> frozenset[int]:
        """Return tokens that would begin the answer within thinking, or another message."""
        return frozenset()


class TagMarks(Marks):
    """Tags that are tokens. After the beginning of an answer they are text, unless `Markers.anywhere`."""

    def __init__(self, tags: Markers, tokens: Tokens, opening: int, closing: int) -> None:
        self.tags, self.opening, self.closing = tags, opening, closing
        self._tokens = tokens

    def begin(self, prompt: Sequence[int]) -> AnswerPlace:
        return _after_prompt(self.tags, self._tokens, prompt)

    def after(self, place: AnswerPlace, token: int) -> AnswerPlace:
        may_turn = place.fresh or self.tags.anywhere
        if token == self.closing and (place.kind == "thinking" or may_turn):
            return AnswerPlace("answer", hidden=True)
        if token == self.opening and may_turn:
            return AnswerPlace("thinking", fresh=True, hidden=True)
        return AnswerPlace(place.kind, place.fresh and _is_blank(self._tokens, token))

    def leaving(self, place: AnswerPlace) -> int | None:
        return self.closing if place.kind == "thinking" else None


class TextTagMarks(Marks):
    """Tags of ordinary text, written with any tokens. `after` follows answers under a grammar.

    `AnswerStream` searches the tags in the text instead.
    """

    def __init__(self, tags: Markers, tokens: Tokens) -> None:
        self.tags = tags
        self._tokens = tokens
        self._close = tags.close.encode()
        self._path = tokens.encode(tags.open)
        self.opening = self._path[0]
        self._forbidden: dict[bytes, frozenset[int]] = {}

    def begin(self, prompt: Sequence[int]) -> AnswerPlace:
        return _after_prompt(self.tags, self._tokens, prompt)

    def after(self, place: AnswerPlace, token: int) -> AnswerPlace:
        if place.kind == "thinking":
            tail = place.tail + self._tokens.token_bytes(token)
            if self._close in tail:
                return AnswerPlace("answer", hidden=True)
            return AnswerPlace("thinking", tail=self._kept(tail))
        expected = self._path[len(place.header)] if len(place.header) < len(self._path) else None
        if token == expected and (place.header or place.fresh):
            header = (*place.header, token)
            return (
                AnswerPlace("thinking")
                if len(header) == len(self._path)
                else AnswerPlace(None, header=header)
            )
        return AnswerPlace("answer", place.fresh and _is_blank(self._tokens, token))

    def allowed(self, place: AnswerPlace) -> frozenset[int] | None:
        return None if place.kind is not None else frozenset({self._path[len(place.header)]})

    def forbidden(self, place: AnswerPlace) -> frozenset[int]:
        """Return the tokens with text of the answer after the closing tag."""
        if place.kind != "thinking":
            return frozenset()
        if place.tail not in self._forbidden:
            read = self._tokens.token_bytes
            found = (i for i in self._tokens.vocabulary().values() if self._crosses(place.tail + read(i)))
            self._forbidden[place.tail] = frozenset(found)
        return self._forbidden[place.tail]

    def _crosses(self, text: bytes) -> bool:
        return bool(text.partition(self._close)[2].strip())

    def _kept(self, tail: bytes) -> bytes:
        """Return the longest end of `tail` that may begin the closing tag."""
        starts = range(max(0, len(tail) - len(self._close) + 1), len(tail))
        return next((tail[i:] for i in starts if self._close.startswith(tail[i:])), b"")


class MessageMarks(Marks):
    """Headers of messages."""

    def __init__(self, form: MessageFormat, tokens: Tokens) -> None:
        self.form = form
        self._tokens = tokens
        ids = {name: tokens.token_id(name) for name in (*form.starts, *form.bodies, *form.others, form.end)}
        self._starts = [ids[name] for name in form.starts]
        self._bodies = {ids[name] for name in form.bodies}
        self._end = ids[form.end]
        self._controls = set(ids.values())
        self._paths = [tuple(tokens.encode(header)) for header in form.headers]

    @property
    def marks_calls(self) -> bool:
        """Return True if a header says that a message is a call."""
        return "call" in self.form.kinds.values()

    def begin(self, prompt: Sequence[int]) -> AnswerPlace:
        end = list(prompt[-HEADER_TOKENS:])
        starts = [i for i, token in enumerate(end) if token in self._starts]
        whole = [i for i in starts if end[i] == self._starts[0]] or starts
        place = AnswerPlace("answer")
        for token in end[whole[-1] :] if whole else ():
            place = self.after(place, token)
        return replace(place, header=()) if place.kind is not None else place

    def after(self, place: AnswerPlace, token: int) -> AnswerPlace:
        if place.kind is not None:
            if token in self._starts:
                return AnswerPlace(None, hidden=True, header=(token,))
            return AnswerPlace(None, hidden=True) if token == self._end else AnswerPlace(place.kind)
        header = (*place.header, token)
        if token in self._bodies:
            return AnswerPlace(self._kind(header) if place.header else None, hidden=True)
        if token in self._controls:
            return AnswerPlace(None, hidden=True, header=(token,) if token == self._starts[0] else header)
        if self._may_be_header(header) or (not place.header and _is_blank(self._tokens, token)):
            return AnswerPlace(None, hidden=True, header=header if place.header else ())
        return AnswerPlace("answer", header=header)

    def leaving(self, place: AnswerPlace) -> int | None:
        return self._end if place.kind == "thinking" else None

    def allowed(self, place: AnswerPlace) -> frozenset[int] | None:
        """Return how a header may go on; None also if the prompt has begun an unknown one."""
        if place.kind is not None:
            return None
        read = len(place.header)
        fitting = (path for path in self._paths if path[:read] == place.header and len(path) > read)
        return frozenset(path[read] for path in fitting if read or path[0] != self._end) or None

    def forbidden(self, place: AnswerPlace) -> frozenset[int]:
        if place.kind != "thinking":
            return frozenset()
        return frozenset(i for i in self._controls if i is not None and i != self._end)

    def _kind(self, header: tuple[int, ...]) -> TextKind | None:
        written = self._tokens.decode_raw(header)
        return next(kind for pattern, kind in self.form.kinds.items() if re.search(pattern, written))

    def _may_be_header(self, header: tuple[int, ...]) -> bool:
        """Return True unless text stands where a header has none."""
        if len(header) < 2 or len(header) > HEADER_TOKENS:
            return False
        if header[0] != self._starts[0] or self._controls.intersection(header[1:]):
            return True
        written = self._tokens.decode_raw(header[1:])
        return self.form.role.startswith(written) or written.startswith(self.form.role)


def find_marks(source: str, tokens: Tokens) -> Marks | None:
    """Return the marks of a model by its chat template and its vocabulary; None if it has none.

    Tags that are not tokens count only where the template names them.
    """
    found: list[Marks] = []
    by_text: list[Marks] = []
    for form in MESSAGES:
        names = (*form.starts, *form.bodies, form.end)
        if all(tokens.token_id(name) is not None for name in names):
            found.append(MessageMarks(form, tokens))
            found[-1].named = all(name in source for name in names)
    for tags in TAGS:
        opening, closing = tokens.token_id(tags.open), tokens.token_id(tags.close)
        if opening is not None and closing is not None:
            found.append(TagMarks(tags, tokens, opening, closing))
            found[-1].named = tags.close in source
        elif tags.close in source:
            by_text.append(TextTagMarks(tags, tokens))
            by_text[-1].named = True
    marks = next((each for each in [*found, *by_text] if each.named), found[0] if found else None)
    if marks is not None:
        named = (tags for tags in ANSWER_TAGS if tags.open in source and tags.close in source)
        marks.answer_tags = next(named, None)
    return marks


def _after_prompt(tags: Markers, tokens: Tokens, prompt: Sequence[int]) -> AnswerPlace:
    # An opening tag is looked for in the last 64 tokens of a prompt.
    end = tokens.decode_raw(prompt[-64:]).rstrip()
    if end.endswith((tags.open + tags.header).rstrip()):
        return AnswerPlace("thinking", fresh=True)
    return AnswerPlace("answer", fresh=not end.endswith(tags.close))


def _is_blank(tokens: Tokens, token: int) -> bool:
    return token in tokens.controls or not tokens.token_bytes(token).strip()
