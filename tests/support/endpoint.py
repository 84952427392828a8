"""A server in the test process: the application, its client, and a worker that says what it is told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from starlette.testclient import TestClient

from mlx_spec.apps.server.app import create
from mlx_spec.apps.server.ask import (
    Ask,
    CallArguments,
    CallDropped,
    CallOpened,
    Closed,
    Ended,
    Event,
    Failed,
    Opened,
    Piece,
    RoundDone,
    Span,
    Timings,
    Usage,
)
from mlx_spec.apps.server.failures import Failure, no_such_model
from mlx_spec.apps.server.models import ModelCard
from mlx_spec.apps.server.settings import Served, Settings
from mlx_spec.apps.server.status import Status
from mlx_spec.apps.server.worker import Worker
from mlx_spec.session import Statistics
from mlx_spec.types import Alternative, Reason, TokenLogprob

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
DEMO = (Served("demo", "demo"),)
HOST = "http://localhost"
PATIENCE = 60  # seconds for a model to be loaded
HELLO = [{"role": "user", "content": "What does zip do?"}]

STATISTICS = Statistics(
    prompt_tokens=5,
    reused_tokens=2,
    generated_tokens=4,
    rounds=2,
    speculative_rounds=2,
    speculative_tokens=4,
    drafted=6,
    accepted=2,
    drafted_at=(2, 2, 2),
    accepted_at=(1, 1),
    prefill_seconds=0.1,
    decode_seconds=0.2,
    plain_seconds=0.3,
    compared_seconds=0.2,
    reason=Reason.PAYS,
)
USAGE = Usage(5, 2, 4, 1, 3, 1)
CLOSED = Closed(USAGE, Timings(STATISTICS, "lookup", 0.01, 0.12))
TOKENS = tuple(
    TokenLogprob(i, text, -0.5, (Alternative(i, text, -0.5), Alternative(9, b"\xff", -float("inf"))))
    for i, text in enumerate((b"Hel", b"lo"))
)
ANSWER: tuple[Event, ...] = (
    Opened(5, 2),
    Piece(0, "thinking", "Hm."),
    Piece(0, "answer", "Hel", TOKENS[:1], (Span("Hel", "lookup", 1),)),
    Piece(0, "answer", "lo", TOKENS[1:], (Span("lo", None, 0),)),
    RoundDone(0, STATISTICS),
    Piece(0, "answer", " you"),
    RoundDone(0, STATISTICS),
    Ended(0, "stop"),
    CLOSED,
)
CALLS: tuple[Event, ...] = (
    Opened(5, 2),
    CallOpened(0, 0, "call_a", "weather"),
    CallArguments(0, 0, '{"city"'),
    RoundDone(0, STATISTICS),
    CallArguments(0, 0, ': "Oslo"}'),
    CallOpened(0, 1, "call_b", "time"),
    CallArguments(0, 1, "{}"),
    CallOpened(0, 2, "call_c", "half"),
    CallDropped(0, 2),
    RoundDone(0, STATISTICS),
    Ended(0, "tool_calls"),
    CLOSED,
)
CUT: tuple[Event, ...] = (
    *ANSWER[:5],
    Failed(Failure(503, "the server is shutting down", code="shutting_down")),
)


@dataclass
class StubJob:
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self.cancelled.set()


class Stub:
    """Stands for a worker where only the HTTP side is looked at: sends recorded events."""

    def __init__(self, events: Sequence[Event] = ANSWER, *, pause: float = 0.0) -> None:
        self.events, self.pause = events, pause
        self.refusal: Failure | None = None
        self.state = Status("ready")
        self.asks: list[Ask] = []
        self.jobs: list[StubJob] = []

    def resolve(self, name: str | None) -> str:
        if name not in (None, "demo", "alias"):
            raise no_such_model(str(name), "demo")
        return "demo"

    def submit(self, ask: Ask, send: Callable[[Event], None]) -> StubJob:
        if self.refusal is not None:
            raise self.refusal
        self.asks.append(ask)
        self.jobs.append(StubJob())
        threading.Thread(target=self._feed, args=(send, self.jobs[-1]), daemon=True).start()
        return self.jobs[-1]

    def _feed(self, send: Callable[[Event], None], job: StubJob) -> None:
        for event in self.events:
            if job.cancelled.wait(self.pause):
                return
            send(event)

    def count(self, ask: Ask) -> int:
        return 7

    def models(self) -> tuple[ModelCard, ...]:
        return (ModelCard("demo", ("alias",), 1_700_000_000, loaded=True, context_length=64),)

    def status(self) -> Status:
        return self.state

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Endpoint:
    client: TestClient
    app: Any

    def post(self, path: str, **body: Any) -> Any:
        return self.client.post(path, json=body)

    def chat(self, **body: Any) -> Any:
        return self.post(CHAT, **{"messages": HELLO, **body})

    def refused(self, path: str = CHAT, status: int = 400, **body: Any) -> dict[str, Any]:
        """The error object of a request that must be refused."""
        given = {"messages": HELLO, **body} if path == CHAT else body
        return error_of(self.post(path, **given), status)

    def chunks(self, path: str = CHAT, **body: Any) -> list[Any]:
        """A stream's data, its end checked and left out."""
        given = {"messages": HELLO, **body} if path == CHAT else body
        found = events_of(self.post(path, **given, stream=True).text)
        assert found[-1] == "[DONE]"
        return [json.loads(one) for one in found[:-1]]


def error_of(response: Any, status: int) -> dict[str, Any]:
    """The error object of a response, with all four keys."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error


def events_of(text: str) -> list[str]:
    """The data of a stream of server-sent events; comments are no events."""
    assert text.endswith("\n\n")
    blocks = [block for block in text[:-2].split("\n\n") if not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


@cache
def shared() -> tuple[Stub, Endpoint]:
    """One stub and its application, for tests that look at nothing else of it; making one takes long."""
    stub = Stub()
    return stub, stubbed(stub)


def fresh(events: Sequence[Event] = ANSWER) -> tuple[Stub, Endpoint]:
    """The shared ones, as good as new."""
    stub, endpoint = shared()
    stub.events = events
    stub.asks.clear()
    return stub, endpoint


def stubbed(worker: Stub, settings: Settings | None = None) -> Endpoint:
    """The application with a stub for a worker."""
    app = create(settings or Settings(DEMO), worker)  # type: ignore[arg-type]
    return Endpoint(TestClient(app, base_url=HOST), app)


@contextmanager
def running(settings: Settings | None = None) -> Iterator[Endpoint]:
    """The application with a real worker, ready, until the context ends."""
    given = settings or Settings(DEMO)
    app = create(given, Worker(given))
    with TestClient(app, base_url=HOST) as client:
        wait_until(lambda: client.get("/health").json()["status"] == "ok")
        yield Endpoint(client, app)


def wait_until(holds: Callable[[], bool], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)
