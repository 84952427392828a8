"""A worker whose answers are written down, and a server on a port of its own around routes and a worker."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI

from mlx_spec.apps.server.ask import (
    Ask,
    CallArguments,
    CallOpened,
    Closed,
    Ended,
    Event,
    Opened,
    Piece,
    RoundDone,
    Timings,
    Usage,
)
from mlx_spec.apps.server.failures import Failure, no_such_model
from mlx_spec.session import Statistics
from mlx_spec.types import Alternative, Reason, TokenLogprob

STATISTICS = Statistics(
    prompt_tokens=30,
    reused_tokens=12,
    generated_tokens=17,
    rounds=6,
    speculative_rounds=5,
    speculative_tokens=16,
    drafted=15,
    accepted=11,
    drafted_at=(5, 5, 5),
    accepted_at=(5, 4, 2),
    prefill_seconds=0.5,
    decode_seconds=0.25,
    plain_seconds=0.5,
    compared_seconds=0.25,
    finish_reason="stop",
    reason=Reason.PAYS,
)
TIMINGS = Timings(STATISTICS, draft_kind="mtp", queued_seconds=0.001, first_token_seconds=0.51)
OPENED = Opened(prompt_tokens=30, cached_tokens=12)
CLOSED = Closed(Usage(30, 12, completion_tokens=17, reasoning_tokens=4), TIMINGS)
ARGUMENTS = '{"city": "Köln", "days": [1, 2]}'

# Thoughts, text and two calls, with borders in awkward places.
TURN: tuple[Event, ...] = (
    OPENED,
    Piece(0, "thinking", "Wea"),
    RoundDone(0, STATISTICS),
    Piece(0, "thinking", "ther?"),
    Piece(0, "answer", ""),
    Piece(0, "answer", "I ask: "),
    Piece(0, "answer", "zwölf\n\n🌦 data: x"),
    CallOpened(0, 0, "call_1", "weather"),
    CallArguments(0, 0, ARGUMENTS[:1]),
    CallArguments(0, 0, ""),
    CallArguments(0, 0, ARGUMENTS[1:12]),
    CallArguments(0, 0, ARGUMENTS[12:]),
    CallOpened(0, 1, "call_2", "now"),
    Ended(0, "tool_calls"),
    CLOSED,
)


def said(*texts: str, reason: Any = "stop", stop: str | None = None) -> tuple[Event, ...]:
    """An answer of text."""
    return (OPENED, *(Piece(0, "answer", text) for text in texts), Ended(0, reason, stop), CLOSED)


def logprob(text: bytes, value: float = -0.25) -> TokenLogprob:
    return TokenLogprob(7, text, value, (Alternative(7, text, value), Alternative(8, b"\xff", float("-inf"))))


@dataclass
class Played:
    """A job of a scripted worker."""

    ask: Ask
    gone: threading.Event

    def cancel(self) -> None:
        self.gone.set()


class Scripted:
    """Plays `script` to whoever asks, on a thread of its own; a number is a pause in seconds."""

    def __init__(self) -> None:
        self.script: tuple[Event | float, ...] = ()
        self.refuses: Failure | None = None
        self.jobs: list[Played] = []

    @property
    def asked(self) -> Ask:
        """The last request."""
        return self.jobs[-1].ask

    def resolve(self, name: str | None) -> str:
        if name not in (None, "demo", "alias"):
            raise no_such_model(name, "'demo'")
        return "demo"

    def submit(self, ask: Ask, send: Callable[[Event], None]) -> Played:
        job = Played(ask, threading.Event())
        self.jobs.append(job)
        if self.refuses is not None:
            raise self.refuses
        threading.Thread(target=self._play, args=(job, send, self.script)).start()
        return job

    def _play(self, job: Played, send: Callable[[Event], None], script: tuple[Event | float, ...]) -> None:
        for step in script:
            if isinstance(step, float):
                job.gone.wait(step)
            elif not job.gone.is_set():
                send(step)


@contextmanager
def listening(*routes: APIRouter) -> Iterator[str]:
    """The address of a server with `routes`."""
    app = FastAPI()
    for router in routes:
        app.include_router(router)
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            thread.join(0.01)
        host, port = server.servers[0].sockets[0].getsockname()[:2]
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join()


def post(url: str, body: object) -> tuple[int, Any]:
    """Status and JSON of a response; `body` is JSON, or bytes as they are."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, raw, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def frames(url: str, body: dict[str, Any]) -> list[tuple[str | None, Any]]:
    """Names and contents of a stream's events; a comment has neither."""
    raw = json.dumps(body | {"stream": True}).encode()
    request = urllib.request.Request(url, raw, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        blocks = reply.read().decode().split("\n\n")
    assert blocks.pop() == ""
    return [_frame(block) for block in blocks]


def _frame(block: str) -> tuple[str | None, Any]:
    if block.startswith(":"):
        return None, None
    name, data = block.split("\n")
    assert name.startswith("event: ") and data.startswith("data: ")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))
