"""How models mark their thinking: the tables of marks, and what each kind of marks makes of a token.

Most models write tags around their thinking, at the beginning of an answer. Others write an answer as several
messages, whose headers tell thinking, answer and calls apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from mlx_spec.tokenizer.segments import Marks, Segment, TextKind, TextTag

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

    @property
    def names(self) -> tuple[str, ...]:
        """Return the tokens that every answer of this format may have."""
        return (*self.starts, *self.bodies, self.end)


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


_THINKING = re.compile(
    rf"\s*(?:{'|'.join(f'{re.escape(tags.open)}.*?{re.escape(tags.close)}' for tags in TAGS)})\s*", re.DOTALL
)


def thinking_end(content: str) -> int:
    """Return the length of the thinking, tags and space included, with which an answer begins."""
    begun = _THINKING.match(content)
    return begun.end() if begun else 0


class Tokens(Protocol):
    """The part of a tokenizer that marks need."""

    controls: frozenset[int]  # tokens that are not text

    def token_id(self, token: str) -> int | None: ...
    def encode(self, text: str) -> list[int]: ...
    def decode_raw(self, tokens: Sequence[int]) -> str: ...
    def vocabulary(self) -> dict[str, int]: ...
    @property
    def token_bytes(self) -> Callable[[int], bytes]: ...


class TagMarks(Marks):
    """Tags around thinking."""

    def __init__(self, tags: Markers, tokenizer: Tokens) -> None:
        self.tags, self.names = tags, (tags.close,)
        self._tokenizer = tokenizer

    def begin(self, prompt: Sequence[int]) -> Segment:
        end = self._tokenizer.decode_raw(prompt[-64:]).rstrip()  # an opening tag has no more tokens
        if end.endswith((self.tags.open + self.tags.header).rstrip()):
            return Segment("thinking", fresh=True)
        return Segment("answer", fresh=not end.endswith(self.tags.close))


class TokenTagMarks(TagMarks):
    """Tags that are tokens. After the beginning of an answer they are text, unless `Markers.anywhere`."""

    def __init__(self, tags: Markers, tokenizer: Tokens) -> None:
        super().__init__(tags, tokenizer)
        self.opening, self.closing = map(tokenizer.token_id, (tags.open, tags.close))
        self.tag_tokens = frozenset({self.opening, self.closing})
        self._header = (TextTag(tags.header, "thinking", first=True),) if tags.header else ()

    def after(self, segment: Segment, token: int) -> Segment | None:
        may_turn = segment.fresh or self.tags.anywhere
        if token == self.closing and (segment.kind == "thinking" or may_turn):
            return Segment("answer", trim=True)
        if token == self.opening and may_turn:
            return Segment("thinking", fresh=True, trim=True, tags=self._header)
        return None


class TextTagMarks(TagMarks):
    """Tags of ordinary text, written with any tokens. A grammar writes the opening one with few tokens."""

    def __init__(self, tags: Markers, tokenizer: Tokens) -> None:
        super().__init__(tags, tokenizer)
        self.text_tags = text_tags(tags, "thinking", "answer")
        self._close = tags.close.encode()
        self.opening, *path = tokenizer.encode(tags.open)
        begun = as_letters(tokenizer.token_bytes(self.opening))
        self._path: dict[str, int] = {}  # the next token of the opening tag, by the text so far
        for token in path:
            self._path[begun] = token
            begun += as_letters(tokenizer.token_bytes(token))
        self._forbidden: dict[str, frozenset[int]] = {}

    def allowed(self, segment: Segment) -> frozenset[int] | None:
        is_begun = segment.kind == "answer" and segment.undecided in self._path
        return frozenset({self._path[segment.undecided]}) if is_begun else None

    def forbidden(self, segment: Segment) -> frozenset[int]:
        """Return the tokens with text of the answer after the closing tag."""
        if segment.kind != "thinking":
            return frozenset()
        if segment.undecided not in self._forbidden:
            tail, read = segment.undecided.encode("latin-1"), self._tokenizer.token_bytes
            tokens = self._tokenizer.vocabulary().values()
            crossing = (i for i in tokens if (tail + read(i)).partition(self._close)[2].strip())
            self._forbidden[segment.undecided] = frozenset(crossing)
        return self._forbidden[segment.undecided]


class MessageMarks(Marks):
    """Headers of messages."""

    def __init__(self, form: MessageFormat, tokenizer: Tokens) -> None:
        self.form, self.stops, self.names = form, form.stops, form.names
        self.marks_calls = "call" in form.kinds.values()
        self._tokenizer = tokenizer
        ids = {name: tokenizer.token_id(name) for name in (*form.names, *form.others)}
        self._starts = [ids[name] for name in form.starts]
        self._bodies = {ids[name] for name in form.bodies}
        self.closing = ids[form.end]
        self._controls = set(ids.values())
        self._paths = [tuple(tokenizer.encode(header)) for header in form.headers]

    def begin(self, prompt: Sequence[int]) -> Segment:
        end = list(prompt[-HEADER_TOKENS:])
        starts = [i for i, token in enumerate(end) if token in self._starts]
        whole = [i for i in starts if end[i] == self._starts[0]] or starts
        segment = Segment("answer")
        for token in end[whole[-1] :] if whole else ():
            segment = self.after(segment, token) or segment
        return replace(segment, header=()) if segment.kind is not None else segment

    def after(self, segment: Segment, token: int) -> Segment | None:
        if segment.kind is not None and token in self._starts:
            return Segment(None, header=(token,))
        if segment.kind is not None:
            return Segment(None) if token == self.closing else None
        header = (*segment.header, token)
        is_blank = token in self._tokenizer.controls or not self._tokenizer.token_bytes(token).strip()
        if token in self._bodies:
            return Segment(self._kind(header) if segment.header else None)
        if token in self._controls:
            return Segment(None, header=(token,) if token == self._starts[0] else header)
        if self._may_be_header(header) or (not segment.header and is_blank):
            return Segment(None, header=header if segment.header else ())
        return Segment("answer", header=header)

    def allowed(self, segment: Segment) -> frozenset[int] | None:
        """Return how a header may go on; None also if the prompt has begun an unknown one."""
        if segment.kind is not None:
            return None
        read = len(segment.header)
        fitting = (path for path in self._paths if path[:read] == segment.header and len(path) > read)
        return frozenset(path[read] for path in fitting if read or path[0] != self.closing) or None

    def forbidden(self, segment: Segment) -> frozenset[int]:
        if segment.kind != "thinking":
            return frozenset()
        return frozenset(i for i in self._controls if i is not None and i != self.closing)

    def _kind(self, header: tuple[int, ...]) -> TextKind | None:
        written = self._tokenizer.decode_raw(header)
        return next(kind for pattern, kind in self.form.kinds.items() if re.search(pattern, written))

    def _may_be_header(self, header: tuple[int, ...]) -> bool:
        """Return True unless text stands where a header has none."""
        if len(header) < 2 or len(header) > HEADER_TOKENS:
            return False
        if header[0] != self._starts[0] or self._controls.intersection(header[1:]):
            return True
        written = self._tokenizer.decode_raw(header[1:])
        return self.form.role.startswith(written) or written.startswith(self.form.role)


def find_marks(source: str, tokenizer: Tokens) -> Marks | None:
    """Return the marks of a model by its chat template and its vocabulary; None if it has none.

    Tags that are not tokens count only where the template names them.
    """

    def are_tokens(*names: str) -> bool:
        return None not in map(tokenizer.token_id, names)

    candidates: list[Marks] = [MessageMarks(form, tokenizer) for form in MESSAGES if are_tokens(*form.names)]
    tokens = [tags for tags in TAGS if are_tokens(tags.open, tags.close)]
    candidates += [TokenTagMarks(tags, tokenizer) for tags in tokens]
    candidates += [
        TextTagMarks(tags, tokenizer) for tags in TAGS if tags.close in source and tags not in tokens
    ]
    for marks in candidates:
        marks.named = all(name in source for name in marks.names)
    around = next((tags for tags in ANSWER_TAGS if tags.open in source and tags.close in source), None)
    first = next((marks for marks in candidates if marks.named), next(iter(candidates), None))
    if first is not None and around is not None:
        first.answer_tags = text_tags(around, "answer", None)
    return first


def text_tags(tags: Markers, inside: TextKind, after: TextKind | None) -> tuple[TextTag, TextTag]:
    """Return tags of ordinary text, by the kinds of text that follow each."""
    return TextTag(tags.open, inside, first=True), TextTag(tags.close, after, first=False)


def as_letters(written: bytes) -> str:
    """Return bytes as a text with one character for each."""
    return written.decode("latin-1")
