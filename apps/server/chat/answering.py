"""From the events of an answer to chat completions and their chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from mlx_spec.apps.server.ask import (
    CallArguments,
    CallDropped,
    CallOpened,
    Closed,
    Ended,
    Event,
    Opened,
    Piece,
)
from mlx_spec.apps.server.figures import logprob_json, timings_json
from mlx_spec.apps.server.stream import usage_json
from mlx_spec.types import TokenLogprob

Json = dict[str, Any]


class ChatShape:
    """Chunks of a chat completion."""

    def __init__(self, n: int) -> None:
        self._n = n

    def begin(self, event: Event) -> Iterator[Json]:
        """The role of each choice, and its calls bit by bit."""
        match event:
            case Opened():
                for i in range(self._n):
                    yield _choice(i, {"role": "assistant", "content": ""})
            case CallOpened(index=index, call=call, id=id, name=name):
                function = {"name": name, "arguments": ""}
                opened = {"index": call, "id": id, "type": "function", "function": function}
                yield _choice(index, {"tool_calls": [opened]})
            case CallArguments(index=index, call=call, text=text) if text:
                more = {"index": call, "function": {"arguments": text}}
                yield _choice(index, {"tool_calls": [more]})

    def piece(self, piece: Piece) -> Json:
        """Logprobs are of the answer only."""
        if piece.kind == "thinking":
            return _choice(piece.index, {"reasoning_content": piece.text})
        return {**_choice(piece.index, {"content": piece.text}), "logprobs": _logprobs(piece.logprobs)}

    def end(self, event: Ended) -> Json:
        """Nothing more, and why."""
        return {**_choice(event.index, {}), "finish_reason": event.reason}


@dataclass
class _Whole:
    """A choice as it grows."""

    texts: dict[str, str] = field(default_factory=lambda: {"answer": "", "thinking": ""})
    calls: dict[int, Json] = field(default_factory=dict)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: str | None = None

    def read(self, event: Piece | CallOpened | CallArguments | CallDropped | Ended) -> None:
        match event:
            case Piece(kind=kind, text=text):
                self.texts[kind] += text
                self.logprobs += event.logprobs if kind == "answer" else ()
            case CallOpened(call=call, id=id, name=name):
                function = {"name": name, "arguments": ""}
                self.calls[call] = {"id": id, "type": "function", "function": function}
            case CallArguments(call=call, text=text):
                self.calls[call]["function"]["arguments"] += text
            case CallDropped(call=call):
                self.calls.pop(call, None)
            case Ended(reason=reason):
                self.reason = reason

    def json(self, index: int, *, with_logprobs: bool) -> Json:
        content = self.texts["answer"]
        message: Json = {"role": "assistant", "content": None if self.calls and not content else content}
        message["refusal"] = None
        message |= {"reasoning_content": self.texts["thinking"]} if self.texts["thinking"] else {}
        message |= {"tool_calls": list(self.calls.values())} if self.calls else {}
        logprobs = _logprobs(self.logprobs) if self.logprobs or not with_logprobs else _NO_TOKENS
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": self.reason}


_NO_TOKENS: Json = {"content": [], "refusal": None}


def whole(head: Json, events: Iterable[Event], n: int, *, with_logprobs: bool) -> Json:
    """The completion that `events` make."""
    choices = [_Whole() for _ in range(n)]
    found = dict(head)
    for event in events:
        match event:
            case Piece() | CallOpened() | CallArguments() | CallDropped() | Ended():
                choices[event.index].read(event)
            case Closed(usage=usage, timings=timings):
                found |= {"usage": usage_json(usage), "timings": timings_json(timings)}
    made = [choice.json(i, with_logprobs=with_logprobs) for i, choice in enumerate(choices)]
    return {**found, "choices": made}


def _choice(index: int, delta: Json) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _logprobs(tokens: Iterable[TokenLogprob]) -> Json | None:
    content = [logprob_json(token) for token in tokens]
    return {"content": content, "refusal": None} if content else None
