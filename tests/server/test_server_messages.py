"""Anthropic's Messages API: bodies in and out, streams, refusals; answers checked by its SDK's own types."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

anthropic = pytest.importorskip("anthropic")
from anthropic.types import Message, RawMessageStreamEvent  # noqa: E402
from pydantic import TypeAdapter, ValidationError  # noqa: E402
from scripted import CLOSED, OPENED, TURN, Scripted, frames, listening, post, said  # noqa: E402

from mlx_spec.apps.server.ask import (  # noqa: E402
    CallArguments,
    CallDropped,
    CallOpened,
    Closed,
    Ended,
    Failed,
    Piece,
    Tool,
    ToolUse,
)
from mlx_spec.apps.server.failures import Failure, broken, busy, unavailable  # noqa: E402
from mlx_spec.apps.server.messages import router  # noqa: E402
from mlx_spec.apps.server.messages.errors import error_json  # noqa: E402
from mlx_spec.apps.server.settings import Limits, Settings  # noqa: E402
from mlx_spec.sampling import Sampling  # noqa: E402

SETTINGS = Settings((), keepalive_seconds=0.05, limits=Limits(body_bytes=100_000, schema_bytes=2000))
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
DROPPED = (  # a call that is one, then one that is cut off
    *TURN[:13],
    CallArguments(0, 1, '{"at": "xyzzy'),
    CallDropped(0, 1),
    Piece(0, "answer", "<now>"),
    Ended(0, "length"),
    CLOSED,
)
BODY: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 64,
    "messages": [{"role": "user", "content": "Hello"}],
}
WEATHER = {"name": "weather", "description": "Rain?", "input_schema": {"type": "object"}}


class Place:
    """A running server and its worker."""

    def __init__(self, worker: Scripted, url: str) -> None:
        self.worker, self.url = worker, f"{url}/v1/messages"
        self.client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)

    def ask(self, **changes: Any) -> Any:
        """What the worker is asked for a body."""
        status, reply = post(self.url, BODY | changes)
        assert status == 200, reply
        return self.worker.asked

    def refused(self, **changes: Any) -> str:
        """The message of a 400."""
        status, reply = post(self.url, BODY | changes)
        assert (status, reply["type"], reply["error"]["type"]) == (400, "error", "invalid_request_error")
        message: str = reply["error"]["message"]
        return message


@pytest.fixture(scope="module")
def running() -> Iterator[Place]:
    worker = Scripted()
    with listening(router(worker, SETTINGS, count=lambda ask: len(ask.prompt.messages))) as url:
        yield Place(worker, url)


@pytest.fixture
def place(running: Place) -> Place:
    running.worker.script, running.worker.refuses = said("Hi"), None
    running.worker.jobs.clear()
    return running


def without(body: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key not in keys}


# --- answers


def test_whole_answer_is_theirs_by_type(place: Place):
    place.worker.script = TURN
    status, body = post(place.url, BODY)
    message = Message.model_validate(body, strict=True)
    assert status == 200 and message.stop_reason == "tool_use" and message.model == "demo"
    assert without(message.model_dump(exclude_none=True), "id")["content"] == [
        {"type": "thinking", "thinking": "Weather?", "signature": ""},
        {"type": "text", "text": "I ask: zwölf\n\n🌦 data: x"},
        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Köln", "days": [1, 2]}},
        {"type": "tool_use", "id": "call_2", "name": "now", "input": {}},
    ]
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (18, 12, 17)
    assert body["timings"]["draft_n_accepted"] == 11 and body["timings"]["speculation"] == "on"


def test_every_event_is_theirs_by_type(place: Place):
    place.worker.script = TURN
    found = [(name, content) for name, content in frames(place.url, BODY) if name != "ping"]
    for name, content in found:
        assert EVENT.validate_python(content, strict=True).type == name
    with pytest.raises(ValidationError):
        EVENT.validate_python(without(found[1][1], "index"), strict=True)
    names = [name for name, _ in found]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-2:] == ["message_delta", "message_stop"]
    assert found[0][1]["message"]["content"] == [] and found[0][1]["message"]["usage"]["input_tokens"] == 18
    assert found[-2][1]["timings"]["predicted_n"] == 17


def test_blocks_open_and_close_in_turn(place: Place):
    place.worker.script = TURN
    still: int | None = None
    opened = 0
    for name, content in frames(place.url, BODY):
        if name == "content_block_start":
            assert still is None and content["index"] == opened
            still, opened = opened, opened + 1
        elif name == "content_block_delta":
            assert content["index"] == still
        elif name == "content_block_stop":
            assert content["index"] == still
            still = None
    assert opened == 4 and still is None


@pytest.mark.parametrize(
    "script",
    [
        TURN,
        said("one", " two", reason="length"),
        said("cut", stop="END"),
        said(),
        DROPPED,
    ],
)
def test_what_their_client_accumulates_is_the_whole_answer(place: Place, script: Any):
    place.worker.script = script
    with place.client.messages.stream(**BODY) as stream:
        streamed = stream.get_final_message().model_dump(exclude_none=True)
    whole = place.client.messages.create(**BODY).model_dump(exclude_none=True)
    for block in streamed["content"]:
        block.pop("parsed_output", None)
    assert without(streamed, "id") == without(whole, "id", "timings")


@pytest.mark.parametrize(
    ("script", "reason", "stop"),
    [
        (said("a"), "end_turn", None),
        (said("a", stop="END"), "stop_sequence", "END"),
        (TURN, "tool_use", None),
        (said("a", reason="length"), "model_context_window_exceeded", None),  # 17 of 64 tokens
        (
            (
                *said("a", reason="length")[:-1],
                Closed(replace(CLOSED.usage, completion_tokens=64), CLOSED.timings),
            ),
            "max_tokens",
            None,
        ),
    ],
)
def test_stop_reasons(place: Place, script: Any, reason: str, stop: str | None):
    place.worker.script = script
    whole = place.client.messages.create(**BODY)
    assert (whole.stop_reason, whole.stop_sequence) == (reason, stop)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_none_is_never_shown(place: Place, stream: bool):
    place.worker.script = DROPPED
    found = str(frames(place.url, BODY) if stream else post(place.url, BODY))
    assert "call_1" in found and "call_2" not in found and "xyzzy" not in found and "<now>" in found


def test_a_long_call_is_no_silence(place: Place):
    more = tuple(step for _ in range(6) for step in (0.03, CallArguments(0, 0, " ")))
    place.worker.script = (
        OPENED,
        CallOpened(0, 0, "a", "now"),
        *more,
        CallArguments(0, 0, "{}"),
        *said()[1:],
    )
    names = [name for name, _ in frames(place.url, BODY)]
    assert names.count("ping") >= 2 and names.count("content_block_delta") == 1


def test_thoughts_can_be_left_out(place: Place):
    place.worker.script = TURN
    thinking = {"type": "adaptive", "display": "omitted"}
    found = frames(place.url, BODY | {"thinking": thinking})
    assert "Wea" not in str(found) and "zwölf" in str(found)
    _, body = post(place.url, BODY | {"thinking": thinking})
    assert body["content"][0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert place.worker.asked.prompt.thinking


def test_silence_is_filled_with_pings(place: Place):
    place.worker.script = (0.12, *said("late")[:2], 0.12, *said("late")[2:])
    found = frames(place.url, BODY)
    names = [name for name, _ in found]
    assert names[:2] == ["message_start", "ping"] and names.count("ping") >= 3
    start, delta = found[0][1], next(content for name, content in found if name == "message_delta")
    assert start["message"]["usage"]["input_tokens"] == 0  # not known yet ...
    assert delta["usage"]["input_tokens"] == 18  # ... and told in the end
    with place.client.messages.stream(**BODY) as stream:
        assert stream.get_final_text() == "late"


# --- requests


def test_a_conversation_with_everything(place: Place):
    cached = {"cache_control": {"type": "ephemeral"}}
    asked = place.ask(
        model="alias",
        system=[{"type": "text", "text": "Be brief.", **cached}, {"type": "text", "text": "Be kind."}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Rain", **cached}]},
            {"role": "user", "content": "in Köln?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I ask.", "signature": ""},
                    {"type": "redacted_thinking", "data": "b3BhcXVl"},
                    {"type": "text", "text": "One "},
                    {"type": "text", "text": "moment."},
                    {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Köln"}},
                    {"type": "tool_use", "id": "b", "name": "now", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": "dry"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "b",
                        "content": [{"type": "text", "text": "no clock"}],
                        "is_error": True,
                    },
                    {"type": "text", "text": "So?"},
                ],
            },
        ],
    )
    calls = [("a", "weather", {"city": "Köln"}), ("b", "now", {})]
    assert asked.model == "demo" and list(asked.prompt.messages) == [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "Rain\n\nin Köln?"},
        {
            "role": "assistant",
            "content": "One moment.",
            "reasoning_content": "I ask.",
            "tool_calls": [
                {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for id, name, arguments in calls
            ],
        },
        {"role": "tool", "tool_call_id": "a", "name": "weather", "content": "dry"},
        {"role": "tool", "tool_call_id": "b", "name": "now", "content": "Error: no clock"},
        {"role": "user", "content": "So?"},
    ]


def test_every_optional_field_may_be_null_and_unknown_ones_are_ignored(place: Place):
    names = "system tools tool_choice thinking output_config stop_sequences temperature top_p top_k stream"
    names += " container mcp_servers metadata service_tier cache_control speed"
    nulls = place.ask(**dict.fromkeys(names.split()), unheard_of={"a": 1})
    assert nulls == place.ask()
    assert nulls.sampling == Sampling(temperature=1.0) and nulls.max_tokens == 64
    assert (nulls.stop, nulls.prompt.tools, nulls.prompt.thinking, nulls.format) == ((), None, False, None)


def test_sampling_and_stops(place: Place):
    asked = place.ask(temperature=0.5, top_p=0.9, top_k=20, stop_sequences=["a", "b", "a"], metadata={"x": 1})
    assert asked.sampling == Sampling(temperature=0.5, top_p=0.9, top_k=20)
    assert asked.stop == ("a", "b")


def test_a_schema_for_the_answer(place: Place):
    schema = {"type": "object", "properties": {"ü": {"type": "integer"}}}
    asked = place.ask(output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"})
    assert asked.format.kind == "json_schema" and "integer" in asked.format.text
    assert asked.format.param == "output_config.format"
    assert asked.prompt.variables == {"reasoning_effort": "low"} and not asked.prompt.thinking


@pytest.mark.parametrize(
    ("choice", "use"),
    [
        (None, {}),
        ({"type": "auto"}, {}),
        ({"type": "any"}, {"choice": "required"}),
        ({"type": "none"}, {"choice": "none"}),
        ({"type": "tool", "name": "weather"}, {"choice": "required", "named": "weather"}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"parallel": False}),
    ],
)
def test_tools(place: Place, choice: Any, use: dict[str, Any]):
    tool = WEATHER | {"type": "custom", "strict": True}
    asked = place.ask(tools=[tool], tool_choice=choice)
    assert asked.prompt.tools == ToolUse((Tool("weather", "Rain?", {"type": "object"}, strict=True),), **use)


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}


def turn(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        (turn(IMAGE), ["messages.0.content.0", "'image'"]),
        (turn({"type": "document"}), ["'document'"]),
        (turn({"type": "tool_result", "tool_use_id": "x", "content": "y"}), ["tool_use_id", "'x'"]),
        (turn({"type": "text"}), ["messages.0.content.0.text.text", "required"]),
        (turn({"type": "text", "text": 3}), ["messages.0.content.0", "string"]),
        ({"messages": []}, ["messages", "at least 1"]),
        ({"messages": None}, ["messages"]),
        ({"messages": [{"role": "user", "content": None}]}, ["messages.0.content"]),
        ({"messages": [{"role": "robot", "content": "x"}]}, ["messages.0.role"]),
        (turn({"type": "text", "text": "Sure, "}, role="assistant"), ["prefilled"]),
        ({"max_tokens": None}, ["max_tokens"]),
        ({"max_tokens": 0}, ["max_tokens"]),
        ({"temperature": 3}, ["temperature"]),
        ({"temperature": 1e-9}, ["temperature"]),
        ({"top_p": 0}, ["top_p"]),
        ({"stop_sequences": ["a", "b", "c", "d", "e"]}, ["5 stop", "4 are the most"]),
        ({"stop_sequences": [""]}, ["stop_sequences.0"]),
        ({"thinking": {"type": "between_tools"}}, ["thinking.type", "'between_tools'"]),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, ["thinking.budget_tokens is 0", "1 to"]),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 64}, "max_tokens": 64},
            ["thinking.budget_tokens is 64", "max_tokens is 64"],
        ),
        ({"container": "c1"}, ["container"]),
        ({"mcp_servers": [{"url": "https://example.com"}]}, ["mcp_servers"]),
        ({"speed": "fast"}, ["speed", "'fast'"]),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            ["tools.0", "web_search_20250305"],
        ),
        ({"tools": [{"name": "x"}]}, ["tools.0.input_schema"]),
        ({"tools": [WEATHER | {"name": "no spaces"}]}, ["tools.0.name"]),
        ({"tools": [WEATHER, WEATHER]}, ["2 tools", "'weather'"]),
        ({"tools": [WEATHER | {"input_schema": {"a": "x" * 3000}}]}, ["'weather'", "2000"]),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "rain"}},
            ["tool_choice.name", "'rain'"],
        ),
        ({"tool_choice": {"type": "any"}}, ["tool_choice"]),
        ({"tool_choice": {"type": "some"}}, ["tool_choice.type"]),
        ({"output_config": {"format": {"type": "xml"}}}, ["output_config.format", "'xml'"]),
        ({"output_config": {"format": {"type": "json_schema"}}}, ["output_config.format.schema"]),
    ],
)
def test_refused_by_name(place: Place, changes: dict[str, Any], names: list[str]):
    message = place.refused(**changes)
    assert all(name in message for name in names) and "\n" not in message, message
    assert place.worker.jobs == []


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"null", b'{"model": "\\ud800"}', b"[" * 50_000, b"\xff\xfe"]
)
def test_bodies_that_are_no_request(place: Place, raw: bytes):
    status, reply = post(place.url, raw)
    assert (status, reply["error"]["type"]) == (400, "invalid_request_error")


def test_a_huge_body(place: Place):
    status, reply = post(place.url, BODY | {"system": "x" * 100_001})
    assert (status, reply["error"]["type"]) == (413, "request_too_large")


# --- failures


@pytest.mark.parametrize(
    ("failure", "error", "kind"),
    [
        (busy(32, 7), "RateLimitError", "rate_limit_error"),
        (unavailable("the server is loading its model", "loading"), "OverloadedError", "overloaded_error"),
        (broken(), "InternalServerError", "api_error"),
        (
            Failure(400, "too long", code="context_length_exceeded"),
            "BadRequestError",
            "invalid_request_error",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_is_not_admitted(place: Place, failure: Failure, error: str, kind: str, stream: bool):
    place.worker.refuses = failure
    with pytest.raises(anthropic.APIStatusError) as caught:
        place.client.messages.create(**BODY, stream=stream)
    assert type(caught.value).__name__ == error
    assert caught.value.body["error"] == {"type": kind, "message": failure.message}
    seconds = None if failure.retry_after is None else str(failure.retry_after)
    assert caught.value.response.headers.get("retry-after") == seconds


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_event_has_a_status(place: Place, stream: bool):
    place.worker.script = (Failed(Failure(400, "prompt too long", code="context_length_exceeded")),)
    with pytest.raises(anthropic.BadRequestError, match="prompt too long"):
        place.client.messages.create(**BODY, stream=stream)


def test_a_failure_in_a_stream_is_an_event(place: Place):
    place.worker.script = (*TURN[:6], Failed(unavailable("shutting down", "shutting_down")))
    name, content = frames(place.url, BODY)[-1]
    assert name == content["type"] == "error" and content["error"]["type"] == "overloaded_error"
    with (
        pytest.raises(anthropic.APIStatusError, match="shutting down"),
        place.client.messages.stream(**BODY) as s,
    ):
        s.until_done()
    status, body = post(place.url, BODY)
    assert (status, body["error"]["type"]) == (529, "overloaded_error")


def test_an_unknown_model_reaches_no_worker(place: Place):
    with pytest.raises(anthropic.NotFoundError, match="'gpt'"):
        place.client.messages.create(**(BODY | {"model": "gpt"}))
    assert place.worker.jobs == []


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 429, 500, 502, 503, 529])
def test_every_status_has_a_type(status: int):
    error = error_json(Failure(status, "x"))["error"]
    assert error["message"] == "x" and error["type"].endswith(("_error", "_large"))


# --- hanging up


def gone(place: Place) -> bool:
    return place.worker.jobs[-1].gone.wait(2)


def test_the_worker_hears_of_a_client_that_hangs_up(place: Place):
    place.worker.script = (OPENED, Piece(0, "answer", "x"), 5.0, *said("late")[2:])
    with pytest.raises(anthropic.APITimeoutError):
        place.client.with_options(timeout=0.2).messages.create(**BODY)
    assert gone(place)


def test_the_worker_hears_of_a_client_that_leaves_a_stream(place: Place):
    place.worker.script = (OPENED, Piece(0, "answer", "x"), 5.0, *said("late")[2:])
    with place.client.messages.create(**BODY, stream=True) as stream:
        next(iter(stream))
    assert gone(place)


def test_an_answer_that_is_read_to_its_end_takes_its_time(place: Place):
    place.worker.script = (OPENED, 0.3, *said("late")[1:])
    began = time.monotonic()
    assert place.client.messages.create(**BODY).content[0].text == "late"
    assert time.monotonic() - began > 0.25


# --- counting


def test_tokens_are_counted_without_an_answer(place: Place):
    found = place.client.messages.count_tokens(model="demo", messages=BODY["messages"], system="Be brief.")
    assert found.input_tokens == 2 and place.worker.jobs == []
    with pytest.raises(anthropic.NotFoundError):
        place.client.messages.count_tokens(model="gpt", messages=BODY["messages"])
    with pytest.raises(anthropic.BadRequestError, match="image"):
        place.client.messages.count_tokens(model="demo", messages=[{"role": "user", "content": [IMAGE]}])
