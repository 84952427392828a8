"""The calls of one choice, from parts of its answer to events."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

from mlx_spec.answer import Part
from mlx_spec.apps.server.events import (
    Event,
    SourceSpan,
    TextDelta,
    ToolCallDelta,
    ToolCallDropped,
    ToolCallStarted,
)
from mlx_spec.apps.server.request import Tool
from mlx_spec.apps.server.tools.dialect import Format
from mlx_spec.apps.server.tools.source import Arguments, Completed, Delta, Named, Parser
from mlx_spec.logprobs import TokenLogprob


class Calls:
    """Parts of kind "call" in, events out.

    A call is opened when its name is complete, and its arguments are given as far as they are certain, so
    that they are at any time the beginning of valid JSON. What turns out to be no call, or was cut off, is
    given as text of the answer, marks included, when the mark that closes it is read or the answer ends; if
    the call was open by then it is dropped first. A cut changes no finish reason: that stays "length".
    """

    def __init__(self, index: int, format: Format, tools: Sequence[Tool]) -> None:
        self._index, self._format, self._tools = index, format, tools
        self._parser: Parser | None = None
        self._logprobs: list[TokenLogprob] = []  # of the tokens between the marks
        self._open = False  # a call has begun and is not complete
        self._here = 0  # complete calls between these marks
        self._next = 0  # number of the next call
        self.complete = 0  # calls

    def read(self, part: Part) -> list[Event]:
        """What a part of kind "call" brought."""
        if self._parser is None:
            self._parser, self._here, self._logprobs = self._format.parser(self._tools), 0, []
        self._logprobs += part.logprobs
        events = self._events(self._parser.feed(part.text))
        return events + self._close(self._format.marks.close) if part.closed else events

    def end(self) -> list[Event]:
        """The answer has ended, perhaps within a call."""
        return self._close("")

    def _close(self, mark: str) -> list[Event]:
        if self._parser is None:
            return []
        events = self._events(self._parser.end())
        rest, self._parser = self._parser.rest, None
        if self._open:
            events.append(ToolCallDropped(self._index, self._next - 1))
            self._open = False
        if rest or not self._here:  # marks with nothing between them are text as well
            text = self._format.marks.open + rest + mark
            logprobs = () if self._here else tuple(self._logprobs)
            events.append(TextDelta(self._index, "answer", text, logprobs, (SourceSpan(text, None, 0),)))
        return events

    def _events(self, deltas: Iterable[Delta]) -> list[Event]:
        events: list[Event] = []
        for delta in deltas:
            match delta:
                case Named(name):
                    call = ToolCallStarted(self._index, self._next, f"call_{secrets.token_hex(12)}", name)
                    self._next, self._open = self._next + 1, True
                    events.append(call)
                case Arguments(text):
                    if text:
                        events.append(ToolCallDelta(self._index, self._next - 1, text))
                case Completed():
                    self._open, self._here, self.complete = False, self._here + 1, self.complete + 1
        return events
