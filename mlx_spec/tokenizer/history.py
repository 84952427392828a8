"""Render a conversation as a prompt, in a form that the chat template takes, with all of its text.

A template first gets the messages as transformers would give them. If it refuses them or leaves out a text,
it gets them in other forms, which say the same. A text that no form can show is refused. Only the reasoning
of earlier turns may be dropped by the template.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_spec.errors import InvalidValue
from mlx_spec.tokenizer.chat_template import ChatTemplate, Message
from mlx_spec.tokenizer.forms import (
    BREAK,
    FORM_GROUPS,
    ORDER,
    TAG,
    Form,
    Messages,
    filled,
    map_texts,
    untagged,
)
from mlx_spec.tokenizer.recent import Recent

FIRST_MARK, MARKS = 0x20000, 0xA600  # rare ideographs, one for each text: no template looks for them
NEW_MARK = chr(FIRST_MARK + MARKS)  # stands for the mark that a text will have
MARK = re.compile(f"[{chr(FIRST_MARK)}-{chr(FIRST_MARK + MARKS - 1)}]")
SIGN = "a part written as data"  # a key added to parts of messages: in a prompt if a part was printed
SWITCH = re.compile(r"(?<!\S)/\w+(?!\S)")  # such as /no_think, which templates read and remove


class LostText(InvalidValue):
    """A text that is not in the prompt: of the message at `index`, or of a tool if that is None."""

    def __init__(self, text: str, role: str, index: int | None, shown: int) -> None:
        short = text if len(text) <= 40 else f"{text[:40]}..."
        where = "a tool" if index is None else f"message {index} of role {role!r}"
        super().__init__(
            f"the chat template leaves out {json.dumps(short, ensure_ascii=False)} of {where}: send the "
            "request without it, or ask a model whose template shows it"
        )
        self.index = index
        self.shown = shown  # texts before it that are in the prompt


@dataclass(frozen=True)
class Rendered:
    """A prompt, and where other prompts may part from it.

    The places are near the ends of the system prompt, of the user's last message and of the message before
    it, and never after them, as far as marks tell.
    """

    text: str
    turns: Sequence[int] = ()


def render_history(
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    thinking: bool | None,
    tools: Sequence[Message] = (),
    variables: Mapping[str, Any] | None = None,
    known: KnownChecks | None = None,
) -> Rendered:
    """Return the prompt of a conversation, and its turns. `known` has checks of its earlier turns.

    Raises InvalidValue if the template refuses the messages in every form, LostText if it leaves out a text.
    """
    originals = [dict(message) for message in messages]
    templates = [template]
    if not tools and template.for_tools is not None and any(m.get("tool_calls") for m in originals):
        templates.append(template.for_tools)  # it may be the only one that shows calls
    problems: list[InvalidValue] = []
    known = known or KnownChecks(Recent[CheckedPrompt](), None)
    for source in templates:
        check = _TextCheck(known, _Settings(source, thinking, dict(variables or {})), tools)
        attempts = _Attempts(originals, check)
        if (prompt := attempts.best()) is not None:
            return Rendered(prompt, check.turns if prompt == check.shown else ())
        problems += attempts.problems
    raise next((problem for problem in problems if isinstance(problem, LostText)), problems[0])


class _Attempts:
    """Tries the forms of one conversation until a prompt has all of its text."""

    def __init__(self, messages: Messages, check: _TextCheck) -> None:
        self._messages, self._check = messages, check
        self._loses = False  # a form was rendered, and a text was missing
        self.problems: list[InvalidValue] = []  # errors of the messages without forms

    def best(self) -> str | None:
        """Return the prompt, with as few forms as needed; None if no forms work."""
        chosen: list[Form] = []
        prompt, reached = self._attempt(chosen)
        if prompt is not None:
            return prompt
        useful = [[form for form in group if form(self._messages) != self._messages] for group in FORM_GROUPS]
        groups: list[list[Form]] = [*useful, [untagged]]
        left = [form for group in groups for form in group]
        while left:  # keep each form that shows more texts than the forms before
            form = left.pop(0)
            prompt, shown = self._attempt([*chosen, form])
            if prompt is not None:
                return prompt
            if shown > reached:
                chosen, reached = [*chosen, form], shown
                left = [other for group in groups for other in group if not set(group) & set(chosen)]
        for combination in itertools.product(*([*group, None] for group in useful)):
            forms = [form for form in combination if form is not None]
            for other in (forms, [*forms, untagged]):
                if self._attempt(other)[0] is not None:
                    return self._shortest(other)
        return None

    def _attempt(self, forms: Sequence[Form]) -> tuple[str | None, int]:
        """Return the prompt; else None, and how many texts come before the lost one, -1 if refused."""
        is_broken = untagged in forms
        # Tags are broken only if a template loses text, perhaps at a tag. It may refuse a tag for a reason.
        if is_broken and (not self._loses or BREAK in json.dumps(self._messages, ensure_ascii=False)):
            return None, -1
        messages = self._messages
        for form in sorted(forms, key=ORDER.index):
            messages = form(messages)
        try:
            prompt = self._check.checked(messages)
        except InvalidValue as error:
            if set(forms) <= {filled}:  # the messages still have no form
                self.problems.append(error)
            if not isinstance(error, LostText):
                return None, -1
            self._loses = True
            return None, error.shown
        if is_broken and json.dumps(BREAK)[1:-1] in prompt:
            return None, -1  # a break that was escaped cannot be taken out
        return prompt.replace(BREAK, "") if is_broken else prompt, 0

    def _shortest(self, forms: Sequence[Form]) -> str | None:
        needed = list(forms)
        for form in forms:
            fewer = [other for other in needed if other is not form]
            if self._attempt(fewer)[0] is not None:
                needed = fewer
        return self._attempt(needed)[0]


# --- check that no text is missing


@dataclass(frozen=True)
class _Wanted:
    """A text that has to be in the prompt."""

    text: str
    role: str
    index: int | None
    mark: str
    times: int  # how often the mark was written into the text


@dataclass(frozen=True)
class _Settings:
    """All that a prompt depends on beside messages and tools."""

    template: ChatTemplate
    thinking: bool | None
    variables: Mapping[str, Any]

    def render(self, messages: Sequence[Message], tools: Sequence[Message]) -> str:
        return self.template.render(messages, thinking=self.thinking, tools=tools, variables=self.variables)


@dataclass(frozen=True)
class CheckedPrompt:
    """A prompt in which no text of a conversation is missing."""

    settings: _Settings
    messages: Sequence[Message]
    tools: Sequence[Message]
    text: str
    ends: Sequence[int]  # by message: where the texts of all messages up to it end, those of tools included


@dataclass(frozen=True)
class KnownChecks:
    """The last checked prompts, and the scope of those that may be used."""

    recent: Recent[CheckedPrompt]
    scope: Hashable


class _TextCheck:
    """Finds texts that a template leaves out: renders again with a mark in each line of each text.

    Texts that an earlier check found in the beginning that both prompts share are still there. If the rest of
    the prompt also ends a prompt of the last few messages alone, then those are marked in that one.
    """

    def __init__(self, known: KnownChecks, settings: _Settings, tools: Sequence[Message]) -> None:
        self._recent, self._settings, self._tools = known, settings, tools
        self.shown, self.turns = "", list[int]()  # the last prompt without a missing text, and its turns
        self._wanted: list[_Wanted] = []
        self._known: dict[str, tuple[str, int]] = {}  # texts with NEW_MARK in each line, and how often

    def checked(self, messages: Sequence[Message]) -> str:
        """Return the prompt. Raises InvalidValue, LostText if a text is not in it.

        A text is there if its marks are there. If the marks change the prompt otherwise, the text itself is
        searched.
        """
        prompt = self._settings.render(messages, self._tools)
        ends = self._ends_of_continued(messages, prompt)
        if ends is None:
            ends = self._ends(messages, prompt)
        checked = CheckedPrompt(self._settings, messages, self._tools, prompt, ends)
        self._recent.recent.add(self._recent.scope, checked)
        self.shown, roles = prompt, [message.get("role") for message in messages]
        first = next((i for i, role in enumerate(roles) if role not in ("system", "developer")), 0)
        last = max((i for i, role in enumerate(roles) if role == "user"), default=0)
        turns = {ends[i] - 1 for i in (first - 1, last - 1, last) if i >= 0}  # of one line, a text ends there
        self.turns = sorted(turn for turn in turns if 0 < turn < len(prompt))
        return prompt

    def _ends_of_continued(self, messages: Sequence[Message], prompt: str) -> list[int] | None:
        """Return the ends of the texts if they are known, or shown by the last messages alone."""
        known, common = self._recent.recent.longest(self._recent.scope, prompt)
        if known is None or (known.settings, known.tools) != (self._settings, self._tools):
            return None
        pairs = zip(known.messages, messages, known.ends, strict=False)
        same = itertools.takewhile(lambda pair: pair[0] == pair[1] and pair[2] <= common, pairs)
        ends = [end for *_, end in same]
        users = [i for i, message in enumerate(messages[: len(ends)]) if message.get("role") == "user"]
        if not users:
            return None
        rest = prompt[ends[-1] :]
        # Most templates refuse messages that do not begin with a user's. That may be far back.
        for first in dict.fromkeys((max(users[-1], len(ends) - 4), users[-1])):
            try:
                last = messages[first:]
                short = self._settings.render(last, self._tools)
                if short.endswith(rest):
                    more = self._ends(last, short, len(ends) - first, len(short) - len(rest))
                    shift = len(prompt) - len(short)
                    return [*ends, *(min(end + shift, sys.maxsize) for end in more)]
            except InvalidValue:  # the whole prompt tells which text is missing
                continue
        return None

    def _ends(self, messages: Sequence[Message], prompt: str, first: int = 0, low: int = 0) -> list[int]:
        """Return where the texts of each message from the `first` one on end. They are sought after `low`.

        The ends never fall; they are beyond all prompts if marks do not tell. Raises LostText for a text that
        is missing.
        """
        self._wanted = []
        marked = [*messages[:first], *(self._message(i, messages[i]) for i in range(first, len(messages)))]
        named = self._tools if first else [self._tool(tool) for tool in self._tools]
        try:
            shown = self._settings.render(marked, named)
        except InvalidValue:
            shown = ""
        if SIGN in shown and SIGN not in prompt:
            raise InvalidValue("the chat template writes the parts of a message as data: send text")
        is_same = MARK.sub("", shown) == MARK.sub("", prompt)
        tells_places = is_same and not MARK.search(prompt) and len(self._wanted) <= MARKS
        if low and not tells_places:
            raise InvalidValue("the chat template reads the texts of these messages")
        positions: dict[str, list[int]] = {}  # by mark, in the prompt
        for count, match in enumerate(MARK.finditer(shown)):
            if (position := match.start() - count) >= low:
                positions.setdefault(match[0], []).append(position)
        before, squeezed = Counter(MARK.findall(prompt)), ""
        ends = [low] * len(messages)
        for i, wanted in enumerate(self._wanted):
            end = sys.maxsize if wanted.text else 0
            if is_same and wanted.times:
                its_positions = positions.get(wanted.mark, [])
                is_there = len(its_positions) - before[wanted.mark] >= wanted.times
                if is_there and tells_places:  # a mark begins the last line
                    end = its_positions[wanted.times - 1] + len(wanted.text.rpartition("\n")[2])
            else:
                squeezed = squeezed or _squeezed(prompt[low:])
                is_there = all(_contains(squeezed, piece) for piece in SWITCH.split(wanted.text))
            if not is_there:
                raise LostText(wanted.text, wanted.role, wanted.index, shown=i)
            index = wanted.index or 0  # a tool counts as a text of the first message
            ends[index] = max(ends[index], end)
        return list(itertools.accumulate(ends[first:], max))

    def _message(self, index: int, message: Message) -> dict[str, Any]:
        """Return a message with marks in its texts, and SIGN in its parts."""
        role = str(message.get("role"))
        marked = map_texts(message, lambda text: self._text(text, role, index))
        if isinstance(parts := marked.get("content"), list):
            marked["content"] = [{**part, SIGN: SIGN} if isinstance(part, dict) else part for part in parts]
        return marked

    def _tool(self, tool: Message) -> dict[str, Any]:
        function = tool.get("function", tool)
        named = {**function, "name": self._text(str(function.get("name")), "tool", None)}
        return {**tool, "function": named} if "function" in tool else named

    def _text(self, text: str, role: str, index: int | None) -> str:
        mark = chr(FIRST_MARK + len(self._wanted) % MARKS)
        if text not in self._known:
            pieces = re.split(f"({TAG.pattern}|{SWITCH.pattern})", text)
            pieces[::2] = map(_marked, pieces[::2])  # tags and switches stay
            marked = "".join(pieces)
            self._known[text] = marked, marked.count(NEW_MARK) - text.count(NEW_MARK)
        marked, times = self._known[text]
        self._wanted.append(_Wanted(text.strip(), role, index, mark, times))
        return marked.replace(NEW_MARK, mark)


def _marked(text: str) -> str:
    """Return a text with marks after its first character and at the beginning of its other lines."""
    core = text.strip()
    if not core:
        return text
    start = text.index(core)
    lines = core[1:].replace("\n", f"\n{NEW_MARK}")
    return f"{text[:start]}{core[0]}{NEW_MARK}{lines}{text[start + len(core) :]}"


def _contains(squeezed: str, text: str) -> bool:
    """Return True if a prompt has a text, as it is or in JSON, ignoring white space."""
    return any(_squeezed(written) in squeezed for written in _written(text))


def _written(text: str) -> Iterator[str]:
    yield text
    yield repr(text)[1:-1]  # within an object that is printed
    for ensure_ascii in (False, True):
        yield (once := json.dumps(text, ensure_ascii=ensure_ascii)[1:-1])
        yield json.dumps(once)[1:-1]  # JSON in JSON


def _squeezed(text: str) -> str:
    return "".join(text.split())
