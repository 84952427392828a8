"""A server for tests of its HTTP side: the application, clients of it, and an engine that plays events."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx2
from starlette.testclient import TestClient

from mlx_spec.apps.server.app import Server, create
from mlx_spec.apps.server.engine.answers import (
    ChoiceEnded,
    Event,
    Failed,
    Finished,
    PromptRead,
    RoundDone,
    TextDelta,
    Timings,
    ToolCall,
    Usage,
)
from mlx_spec.apps.server.engine.engine_thread import EngineThread
from mlx_spec.apps.server.engine.metrics import JobCounter, Metrics, Status
from mlx_spec.apps.server.engine.models import Loader, ModelCard, find_model, load_served
from mlx_spec.apps.server.errors import Failure
from mlx_spec.apps.server.requests.request import GenerationRequest
from mlx_spec.apps.server.settings import ServedModel, Settings
from mlx_spec.decode.statistics import Positions, Statistics
from mlx_spec.hub.catalog import PairSpec
from mlx_spec.tokenizer.stream import TokenText
from mlx_spec.types import Cost, Reason, TokenLogprob
from support.waiting import LIMIT

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
OLLAMA, GENERATE = "/api/chat", "/api/generate"
INFILL, RACE = "/infill", "/race"
DEMO = (ServedModel("demo", PairSpec("demo")),)
HOST = "http://localhost"
HELLO = [{"role": "user", "content": "What does zip do?"}]
BODIES: dict[str, dict[str, Any]] = {  # the least that each route needs
    CHAT: {"messages": HELLO},
    TEXT: {"prompt": "x"},
    MESSAGES: {"model": "demo", "messages": HELLO, "max_tokens": 64},
    RESPONSES: {"input": "x"},
    OLLAMA: {"model": "demo", "messages": HELLO, "stream": False},
    GENERATE: {"model": "demo", "prompt": "x", "stream": False},
    RACE: {"messages": HELLO, "temperature": 0},
}

STATISTICS = Statistics(
    prompt_tokens=5,
    reused_tokens=2,
    generated_tokens=4,
    rounds=2,
    batch_size_sum=3,
    speculative_rounds=2,
    speculative_tokens=4,
    drafted=6,
    accepted=2,
    by_drafter={"lookup": Positions((2, 2, 2), (1, 1))},
    prefill_seconds=0.1,
    decode_seconds=0.2,
    compared_tokens=4,
    costs={"draft": (2, Cost("draft", 4 / 3))},
    reasons={Reason.PAYS: 4},
)
USAGE = Usage(5, 2, 4, 1, 3, 1)
READ = PromptRead(5, 2)
ROUND = RoundDone(0, STATISTICS)
CLOSED = Finished(USAGE, Timings(STATISTICS, "lookup", 0.01, 0.12, 0.03))
TOKENS = tuple(
    TokenLogprob(i, text, -0.5, (TokenLogprob(i, text, -0.5), TokenLogprob(9, b"\xff", -float("inf"))))
    for i, text in enumerate((b"Hel", b"lo"))
)
ANSWER: tuple[Event, ...] = (
    READ,
    TextDelta(0, "thinking", "Hm."),
    TextDelta(0, "answer", "Hel", TOKENS[:1], (TokenText("Hel", "lookup", 1),)),
    TextDelta(0, "answer", "lo", TOKENS[1:], (TokenText("lo", None, 0),)),
    ROUND,
    TextDelta(0, "answer", " you"),
    ROUND,
    ChoiceEnded(0, "stop"),
    CLOSED,
)
ARGUMENTS = '{"city": "Köln", "days": [1, 2]}'
TURN: tuple[Event, ...] = (  # thinking, text and two calls, with borders in awkward places
    READ,
    TextDelta(0, "thinking", "Wea"),
    ROUND,
    TextDelta(0, "thinking", "ther?"),
    TextDelta(0, "answer", ""),
    TextDelta(0, "answer", "I ask: "),
    TextDelta(0, "answer", "zwölf\n\n🌦 data: x"),
    ROUND,
    ToolCall(0, 0, "call_1", "weather", ARGUMENTS),
    ToolCall(0, 1, "call_2", "now", ""),
    ChoiceEnded(0, "tool_calls"),
    CLOSED,
)
CALLS = [("a", "weather", json.loads(ARGUMENTS)), ("b", "now", {})]
CONVERSATION = [  # what every dialect's own way to write it becomes
    {"role": "system", "content": "Be brief.\n\nBe kind."},
    {"role": "user", "content": "Rain\n\nin Köln?"},
    {
        "role": "assistant",
        "content": "One moment.",
        "reasoning_content": "I ask.",
        "tool_calls": [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id, name, arguments in CALLS
        ],
    },
    {"role": "tool", "tool_call_id": "a", "name": "weather", "content": "dry"},
    {"role": "tool", "tool_call_id": "b", "name": "now", "content": "Error: no clock"},
    {"role": "user", "content": "So?"},
]
SHUTDOWN = Failed(Failure(503, "shutting down", type="server_error", code="shutting_down"))


def said(*texts: str, reason: Any = "stop", stop: str | None = None) -> tuple[Event, ...]:
    return (READ, *(TextDelta(0, "answer", text) for text in texts), ChoiceEnded(0, reason, stop), CLOSED)


Step = Event | float | threading.Event


@dataclass
class StubJob:
    counter: JobCounter
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self.counter.cancel()
        self.cancelled.set()


class Stub:
    """An engine that plays `events` on a thread, with pauses: for so many seconds, or until one is set."""

    def __init__(self, events: Iterable[Step] = ANSWER, *, pause: float = 0.0) -> None:
        self.events, self.pause = events, pause
        self.refusal: Failure | None = None
        self.state = Status("ready")
        self.metrics = Metrics(self.status)
        self.requests: list[GenerationRequest] = []
        self.jobs: list[StubJob] = []
        self.offered: list[ServedModel] = []
        self.images = False  # whether its model reads pictures

    def replay(self, events: Iterable[Step]) -> None:
        """Play events from now on, to requests that are listed anew."""
        self.events, self.refusal = events, None
        self.requests.clear()
        self.jobs.clear()

    def resolve(self, name: str | None) -> str:
        return find_model(
            name,
            {
                **dict.fromkeys((None, "demo", "alias"), "demo"),
                **{one.name: one.name for one in self.offered},
            },
        )

    def submit(
        self, request: GenerationRequest, send: Callable[[Event], None], turns: object = None
    ) -> StubJob:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        self.jobs.append(StubJob(JobCounter(self.metrics, request.model)))
        threading.Thread(target=self._play, args=(send, self.jobs[-1], self.events), daemon=True).start()
        return self.jobs[-1]

    def _play(self, send: Callable[[Event], None], job: StubJob, events: Iterable[Step]) -> None:
        for event in events:
            while isinstance(event, threading.Event) and not event.wait(0.01) and not job.cancelled.is_set():
                pass
            if job.cancelled.wait(event if isinstance(event, float) else self.pause):
                return
            if not isinstance(event, float | threading.Event):
                job.counter.count(event)
                send(event)

    def served(self, name: str) -> ServedModel:
        return next((one for one in (*DEMO, *self.offered) if one.name == name), DEMO[0])

    def offer(self, served: ServedModel) -> None:
        self.offered.append(served)

    def withdraw(self, name: str) -> None:
        self.offered = [one for one in self.offered if one.name != name]

    def count_tokens(self, request: GenerationRequest) -> int:
        return 7

    def card(self, name: str) -> Any:
        return next(card for card in self.models() if card.name == name)

    def models(self) -> tuple[ModelCard, ...]:
        facts: dict[str, Any] = {"loaded": True, "context_length": 64, "images": self.images}
        return (ModelCard("demo", ("alias",), 1_700_000_000, **facts),)

    def status(self) -> Status:
        return self.state

    def start(self) -> None:
        pass

    def close(self, timeout: float) -> bool:
        return True


# --- in the process of the test


@dataclass(frozen=True)
class Endpoint:
    client: TestClient
    app: Any

    def post(self, path: str, **body: Any) -> Any:
        return self.client.post(path, json=BODIES.get(path, {}) | body)

    def chat(self, **body: Any) -> Any:
        return self.post(CHAT, **body)

    def refused(self, path: str = CHAT, status: int = 400, **body: Any) -> dict[str, Any]:
        return error_of(self.post(path, **body), status)

    def chunks(self, path: str = CHAT, **body: Any) -> list[Any]:
        """The data of a stream; its end is checked and left out."""
        found = events_of(self.post(path, **body, stream=True).text)
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
    """The data of a stream of server-sent events; comments are not events."""
    assert text.endswith("\n\n")
    blocks = [block for block in text[:-2].split("\n\n") if not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


@cache
def shared() -> tuple[Stub, Endpoint]:
    """One stub and its application: making one takes long."""
    stub = Stub()
    return stub, stubbed(stub)


def fresh(events: Iterable[Step] = ANSWER) -> tuple[Stub, Endpoint]:
    """The shared stub and application, as good as new."""
    stub, endpoint = shared()
    stub.replay(events)
    return stub, endpoint


def stubbed(engine: Stub, settings: Settings | None = None, **parts: Any) -> Endpoint:
    app = create(settings or Settings(DEMO), engine, **parts)  # type: ignore[arg-type]
    return Endpoint(TestClient(app, base_url=HOST), app)


# --- on a port of its own, for clients that other people wrote


@contextmanager
def listening(engine: Any, settings: Settings) -> Iterator[str]:
    with running(Server(settings, engine)) as (host, port):
        yield f"http://{host}:{port}"


@contextmanager
def running(server: Server) -> Iterator[tuple[str, int]]:
    """Run a server on a thread; the address is where it listens."""
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def serving(settings: Settings, loader: Loader = load_served) -> Iterator[httpx2.Client]:
    """A client of a server whose engine answers."""
    engine = EngineThread(settings, loader)
    with listening(engine, settings) as url:
        assert engine.wait_loaded()
        with httpx2.Client(base_url=url, timeout=LIMIT, trust_env=False) as client:
            yield client


@dataclass(frozen=True)
class Place:
    """One route of the shared stub."""

    stub: Stub
    endpoint: Endpoint
    path: str

    def post(self, **changes: Any) -> tuple[int, Any]:
        response = self.endpoint.post(self.path, **changes)
        return response.status_code, response.json()

    def frames(self, **changes: Any) -> list[tuple[str | None, Any]]:
        response = self.endpoint.post(self.path, **changes, stream=True)
        assert response.headers["content-type"].startswith("text/event-stream")
        return frames(response.text)

    def request(self, **changes: Any) -> Any:
        """The request that a body becomes."""
        status, reply = self.post(**changes)
        assert status == 200, reply
        return self.stub.requests[-1]

    def error(self, **changes: Any) -> dict[str, Any]:
        """The error of a request that is refused before the engine gets it: one short line, with a field."""
        response = self.endpoint.post(self.path, **changes)
        body = response.json()
        assert response.status_code == 400 and len(response.text) < 1000, body
        error: dict[str, Any] = body["error"]
        if self.path in (OLLAMA, GENERATE):  # the line is all that its clients read
            assert set(body) == {"error"}
            error = {"type": "invalid_request_error", "message": body["error"]}
        shared = set() if self.path in (MESSAGES, OLLAMA, GENERATE) else {"param", "code"}
        assert error["type"] == "invalid_request_error" and set(error) == {"type", "message", *shared}
        assert "\n" not in error["message"] and self.stub.requests == []
        return error


def place_of(path: str) -> Place:
    """A route that says Hi."""
    return Place(*fresh(said("Hi")), path)


def parsed(path: str, **changes: Any) -> Any:
    return place_of(path).request(**changes)


def refused(path: str, **changes: Any) -> dict[str, Any]:
    return place_of(path).error(**changes)


NEW = "id item_id call_id created_at completed_at sequence_number timings parsed parsed_arguments".split()
NEW += ["parsed_output"]


def settled(value: Any, *more: str) -> Any:
    """Return an answer without what is new in each, what SDKs add, and `more`."""
    if isinstance(value, dict):
        return {key: settled(each, *more) for key, each in value.items() if key not in (*NEW, *more)}
    return [settled(each, *more) for each in value] if isinstance(value, list) else value


def frames(stream: str) -> list[tuple[str | None, Any]]:
    """Names and contents of a stream's events; a comment has neither."""
    assert stream.endswith("\n\n")
    return [_frame(block) for block in stream[:-2].split("\n\n")]


def _frame(block: str) -> tuple[str | None, Any]:
    if block.startswith(":"):
        return None, None
    name, data = block.split("\n")
    assert name.startswith("event: ") and data.startswith("data: ")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))
