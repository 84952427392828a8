"""From the events of an answer to Anthropic's: a message that grows, block by block."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any
from uuid import uuid4

from mlx_spec.apps.server.ask import (
    Ask,
    CallArguments,
    CallOpened,
    Closed,
    Ended,
    Event,
    Failed,
    Opened,
    Piece,
    Usage,
)
from mlx_spec.apps.server.bridge import frame
from mlx_spec.apps.server.calls import CompleteCalls
from mlx_spec.apps.server.figures import timings_json
from mlx_spec.apps.server.messages.errors import error_json

Json = dict[str, Any]


class Answer:
    """A message and the stream that makes it. Reads the events of one answer, in order."""

    def __init__(self, ask: Ask, *, show_thoughts: bool, seconds: float) -> None:
        self._ask = ask
        self._calls = CompleteCalls(seconds)
        self._show_thoughts = show_thoughts
        self._id = f"msg_{uuid4().hex}"
        self._content: list[Json] = []
        self._open = False  # whether the last block is still growing
        self._started = False
        self._usage: Json = {}
        self._end: Json = {"stop_reason": None, "stop_sequence": None}
        self._timings: Json | None = None

    @property
    def message(self) -> Json:
        """The whole message, once all events have been read."""
        whole = self._envelope(self._content)
        return whole if self._timings is None else {**whole, "timings": self._timings}

    def read(self, event: Event | None) -> Iterator[Json]:
        """The protocol's events for one of ours, or for silence."""
        for passed in self._calls.read(event):
            yield from self._started_with(passed)
            yield from self._read(passed)

    def frames(self, event: Event | None) -> Iterator[str]:
        """The same as text of a stream."""
        return (frame(content["type"], content) for content in self.read(event))

    def _started_with(self, event: Event | None) -> Iterator[Json]:
        if not self._started and not isinstance(event, Failed):
            self._started = True
            self._usage = _usage(_unread(event))
            yield {"type": "message_start", "message": self._envelope([])}

    def _read(self, event: Event | None) -> Iterator[Json]:
        match event:
            case None:
                yield {"type": "ping"}
            case Piece(kind=kind, text=text) if text:
                yield from self._piece(kind, text)
            case CallOpened(id=id, name=name):
                yield from self._opened({"type": "tool_use", "id": id, "name": name, "input": {}})
            case CallArguments(text=text) if text:
                self._content[-1]["input"] = json.loads(text)
                yield self._delta({"type": "input_json_delta", "partial_json": text})
            case Ended():
                yield from self._closed()
                self._end = _end(event)
            case Closed():
                yield from self._finished(event)
            case Failed(failure=failure):
                yield error_json(failure)

    def _piece(self, kind: str, text: str) -> Iterator[Json]:
        if kind == "answer":
            yield from self._inside({"type": "text", "text": ""})
            self._content[-1]["text"] += text
            yield self._delta({"type": "text_delta", "text": text})
            return
        yield from self._inside({"type": "thinking", "thinking": "", "signature": ""})
        if self._show_thoughts:
            self._content[-1]["thinking"] += text
            yield self._delta({"type": "thinking_delta", "thinking": text})

    def _inside(self, block: Json) -> Iterator[Json]:
        """Open `block` unless one of its type is open."""
        if not self._open or self._content[-1]["type"] != block["type"]:
            yield from self._opened(block)

    def _opened(self, block: Json) -> Iterator[Json]:
        yield from self._closed()
        self._content.append(block)
        self._open = True
        start = {"type": "content_block_start", "index": len(self._content) - 1}
        yield {**start, "content_block": dict(block)}

    def _closed(self) -> Iterator[Json]:
        if not self._open:
            return
        self._open = False
        block = self._content[-1]
        if block["type"] == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        yield {"type": "content_block_stop", "index": len(self._content) - 1}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _finished(self, event: Closed) -> Iterator[Json]:
        self._usage = _usage(event.usage)
        self._timings = timings_json(event.timings)
        most = self._ask.max_tokens
        if self._end["stop_reason"] == "max_tokens" and most and event.usage.completion_tokens < most:
            self._end["stop_reason"] = "model_context_window_exceeded"
        final = {"type": "message_delta", "delta": self._end, "usage": self._usage}
        yield {**final, "timings": self._timings}
        yield {"type": "message_stop"}

    def _envelope(self, content: list[Json]) -> Json:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._ask.model}
        return {**head, "content": content, **self._end, "usage": self._usage}


def message_of(answer: Answer, events: Iterable[Event]) -> Json:
    """The message that `events` make."""
    for event in events:
        for _ in answer.read(event):
            pass
    return answer.message


def _end(event: Ended) -> Json:
    reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[event.reason]
    reason = "stop_sequence" if event.reason == "stop" and event.stop is not None else reason
    return {"stop_reason": reason, "stop_sequence": event.stop if reason == "stop_sequence" else None}


def _unread(event: Event | None) -> Usage:
    """What is known before there is an answer."""
    if isinstance(event, Opened):
        return Usage(event.prompt_tokens, event.cached_tokens, completion_tokens=0, reasoning_tokens=0)
    return Usage(0, 0, 0, 0)


def _usage(usage: Usage) -> Json:
    """Input without what was cached, as Anthropic counts it."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }
