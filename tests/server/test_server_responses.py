"""OpenAI's Responses API: bodies, streams, refusals; its SDK's own types check the answers."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from support.endpoint import (
    ARGUMENTS,
    BODIES,
    CLOSED,
    CONVERSATION,
    RESPONSES,
    TURN,
    Place,
    Stub,
    said,
    settled,
)

from mlx_spec.apps.server.engine.answers import ChoiceEnded, TextDelta, ToolCall
from mlx_spec.apps.server.requests import parameters

PATH = RESPONSES
BODY = BODIES[PATH]
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": None}
CUT = (*TURN[:9], TextDelta(0, "answer", "more"), ChoiceEnded(0, "length"), CLOSED)
CALLED = ["weather", "mcp__sky__now"]


@pytest.fixture(scope="module")
def event_type(openai: Any) -> TypeAdapter[Any]:
    return TypeAdapter(openai.types.responses.ResponseStreamEvent)


@pytest.fixture
def client(place: Place, openai: Any) -> Any:
    given = {"api_key": "none", "max_retries": 0, "http_client": place.endpoint.client}
    return openai.OpenAI(base_url="http://localhost/v1", **given)


def test_tokens_are_counted_without_an_answer(client: Any, stub: Stub):
    counted = client.post("/responses/input_tokens", body={"model": "demo", "input": "x"}, cast_to=object)
    assert counted == {"object": "response.input_tokens", "input_tokens": 7} and stub.requests == []


# --- answers


def test_a_whole_answer(place: Place, stub: Stub, openai: Any):
    stub.events = TURN
    status, body = place.post(model="demo")
    response = openai.types.responses.Response.model_validate(body, strict=True)
    assert status == 200 and response.status == "completed" and response.model == "demo"
    assert response.output_text == "I ask: zwölf\n\n🌦 data: x"
    thinking, _, call, empty = response.output
    assert thinking.content[0].text == "Weather?" and thinking.encrypted_content is None
    assert (call.call_id, call.name, call.arguments) == ("call_1", "weather", ARGUMENTS)
    assert (empty.call_id, empty.arguments) == ("call_2", "")
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (5, 4, 9)
    assert usage.input_tokens_details.cached_tokens == 2
    assert usage.output_tokens_details.reasoning_tokens == 1
    assert body["timings"]["accepted_at"] == [1, 1] and body["store"] is True


def test_a_stream(place: Place, stub: Stub, event_type: TypeAdapter[Any]):
    stub.events = TURN
    found = place.frames()
    for number, (name, content) in enumerate(found):
        event = event_type.validate_python(content, strict=True)
        assert (event.type, event.sequence_number) == (name, number)
    with pytest.raises(ValidationError):
        event_type.validate_python({k: v for k, v in found[2][1].items() if k != "output_index"}, strict=True)
    names = [name for name, _ in found]
    assert names[:2] == ["response.created", "response.in_progress"] and names[-1] == "response.completed"
    assert names.count("response.output_item.done") == 4


@pytest.mark.parametrize(
    "script", [TURN, said("one", " two"), said(), CUT], ids=["turn", "text", "none", "cut"]
)
def test_the_client_accumulates_the_whole_answer(client: Any, stub: Stub, script: Any):
    stub.events = script
    snapshot = None
    with client.responses.stream(model="demo", **BODY) as stream:
        for event in stream:
            if event.type in ("response.completed", "response.incomplete"):
                snapshot = event.response
    assert snapshot is not None and (snapshot.status == "incomplete") == (script is CUT)
    assert (snapshot.completed_at is None) == (script is CUT)
    whole = client.responses.create(model="demo", **BODY)
    assert settled(snapshot.model_dump(exclude_none=True)) == settled(whole.model_dump(exclude_none=True))


def test_thinking_can_be_sent_back(place: Place, client: Any, stub: Stub):
    stub.events = TURN
    response = client.responses.create(model="demo", **BODY, include=["reasoning.encrypted_content"])
    field = response.output[0].encrypted_content
    for given, thinking in ((field, "Weather?"), ("gAAAAABo", None), (None, None)):
        back = {"type": "reasoning", "summary": [], "id": "rs_1", "encrypted_content": given}
        request = place.request(input=[{"role": "user", "content": "x"}, back])
        assert request.prompt.messages[-1].get("reasoning_content") == thinking


# --- requests


def test_a_conversation_with_everything(place: Place):
    thought = [{"type": "reasoning_text", "text": "I ask."}]
    said = [{"type": "output_text", "text": "One moment.", "annotations": [], "logprobs": []}]
    noon = [{"type": "input_text", "text": "Error: no clock"}]
    request = place.request(
        model="alias",
        instructions="Be brief.",
        input=[
            {"type": "message", "role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "input_text", "text": "Rain"}]},
            {"type": "message", "role": "user", "content": "in Köln?", "id": "msg_0"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": thought},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": said},
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": ARGUMENTS, "id": "fc"},
            {"type": "function_call", "call_id": "b", "name": "now", "arguments": ""},
            {"type": "function_call_output", "call_id": "a", "output": "dry"},
            {"type": "function_call_output", "call_id": "b", "output": noon},
            {"role": "user", "content": "So?"},
        ],
    )
    assert request.model == "demo" and list(request.prompt.messages) == CONVERSATION


NOW = {**WEATHER, "name": "now", "description": "The time."}
SPACE = {
    "type": "namespace",
    "name": "mcp__sky",
    "description": "The sky.",
    "tools": [WEATHER, NOW, {"type": "custom", "name": "c"}],
}
CODEX = {  # what Codex CLI 0.169 sends beside its input
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {"turn_id": "t"},
    "text": {"verbosity": "low"},
    "tools": [WEATHER, SPACE, {"type": "web_search", "external_web_access": False}],
}


def test_namespaces_are_opened_and_hosted_tools_left_out(
    place: Place, stub: Stub, event_type: TypeAdapter[Any], caplog: Any, monkeypatch: Any
):
    """A call in a stream has the two fields that Codex reads: without `namespace` it finds no tool."""
    caplog.set_level(logging.WARNING, "mlx_spec.server")
    monkeypatch.setattr(parameters, "_logged", set())
    place.post(**CODEX)
    calls = [ToolCall(0, i, f"c{i}", name, "{}") for i, name in enumerate(CALLED)]
    stub.events = (TURN[0], *calls, *TURN[-2:])
    found = place.frames(**CODEX)
    parsed = stub.requests[-1].prompt.tools
    described = [(tool.name, tool.description) for tool in parsed.tools]
    sky = [("mcp__sky__weather", "The sky."), ("mcp__sky__now", "The time.")]
    assert described == [("weather", None), *sky]
    done = [content["item"] for name, content in found if name == "response.output_item.done"]
    names = [(item["name"], item.get("namespace")) for item in done]
    assert names == [("weather", None), ("now", "mcp__sky")]
    for _, content in found:
        event_type.validate_python(content, strict=True)
    last = found[-1][1]["response"]
    assert [tool["type"] for tool in last["tools"]] == ["function", "namespace"]
    assert [tool["name"] for tool in last["tools"][1]["tools"]] == ["weather", "now"]
    assert [note.split()[1] for note in last["mlx_spec"]["notes"]] == ["'custom'", "'web_search'", "has"]
    assert sum("'web_search'" in line for line in caplog.messages) == 1
    results = [{"type": "function_call_output", "call_id": f"c{i}", "output": "x"} for i in (0, 1)]
    turns = place.request(input=[{"role": "user", "content": "x"}, *done, *results]).prompt.messages
    assert [call["function"]["name"] for call in turns[1]["tool_calls"]] == CALLED
    assert "mlx_spec" not in place.post()[1]


def test_a_function_of_a_namespace_can_be_chosen(place: Place):
    one = {"type": "function", "name": "now", "namespace": "mcp__sky"}
    assert place.request(tools=[SPACE], tool_choice=one).prompt.tools.named == "mcp__sky__now"
    allowed = {"type": "allowed_tools", "tools": [one]}
    tools = place.request(tools=[SPACE], tool_choice=allowed).prompt.tools.tools
    assert [tool.name for tool in tools] == CALLED[1:]
