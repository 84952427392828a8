"""From the events of an answer to those of the Responses API: a response that grows, item by item."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import count
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
    Piece,
    Usage,
)
from mlx_spec.apps.server.bridge import frame
from mlx_spec.apps.server.calls import CompleteCalls
from mlx_spec.apps.server.failures import Failure
from mlx_spec.apps.server.figures import logprob_json, timings_json
from mlx_spec.apps.server.responses.asking import ENCRYPTED
from mlx_spec.apps.server.responses.fields import Body
from mlx_spec.apps.server.responses.items import Call, Item, Json, Message, Thoughts

KEEP_ALIVE = ": keep-alive\n\n"


class Answer:
    """A response and the stream that makes it. Reads the events of one answer, in order."""

    def __init__(self, body: Body, ask: Ask, *, seconds: float) -> None:
        self._calls = CompleteCalls(seconds)
        self.response = {**_head(ask), **_echo(body, ask)}
        self._sealing = ENCRYPTED in (body.include or ())
        self._numbers = count()
        self._item: Item | None = None  # the one that grows
        self._held: list[Json] = []  # logprobs of tokens that have no text yet
        self._started = False

    def read(self, event: Event | None) -> Iterator[Json | None]:
        """The protocol's events for one of ours, or for silence, which has none: None stands for that."""
        if not self._started:
            self._started = True
            for name in ("created", "in_progress"):
                yield self._event({"type": f"response.{name}", "response": {**self.response, "output": []}})
        for passed in self._calls.read(event):
            if passed is None:
                yield None
            for content in self._read(passed):
                yield self._event(content)

    def frames(self, event: Event | None) -> Iterator[str]:
        """The same as text of a stream."""
        return (KEEP_ALIVE if c is None else frame(c["type"], c) for c in self.read(event))

    def _event(self, content: Json) -> Json:
        return {**content, "sequence_number": next(self._numbers)}

    def _read(self, event: Event | None) -> Iterator[Json]:
        match event:
            case Piece(kind="thinking", text=text) if text:
                yield from self._thoughts(text)
            case Piece(kind="answer"):
                yield from self._text(event)
            case CallOpened(id=id, name=name):
                yield from self._opened(Call(self._place, call_id=id, name=name))
            case CallArguments(text=text) if text:
                assert isinstance(self._item, Call), "arguments belong to the call that is open"
                yield from self._item.more(text)
            case Ended(reason=reason):
                yield from self._closed("incomplete" if reason == "length" else "completed")
                if reason == "length":
                    self.response["incomplete_details"] = {"reason": "max_output_tokens"}
            case Closed():
                yield self._finished(event)
            case Failed(failure=failure):
                yield from self._failed(failure)

    @property
    def _place(self) -> int:
        """Of an item that is opened now."""
        return len(self.response["output"]) + (self._item is not None)

    def _thoughts(self, text: str) -> Iterator[Json]:
        if not isinstance(self._item, Thoughts):
            yield from self._opened(Thoughts(self._place, sealing=self._sealing))
        assert isinstance(self._item, Thoughts)
        yield from self._item.more(text)

    def _text(self, piece: Piece) -> Iterator[Json]:
        self._held += map(logprob_json, piece.logprobs)
        if piece.text and not isinstance(self._item, Message):
            yield from self._opened(Message(self._place))
        if isinstance(self._item, Message) and (piece.text or self._held):
            logprobs, self._held = self._held, []
            yield from self._item.more(piece.text, logprobs)

    def _opened(self, item: Item) -> Iterator[Json]:
        yield from self._closed("completed")
        self._item = item
        place = len(self.response["output"])
        content = {**item.content, "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": place, "item": content}
        yield from item.begin()

    def _closed(self, status: str) -> Iterator[Json]:
        item, self._item = self._item, None
        if item is None:
            return
        yield from item.end()
        content = {**item.content, "status": status}
        place = len(self.response["output"])
        self.response["output"].append(content)
        yield {"type": "response.output_item.done", "output_index": place, "item": content}

    def _finished(self, event: Closed) -> Json:
        status = "completed" if self.response["incomplete_details"] is None else "incomplete"
        self.response |= {"status": status, "usage": _usage(event.usage)}
        self.response |= {"completed_at": int(time.time())} if status == "completed" else {}
        self.response["timings"] = timings_json(event.timings)
        return {"type": f"response.{status}", "response": self.response}

    def _failed(self, failure: Failure) -> Iterator[Json]:
        error = {"code": _code(failure), "message": failure.message}
        yield {"type": "error", **error, "param": failure.param}
        yield from self._closed("incomplete")
        self.response |= {"status": "failed", "error": error}
        yield {"type": "response.failed", "response": self.response}


def response_of(answer: Answer, events: Iterable[Event]) -> Json:
    """The response that `events` make."""
    for event in events:
        for _ in answer.read(event):
            pass
    return answer.response


def _head(ask: Ask) -> Json:
    return {
        "id": f"resp_{uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": ask.model,
        "output": [],
        "usage": None,
    }


def _echo(body: Body, ask: Ask) -> Json:
    """What was asked for, with defaults filled in."""
    effort = body.reasoning.effort if body.reasoning else None
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": body.reasoning.summary if body.reasoning else None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "background": False,
        "temperature": ask.sampling.temperature,
        "text": {"format": _format(body), "verbosity": "medium"},
        "tool_choice": _choice(body),
        "tools": [_tool(tool.model_dump()) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": ask.sampling.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _format(body: Body) -> Json:
    given = body.text.format if body.text else None
    return {"type": "text"} if given is None else given.model_dump(by_alias=True, exclude_none=True)


def _choice(body: Body) -> Any:
    if body.tool_choice is None:
        return "auto"
    given: Json = body.tool_choice.model_dump(exclude_none=True)
    return given["type"] if len(given) == 1 else given


def _tool(tool: Json) -> Json:
    return {**tool, "parameters": tool["parameters"] or {}, "strict": bool(tool["strict"])}


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _code(failure: Failure) -> str:
    """The nearest of the codes that the protocol has for a failed response."""
    if failure.status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if failure.status < 500 else "server_error"
