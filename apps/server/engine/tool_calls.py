"""Read the tool calls of an answer as events."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mlx_spec.tokenizer.stream import TextPart, TokenText
from mlx_spec.tokenizer.thinking import Markers

from ..requests.request import Tool
from ..tools.formats import ToolFormat
from ..tools.gemma import QUOTE
from .answers import Event, TextDelta, ToolCall


class ToolCallReader:
    """Reads the tool calls of one choice: parts of the kinds in `kinds` in, events out.

    Text that is not a call, or a call that was cut off, becomes text of the answer, without markup that would
    puzzle a user. A cut does not change the finish reason: it stays "length".
    """

    def __init__(self, index: int, format: ToolFormat, tools: Sequence[Tool], *, one: bool = False) -> None:
        self._index, self._format, self._syntax, self._tools = index, format, format.syntax, tools
        self._parts: list[TextPart] = []  # since the opening marker
        self._one = one  # True if the answer ends with its first call
        self.kinds = ("answer",) if format.is_answer else ("call",)  # of the text to read
        self.complete = 0  # calls so far

    def is_last(self, body: str) -> bool:
        """Return True if the answer ends with this body of a call."""
        return self._one and bool(self._syntax.parse(body, self._tools)[0])

    def read(self, part: TextPart) -> list[Event]:
        """Return the events that a part completes."""
        self._parts.append(part)
        return self._take(closed=True) if part.closed else []

    def end(self) -> list[Event]:
        """Return the events of a body that the end of the answer cut off."""
        return self._take(closed=False) if self._parts else []

    def _take(self, *, closed: bool) -> list[Event]:
        body = "".join(part.text for part in self._parts)
        logprobs = tuple(token for part in self._parts for token in part.logprobs)
        self._parts = []
        calls, rest = self._syntax.parse(body, self._tools, closed=closed)
        if self._one and calls:
            calls, rest = calls[:1], ""
        events: list[Event] = []
        for call in calls:
            call_id = call.id or self._format.new_id()
            events.append(ToolCall(self._index, self.complete, call_id, call.name, call.arguments))
            self.complete += 1
        if (text := without_markup(rest, self._syntax.markers)) or (logprobs and not calls):
            spans = (TokenText(text, None, 0),)
            events.append(TextDelta(self._index, "answer", text, () if calls else logprobs, spans))
        return events


# Special tokens such as <|tool_call>, and the tags of calls, also a tag that the end of the answer cut off.
_MARKUP = re.compile(
    r"\A[^<]*(?:<\|(?:start|channel|constrain)\|>[^<]*)*<\|message\|>"  # the header of a message
    r"|<[|｜]tool[^<>|｜]*[|｜]>|\[(?:ARGS|CALL_ID)\]|<\|[^<>|]+\|?>|<\w+\|>"
    r"|</?(?:atem:)?(?:function|parameter|invoke|(?:longcat_)?arg_(?:key|value)|escape)\b[^<>]*(?:>|$)"
)


def without_markup(body: str, markers: Markers) -> str:
    """Return the text of a body that is not a call, as a user may see it."""
    body = body.replace(markers.open, "")
    return _MARKUP.sub(lambda markup: '"' if markup[0] == QUOTE else "", body)
