"""Anthropic's Messages API: bodies, streams, refusals; its SDK's own types check the answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from endpoint import BODIES, CLOSED, MESSAGES, SHUTDOWN, TURN, Place, Stub, said

from mlx_spec.apps.server.errors import Failure, internal_error, queue_full, unavailable
from mlx_spec.apps.server.request import Tool, ToolUse
from mlx_spec.sampling import Sampling

anthropic = pytest.importorskip("anthropic")
from anthropic.types import Message, RawMessageStreamEvent  # noqa: E402
from pydantic import TypeAdapter, ValidationError  # noqa: E402

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
PATH = MESSAGES
BODY = BODIES[PATH]
WEATHER = {"name": "weather", "description": "Rain?", "input_schema": {"type": "object"}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}


@pytest.fixture
def client(place: Place) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=place.url, api_key="none", max_retries=0) as made:
        yield made


def without(body: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key not in keys}


# --- answers


def test_a_whole_answer(place: Place, stub: Stub):
    stub.events = TURN
    status, body = place.post()
    message = Message.model_validate(body, strict=True)
    assert status == 200 and message.stop_reason == "tool_use" and message.model == "demo"
    assert message.model_dump(exclude_none=True)["content"] == [
        {"type": "thinking", "thinking": "Weather?", "signature": ""},
        {"type": "text", "text": "I ask: zwölf\n\n🌦 data: x"},
        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Köln", "days": [1, 2]}},
        {"type": "tool_use", "id": "call_2", "name": "now", "input": {}},
    ]
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (3, 2, 4)
    assert body["timings"]["draft_n_accepted"] == 2 and body["timings"]["speculation"] == "on"


def test_a_stream(place: Place, stub: Stub):
    stub.events = TURN
    found = [(name, content) for name, content in place.frames() if name != "ping"]
    for name, content in found:
        assert EVENT.validate_python(content, strict=True).type == name
    with pytest.raises(ValidationError):
        EVENT.validate_python(without(found[1][1], "index"), strict=True)
    names = [name for name, _ in found]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-2:] == ["message_delta", "message_stop"]
    assert found[0][1]["message"]["content"] == [] and found[0][1]["message"]["usage"]["input_tokens"] == 3
    assert found[-2][1]["timings"]["predicted_n"] == 4


@pytest.mark.parametrize(
    "script", [TURN, said("one", " two", reason="length"), said("cut", stop="END"), said()]
)
def test_the_client_accumulates_the_whole_answer(client: Any, stub: Stub, script: Any):
    stub.events = script
    with client.messages.stream(**BODY) as stream:
        streamed = stream.get_final_message().model_dump(exclude_none=True)
    whole = client.messages.create(**BODY).model_dump(exclude_none=True)
    for block in streamed["content"]:
        block.pop("parsed_output", None)
    assert without(streamed, "id") == without(whole, "id", "timings")


CUT = said("a", reason="length")
FULL = replace(CLOSED, usage=replace(CLOSED.usage, completion_tokens=64))


@pytest.mark.parametrize(
    ("script", "reason", "stop"),
    [
        (said("a"), "end_turn", None),
        (said("a", stop="END"), "stop_sequence", "END"),
        (TURN, "tool_use", None),
        (CUT, "model_context_window_exceeded", None),  # 4 of 64 tokens
        ((*CUT[:-1], FULL), "max_tokens", None),
    ],
)
def test_stop_reasons(client: Any, stub: Stub, script: Any, reason: str, stop: str | None):
    stub.events = script
    whole = client.messages.create(**BODY)
    assert (whole.stop_reason, whole.stop_sequence) == (reason, stop)


def test_thinking_can_be_omitted(place: Place, stub: Stub):
    stub.events = TURN
    thinking = {"type": "adaptive", "display": "omitted"}
    found = place.frames(thinking=thinking)
    assert "Wea" not in str(found) and "zwölf" in str(found)
    _, body = place.post(thinking=thinking)
    assert body["content"][0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert stub.requests[-1].prompt.thinking


# --- requests


def test_a_conversation_with_everything(place: Place):
    cached = {"cache_control": {"type": "ephemeral"}}
    answer = [
        {"type": "thinking", "thinking": "I ask.", "signature": ""},
        {"type": "redacted_thinking", "data": "b3BhcXVl"},
        {"type": "text", "text": "One "},
        {"type": "text", "text": "moment."},
        {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Köln"}},
        {"type": "tool_use", "id": "b", "name": "now", "input": {}},
    ]
    failed = {"content": [{"type": "text", "text": "no clock"}], "is_error": True}
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": "dry"},
        {"type": "tool_result", "tool_use_id": "b", **failed},
        {"type": "text", "text": "So?"},
    ]
    request = place.request(
        model="alias",
        system=[{"type": "text", "text": "Be brief.", **cached}, {"type": "text", "text": "Be kind."}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Rain", **cached}]},
            {"role": "user", "content": "in Köln?"},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": results},
        ],
    )
    calls = [("a", "weather", {"city": "Köln"}), ("b", "now", {})]
    assert request.model == "demo" and list(request.prompt.messages) == [
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


def test_optional_fields_may_be_null(place: Place):
    names = "system tools tool_choice thinking output_config stop_sequences temperature top_p top_k stream"
    names += " container mcp_servers metadata service_tier cache_control speed"
    nulls = place.request(**dict.fromkeys(names.split()))
    assert nulls == place.request()
    assert nulls.sampling == Sampling(temperature=1.0) and nulls.max_tokens == 64
    assert (nulls.stop, nulls.prompt.tools, nulls.prompt.thinking, nulls.format) == ((), None, False, None)


def test_sampling_and_stops(place: Place):
    stops = ["a", "b", "a"]
    request = place.request(temperature=0.5, top_p=0.9, top_k=20, stop_sequences=stops, metadata={"x": 1})
    assert request.sampling == Sampling(temperature=0.5, top_p=0.9, top_k=20)
    assert request.stop == ("a", "b")


def test_a_schema_for_the_answer(place: Place):
    schema = {"type": "object", "properties": {"ü": {"type": "integer"}}}
    format = {"type": "json_schema", "schema": schema}
    request = place.request(output_config={"format": format, "effort": "low"})
    assert request.format.kind == "json_schema" and "integer" in request.format.text
    assert request.format.param == "output_config.format"
    assert request.prompt.variables == {"reasoning_effort": "low"} and not request.prompt.thinking


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
    request = place.request(tools=[WEATHER | {"type": "custom", "strict": True}], tool_choice=choice)
    tool = Tool("weather", "Rain?", {"type": "object"}, strict=True)
    assert request.prompt.tools == ToolUse((tool,), **use)


def test_hosted_tools_are_left_out_with_a_note(place: Place):
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    given = {"tools": [WEATHER, search, {"type": "mcp_toolset", "mcp_server_name": "x"}]}
    assert [tool.name for tool in place.request(**given).prompt.tools.tools] == ["weather"]
    notes = place.post(**given)[1]["mlx_spec"]["notes"]
    assert len(notes) == 2 and "'web_search_20250305' needs a service" in notes[1]
    assert place.frames(**given)[0][1]["message"]["mlx_spec"]["notes"] == notes
    assert place.request(tools=[search]).prompt.tools is None and "mlx_spec" not in place.post()[1]
    forced = {"tool_choice": {"type": "tool", "name": "web_search"}}
    place.stub.requests.clear()
    assert "'web_search' is none of the tools" in place.error(**given, **forced)["message"]


def turn(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


def thinking(budget: int, max_tokens: int = 64) -> dict[str, Any]:
    return {"thinking": {"type": "enabled", "budget_tokens": budget}, "max_tokens": max_tokens}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (turn(IMAGE), "messages.0.content.0 'image'"),
        (turn({"type": "tool_result", "tool_use_id": "x", "content": "y"}), "tool_use_id 'x'"),
        (turn({"type": "text"}), "messages.0.content.0.text required"),
        (turn({"type": "text", "text": 3}), "messages.0.content.0 string"),
        ({"messages": []}, "messages least"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        (turn({"type": "text", "text": "Sure, "}, role="assistant"), "prefilled"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"stop_sequences": list("abcde")}, "5 stop 4 most"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type 'between_tools'"),
        (thinking(0), "thinking.budget_tokens 1"),
        (thinking(64), "thinking.budget_tokens max_tokens 64"),
        ({"container": "c1"}, "container"),
        ({"speed": "fast"}, "speed 'fast'"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0 bash_20250124"),
        ({"tools": [WEATHER, WEATHER]}, "2 tools 'weather'"),
        ({"tools": [WEATHER | {"input_schema": {"a": "x" * 3000}}]}, "'weather' 2000"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "rain"}}, "tool_choice.name 'rain'"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format 'xml'"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ],
)
def test_refusals_name_the_field(place: Place, changes: dict[str, Any], words: str):
    message = place.error(**changes)["message"]
    assert all(word in message for word in words.split()), message


# --- failures


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (queue_full(32, 7), "RateLimitError"),
        (unavailable("the server is loading its model", "loading"), "OverloadedError"),
        (internal_error(), "InternalServerError"),
        (Failure(400, "too long"), "BadRequestError"),
    ],
)
def test_the_client_knows_every_failure(client: Any, stub: Stub, failure: Failure, error: str):
    stub.refusal = failure
    with pytest.raises(anthropic.APIStatusError) as caught:
        client.messages.create(**BODY)
    assert type(caught.value).__name__ == error and failure.message in str(caught.value)


def test_a_failure_in_a_stream_is_an_event(place: Place, client: Any, stub: Stub):
    stub.events = (*TURN[:6], SHUTDOWN)
    name, content = place.frames()[-1]
    assert name == content["type"] == "error" and content["error"]["type"] == "overloaded_error"
    with pytest.raises(anthropic.APIStatusError, match="shutting down"), client.messages.stream(**BODY) as s:
        s.until_done()
    status, body = place.post()
    assert (status, body["error"]["type"]) == (529, "overloaded_error")


# --- counting


def test_tokens_are_counted_without_an_answer(client: Any, stub: Stub):
    prompt = {"model": "demo", "messages": BODY["messages"]}
    assert client.messages.count_tokens(**prompt, system="Be brief.").input_tokens == 7
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(**prompt | {"model": "gpt"})
    with pytest.raises(anthropic.BadRequestError, match="image"):
        client.messages.count_tokens(**prompt | {"messages": [{"role": "user", "content": [IMAGE]}]})
    assert stub.requests == []
