"""Streams as clients read them, and what happens when nobody reads any more."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from endpoint import (
    ANSWER,
    CALLS,
    CHAT,
    CLOSED,
    CUT,
    DEMO,
    HELLO,
    STATISTICS,
    TEXT,
    Stub,
    error_of,
    events_of,
    running,
    stubbed,
    wait_until,
)

from mlx_spec.apps.server import anthropic_messages, openai_responses
from mlx_spec.apps.server.openai_chat import ChatWriter
from mlx_spec.apps.server.openai_completions import TextWriter
from mlx_spec.apps.server.request import (
    ChoiceEnded,
    PromptRead,
    RoundDone,
    TextDelta,
    ToolCallDelta,
    ToolCallDropped,
    ToolCallStarted,
)
from mlx_spec.apps.server.settings import Settings

ENDLESS = {"max_tokens": 3900, "temperature": 0, "logit_bias": {"106": -100, "1": -100}}


def test_a_chunk_a_round():
    found = stubbed(Stub()).chunks()
    deltas = [chunk["choices"][0]["delta"] for chunk in found]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Hm."},
        {"content": "Hello"},  # two pieces of one round
        {"content": " you"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in found] == [None] * 4 + ["stop"]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in found}) == 1
    assert {chunk["object"] for chunk in found} == {"chat.completion.chunk"}
    assert not any("usage" in chunk or "mlx_spec" in chunk for chunk in found)
    assert [i for i, chunk in enumerate(found) if "timings" in chunk] == [4]


def test_usage_comes_last_and_is_null_before():
    found = stubbed(Stub()).chunks(stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in found[:-1]] == [None] * 5
    last = found[-1]
    assert last["choices"] == [] and last["object"] == "chat.completion.chunk"
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    assert last["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 3
    assert [i for i, chunk in enumerate(found) if "timings" in chunk] == [5]
    timings = last["timings"]
    assert (timings["draft_kind"], timings["draft_n"], timings["draft_n_accepted"]) == ("lookup", 6, 2)
    assert timings["gain"] == pytest.approx(1.5) and timings["reason"] == "speculation pays"


def test_drafts_are_shown_to_those_who_ask():
    found = stubbed(Stub()).chunks(stream_options={"include_draft": True})
    spans = [span for chunk in found for span in chunk.get("mlx_spec", {}).get("spans", [])]
    first = {"text": "Hel", "source": "lookup", "position": 1}
    assert spans == [first, {"text": "lo", "source": None, "position": 0}]
    statistics = [c["mlx_spec"]["statistics"] for c in found if "statistics" in c.get("mlx_spec", {})]
    assert [(one["index"], one["accepted_at"]) for one in statistics] == [(0, [1, 1]), (0, [1, 1])]


def test_calls_come_bit_by_bit():
    found = stubbed(Stub(CALLS)).chunks()
    deltas = [call for chunk in found for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert deltas[0] == {
        "index": 0,
        "id": "call_a",
        "type": "function",
        "function": {"name": "weather", "arguments": ""},
    }
    text = "".join(delta["function"]["arguments"] for delta in deltas if delta["index"] == 0)
    assert json.loads(text) == {"city": "Oslo"}
    assert [set(delta) for delta in deltas[1:3]] == [{"index", "function"}] * 2
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_an_error_after_the_headers_is_an_object_and_ends_the_stream():
    for path, body in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "x"})):
        found = events_of(stubbed(Stub(CUT)).post(path, **body, stream=True).text)
        error = json.loads(found[-1])["error"]
        assert error["code"] == "shutting_down" and set(error) == {"message", "type", "param", "code"}
        assert not any("[DONE]" in one for one in found) and len(found) > 1


@pytest.mark.parametrize(
    ("path", "shape", "name", "ends"),
    [
        (CHAT, ChatWriter, "piece", "data: "),
        (TEXT, TextWriter, "piece", "data: "),
        ("/v1/messages", anthropic_messages.Answer, "_piece", "event: error\ndata: "),
        (
            "/v1/messages",
            anthropic_messages.Answer,
            "read",
            "event: error\ndata: ",
        ),  # nor can it tell of failures
        ("/v1/responses", openai_responses.Answer, "_text", "event: response.failed\ndata: "),
    ],
)
def test_a_bug_of_ours_is_told_as_failures_are(path, shape, name, ends, monkeypatch, caplog):
    sound = getattr(shape, name)

    def breaks(self: Any, event: Any, *rest: Any) -> Any:
        if isinstance(event, PromptRead):
            return sound(self, event, *rest)
        raise RuntimeError("a secret of the house")

    monkeypatch.setattr(shape, name, breaks)
    asked = {TEXT: {"prompt": "x"}, "/v1/responses": {"input": "x"}}
    body = asked.get(path, {"messages": HELLO, "max_tokens": 9})
    stub = Stub()
    response = stubbed(stub).post(path, model="demo", stream=True, **body)
    last = response.text.removesuffix("\n\n").split("\n\n")[-1]
    assert response.status_code == 200 and last.startswith(ends)
    found = json.loads(last.removeprefix(ends))
    error = found["error"] if "error" in found else found["response"]["error"]
    assert "its log says why" in error["message"] and "secret" not in response.text
    assert stub.jobs[0].cancelled.wait(9) and "a secret of the house" in caplog.text


def test_a_bug_before_the_first_word_is_told_as_well(monkeypatch, caplog):
    monkeypatch.setattr(anthropic_messages.Answer, "read", lambda self, event: 1 / 0)
    body = {"messages": HELLO, "model": "demo", "max_tokens": 9, "stream": True}
    text = stubbed(Stub()).post("/v1/messages", **body).text
    assert text.startswith("event: error\ndata: ") and "division" in caplog.text


def test_no_character_ends_a_line_but_those_of_the_stream():
    text = "a\u2028b\u2029c\x85d\re"
    raw = stubbed(
        Stub((PromptRead(1, 0), TextDelta(0, "answer", text), ChoiceEnded(0, "stop"), CLOSED))
    ).chat(stream=True)
    assert not set("\u2028\u2029\x85\r") & set(raw.text)
    contents = [json.loads(one)["choices"][0]["delta"].get("content", "") for one in events_of(raw.text)[:-1]]
    assert "".join(contents) == text


DROPPED = (
    PromptRead(5, 2),
    ToolCallStarted(0, 0, "call_a", "weather"),
    ToolCallDelta(0, 0, '{"city": "Os'),
    RoundDone(0, STATISTICS),
    ToolCallDropped(0, 0),
    TextDelta(0, "answer", "<|tool_call>call:weather{city:"),
    ChoiceEnded(0, "length"),
    CLOSED,
)


def test_a_call_that_is_dropped_is_text_in_the_end():
    endpoint = stubbed(Stub(DROPPED))
    (whole,) = endpoint.chat().json()["choices"]
    assert whole["message"]["content"] == "<|tool_call>call:weather{city:"
    assert "tool_calls" not in whole["message"] and whole["finish_reason"] == "length"
    chunks = [chunk["choices"][0] for chunk in endpoint.chunks()]
    texts = [chunk["delta"].get("content", "") for chunk in chunks]
    assert "".join(texts) == whole["message"]["content"]
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["length"]


def test_silence_is_filled_with_comments():
    settings = Settings(DEMO, keepalive_seconds=0.02)
    text = stubbed(Stub(pause=0.1), settings).chat(stream=True).text
    assert text.startswith(": keepalive\n\n") and text.count(": keepalive\n\n") > 5
    assert events_of(text)[-1] == "[DONE]"


def test_headers_of_a_stream():
    headers = stubbed(Stub()).chat(stream=True).headers
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_stream_options_without_a_stream_are_refused(path):
    found = stubbed(Stub()).refused(path, prompt="x", stream_options={"include_usage": True})
    assert found["param"] == "stream_options"


# --- clients that hang up


async def hang_up(app: Any, body: dict[str, Any], after: int) -> list[dict[str, Any]]:
    """Send a request and hang up after so many messages; what was sent until then."""
    sent: list[dict[str, Any]] = []
    gone = asyncio.Event()
    bodies = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if bodies:
            return bodies.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) >= after:
            gone.set()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": CHAT,
        "raw_path": CHAT.encode(),
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
    }
    if after == 0:
        asyncio.get_running_loop().call_later(0.1, gone.set)
    await asyncio.wait_for(app(scope, receive, send), 10)
    return sent


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_cancels(stream):
    stub = Stub((*ANSWER[:5], *ANSWER[5:7] * 10_000), pause=0.001)
    endpoint = stubbed(stub)
    body = {"messages": HELLO, "stream": stream}
    sent = asyncio.run(hang_up(endpoint.app, body, after=4 if stream else 0))
    assert stub.jobs[0].cancelled.is_set()
    assert len(sent) < 100 if stream else sent[0]["status"] == 499
    assert 'mlx_spec_cancelled_total{model="demo"} 1.0' in endpoint.client.get("/metrics").text


def test_an_answer_that_was_read_to_its_end_is_not_counted_as_cut():
    endpoint = stubbed(Stub())
    endpoint.chat()
    endpoint.chunks()
    assert 'mlx_spec_cancelled_total{model="demo"}' not in endpoint.client.get("/metrics").text


@pytest.mark.parametrize("stream", [True, False])
def test_the_engine_stops_within_a_round(stream):
    with running() as endpoint:
        body = {"messages": HELLO, "stream": stream, **ENDLESS}
        asyncio.run(hang_up(endpoint.app, body, after=4 if stream else 0))
        wait_until(lambda: endpoint.client.get("/health").json()["running"] == 0, 5)
        assert endpoint.chat(max_tokens=4).status_code == 200


def test_requests_beyond_the_queue_are_refused_and_the_others_answered():
    stub = Stub()
    endpoint = stubbed(stub)
    assert endpoint.chat().status_code == 200
    from mlx_spec.apps.server.errors import queue_full

    stub.refusal = queue_full(1, 1)
    error_of(endpoint.chat(stream=True), 429)
    stub.refusal = None
    assert endpoint.chunks()[-1]["choices"][0]["finish_reason"] == "stop"
