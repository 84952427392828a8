"""Streams: events from the engine thread, chunks as clients read them, silence, and clients that hang up."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace
from functools import partial
from itertools import chain, cycle
from typing import Any

import httpx2
import pytest
from support.endpoint import (
    ANSWER,
    CHAT,
    CLOSED,
    DEMO,
    HELLO,
    MESSAGES,
    READ,
    RESPONSES,
    ROUND,
    SHUTDOWN,
    STATISTICS,
    TEXT,
    TURN,
    USAGE,
    Stub,
    events_of,
    fresh,
    listening,
    said,
    stubbed,
)
from support.waiting import LIMIT, wait_until

from mlx_spec.apps.server import http
from mlx_spec.apps.server.engine.answers import (
    Event,
    PromptProgress,
    PromptRead,
    TextDelta,
    Timings,
    timings_json,
)
from mlx_spec.apps.server.http import EventQueue, read_events
from mlx_spec.apps.server.protocols.anthropic_messages import MessageWriter
from mlx_spec.apps.server.protocols.openai_chat import ChatWriter
from mlx_spec.apps.server.protocols.openai_completions import TextWriter
from mlx_spec.apps.server.protocols.openai_responses import ResponseWriter
from mlx_spec.apps.server.requests.request import Chat, GenerationRequest
from mlx_spec.apps.server.settings import Settings
from mlx_spec.decode.statistics import Statistics
from mlx_spec.sampling import Sampling
from mlx_spec.types import Cost, Reason

REQUEST = GenerationRequest("demo", Chat(()), Sampling())


# --- measurements


def test_timings():
    found = timings_json(CLOSED.timings)
    assert found["draft_kind"] == "lookup"
    others = {  # by the names of llama.cpp's server
        "draft_rounds": 2,
        "draft_n": 6,
        "draft_n_accepted": 2,
        "cache_n": 2,
        "drafter_cold_n": 0,
        "prompt_n": 3,
        "prompt_ms": 100.0,
        "prompt_per_second": pytest.approx(30.0),
        "predicted_n": 4,
        "predicted_ms": 200.0,
        "predicted_per_second": pytest.approx(20.0),
        "batch_n": 1.5,
        "queued_ms": 10.0,
        "ttft_ms": 120.0,
        "longest_pause_ms": 30.0,
    }
    assert {name: found[name] for name in others} == others
    figures = STATISTICS.as_dict()
    assert {name: found[name] for name in figures} == figures
    assert figures["drafted_at"] == (2, 2, 2) and figures["gain"] == pytest.approx(1.5)
    assert (figures["speculation"], figures["reason"]) == ("on", "speculation pays")
    off = replace(STATISTICS, reasons={Reason.LEARNING: 2, Reason.COST: 3}, accepted=0)
    both = replace(STATISTICS, reasons={Reason.PAYS: 2, Reason.COST: 3})  # as the gain beside it
    slow = replace(STATISTICS, costs={"draft": (2, Cost("draft", 4.0))})  # never stands beside "pays"
    noisy = replace(STATISTICS, costs={"draft": (2, Cost("draft", 4 / 3, 0.5))})
    for changed, state in (
        (off, ("off", Reason.COST)),
        (both, ("on", Reason.PAYS)),
        (slow, ("on", Reason.LOST)),
        (noisy, ("on", Reason.LEARNING)),
    ):
        found = timings_json(Timings(changed, None, 0, 0))
        assert (found["speculation"], found["reason"]) == state
    found = timings_json(Timings(Statistics(), None, 0.0, 0.0))
    assert [found[key] for key in ("prompt_per_second", "predicted_per_second", "gain")] == [None] * 3


# --- events from the engine thread


def test_silence_loses_nothing():
    async def read() -> list[Event | None]:
        return [event async for event in read_events(stub, REQUEST, 0.01)]

    deltas = [TextDelta(0, "answer", str(i)) for i in range(20)]
    stub = Stub(tuple(step for delta in deltas for step in (0.0101, delta)) + said()[-1:])
    assert [event for event in asyncio.run(read()) if event is not None] == [*deltas, said()[-1]]


def test_an_event_that_was_read_early_is_not_a_silence():
    async def read() -> list[Event | None]:
        queue = EventQueue({TextDelta}, None)
        queue.put(events[0])

        async def put_later() -> None:
            while queue._notified:  # the loop has not looked yet
                await asyncio.sleep(0)
            for _ in range(10):  # enough for a `get` that was woken to return
                await asyncio.sleep(0)
            queue.put(events[1])

        later = asyncio.create_task(put_later())
        return [await queue.get(), await queue.get(), await later]

    events = [TextDelta(0, "answer", text) for text in "ab"]
    assert asyncio.run(read()) == [*events, None]


# --- chunks


def test_chunks_of_a_chat():
    found = fresh()[1].chunks()
    deltas = [chunk["choices"][0]["delta"] for chunk in found]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Hm."},
        {"content": "Hel"},
        {"content": "lo"},
        {"content": " you"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in found] == [None] * 5 + ["stop"]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in found}) == 1
    assert {chunk["object"] for chunk in found} == {"chat.completion.chunk"}
    assert not any("usage" in chunk or "mlx_spec" in chunk for chunk in found)
    assert [i for i, chunk in enumerate(found) if "timings" in chunk] == [5]


def test_sources_are_shown_on_request():
    found = fresh()[1].chunks(stream_options={"include_draft": True})
    spans = [span for chunk in found for span in chunk.get("mlx_spec", {}).get("spans", [])]
    first = {"text": "Hel", "source": "lookup", "position": 1}
    assert spans == [first, {"text": "lo", "source": None, "position": 0}]
    statistics = [c["mlx_spec"]["statistics"] for c in found if "statistics" in c.get("mlx_spec", {})]
    assert [(one["index"], one["accepted_at"]) for one in statistics] == [(0, [1, 1]), (0, [1, 1])]
    assert statistics[0]["by_drafter"] == {"lookup": {"drafted_at": [2, 2, 2], "accepted_at": [1, 1]}}


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_progress_is_shown_on_request(path):
    stub, endpoint = fresh((PromptProgress(12, 2, 7), *said("Hi")))
    found = endpoint.chunks(path, stream_options={"include_draft": True})
    assert found[0]["mlx_spec"] == {"prompt": {"prompt_n": 12, "cached_n": 2, "read_n": 7}}
    assert found[0]["choices"] == [] and stub.requests[0].progress
    endpoint.post(path)
    assert [request.progress for request in stub.requests] == [True, False]
    assert fresh((PromptProgress(12, 2, 7), *said("Hi")))[1].post(path, stream=True).text.startswith("data: ")
    text = fresh((PromptProgress(2000, 2, 7), *said("Hi")))[1].post(path, stream=True).text
    assert text.startswith(": 7 of 2000 tokens of the prompt are read\n\ndata: ") and "progress" not in text


ASKED = {"return_progress": True}  # by clients of llama.cpp's server


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, ASKED),
        (TEXT, ASKED),
        ("/infill", ASKED | {"input_prefix": "x"}),
        (MESSAGES, {}),
        (RESPONSES, {}),
        ("/api/chat", {"messages": HELLO}),
        ("/api/generate", {"prompt": "x"}),
    ],
)
def test_a_protocol_shows_progress_where_its_clients_read_on(path, more):
    """The first event of a stream has it, before any text."""
    text = fresh((PromptProgress(12, 2, 7, 1.5), *said("Hi")))[1].post(path, stream=True, **more).text
    progress = '"prompt_progress":{"total":12,"cache":2,"processed":7,"time_ms":1500.0}'
    assert 0 <= text.index(progress) < text.index("Hi")
    if path == MESSAGES:
        start = json.loads(text.splitlines()[1].removeprefix("data: "))["message"]["usage"]
        assert (start["input_tokens"], start["cache_read_input_tokens"]) == (10, 2)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_usage_says_what_was_read_again_and_why(path):
    """Only if something was."""
    again = replace(USAGE, reread_tokens=3, reread_words="no place to go back to")
    stub, endpoint = fresh((*said("Hi")[:-1], replace(CLOSED, usage=again)))
    found = json.dumps(endpoint.post(path).json()["usage"])
    assert '"reread_tokens": 3, "reread_reason": "no place to go back to"' in found
    stub.events = said("Hi")
    assert "reread" not in json.dumps(endpoint.post(path).json()["usage"])


def test_a_failure_after_the_headers_ends_the_stream():
    for path in (CHAT, TEXT, MESSAGES, RESPONSES):
        text = fresh((*TURN[:6], SHUTDOWN))[1].post(path, stream=True).text
        last = json.loads(text.rstrip().rpartition("data: ")[2])
        assert text.count("data: ") > 1
        if path == MESSAGES:
            assert last == {
                "type": "error",
                "error": {"type": "overloaded_error", "message": "shutting down"},
            }
        elif path == RESPONSES:
            assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
            assert last["response"]["error"] == {"code": "server_error", "message": "shutting down"}
            assert [item["status"] for item in last["response"]["output"]] == ["completed", "incomplete"]
        else:
            assert last == SHUTDOWN.failure.body


def test_a_failure_after_the_end_of_a_choice_comes_after_it():
    chunks = events_of(fresh((*said("Hi")[:-1], SHUTDOWN))[1].post(CHAT, stream=True).text)
    assert json.loads(chunks[-2])["choices"][0]["finish_reason"] == "stop"
    assert json.loads(chunks[-1]) == SHUTDOWN.failure.body
    text = fresh((*said("Hi")[:-1], SHUTDOWN))[1].post(RESPONSES, stream=True).text
    assert text.count("event: response.output_item.done") == 1
    assert '"status":"completed"' in text and '"status":"incomplete"' not in text


@pytest.mark.parametrize(
    ("path", "writer", "name", "begins"),
    [
        (CHAT, ChatWriter, "_piece", "data: "),
        (TEXT, TextWriter, "_piece", "data: "),
        (MESSAGES, MessageWriter, "grown", "event: error\ndata: "),
        (RESPONSES, ResponseWriter, "grown", "event: response.failed\ndata: "),
    ],
)
def test_a_bug_of_ours_is_written_as_a_failure(path, writer, name, begins, monkeypatch, caplog):
    sound = getattr(writer, name)

    def breaks(self: Any, event: Any, *rest: Any) -> Any:
        if isinstance(event, PromptRead):
            return sound(self, event, *rest)
        raise RuntimeError("a secret of the house")

    monkeypatch.setattr(writer, name, breaks)
    stub, endpoint = fresh()
    response = endpoint.post(path, stream=True)
    last = response.text.removesuffix("\n\n").split("\n\n")[-1]
    assert response.status_code == 200 and last.startswith(begins)
    found = json.loads(last.removeprefix(begins))
    error = found["error"] if "error" in found else found["response"]["error"]
    assert "its log says why" in error["message"] and "secret" not in response.text
    assert stub.jobs[0].cancelled.wait(LIMIT) and "a secret of the house" in caplog.text


def test_only_the_stream_ends_lines():
    text = "".join(map(chr, range(0x2030))) + "ü🌦"
    raw = fresh(said(text))[1].chat(stream=True)
    assert raw.headers["content-type"].startswith("text/event-stream")
    assert raw.headers["cache-control"] == "no-cache"
    assert all(line == "" or line.startswith("data: ") for line in raw.text.splitlines())
    contents = [json.loads(one)["choices"][0]["delta"].get("content", "") for one in events_of(raw.text)[:-1]]
    assert "".join(contents) == text


@pytest.mark.parametrize(
    ("path", "sign"),
    [
        (CHAT, ": keepalive"),
        (TEXT, ": keepalive"),
        (MESSAGES, "event: ping"),
        (RESPONSES, "event: response.in_progress"),
    ],
)
@pytest.mark.parametrize("event", [None, ROUND], ids=["silence", "rounds of a long call"])
def test_silence_is_filled(path, sign, event, monkeypatch):
    async def played(*_: Any, **__: Any) -> Any:
        for each in (READ, event, event, *said("late")[1:2], event, *said()[1:]):
            yield each

    monkeypatch.setattr(http, "read_events", played)
    endpoint = stubbed(Stub(), Settings(DEMO, keepalive_seconds=0.0))
    text = endpoint.post(path, stream=True).text
    first, second = text.split("late", 1)
    assert first.count(f"{sign}\n") >= 2 and second.count(f"{sign}\n") >= 1


# --- clients that hang up


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_cancels(stream):
    stub = Stub(chain(ANSWER[:5], cycle(ANSWER[5:7])), pause=0.001)
    body = json.dumps({"messages": HELLO, "stream": stream}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with listening(stub, Settings(DEMO)) as url:
        address = httpx2.URL(url)
        with socket.create_connection((address.host, address.port), timeout=LIMIT) as client:
            client.sendall(head + body)
            wait_until(lambda: stub.jobs)
            if stream:
                assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
        wait_until(lambda: stub.jobs[0].cancelled.is_set())
        metrics = partial(httpx2.get, f"{url}/metrics", timeout=LIMIT, trust_env=False)
        wait_until(lambda: 'mlx_spec_cancelled_total{model="demo"} 1.0' in metrics().text)
