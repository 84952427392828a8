"""Anthropic's Messages API: bodies, streams, refusals; its SDK's own types check the answers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from support.endpoint import (
    ARGUMENTS,
    BODIES,
    CHAT,
    CLOSED,
    CONVERSATION,
    DEMO,
    MESSAGES,
    RESPONSES,
    TEXT,
    TURN,
    Place,
    Stub,
    error_of,
    said,
    stubbed,
)

from mlx_spec.apps.server.protocols.anthropic_messages import MessageWriter
from mlx_spec.apps.server.settings import Settings

PATH = MESSAGES
BODY = BODIES[PATH]
WEATHER = {"name": "weather", "description": "Rain?", "input_schema": {"type": "object"}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}


@pytest.fixture
def client(place: Place, anthropic: Any) -> Any:
    given = {"api_key": "none", "max_retries": 0, "http_client": place.endpoint.client}
    return anthropic.Anthropic(base_url="http://localhost", **given)


def without(body: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key not in keys}


def test_models_as_anthropic_lists_them(client: Any, anthropic: Any):
    found = [*client.models.list(), client.models.retrieve("alias:latest")]
    shown = [(model.type, model.id, model.display_name, model.created_at.year) for model in found]
    assert shown == [("model", name, name, 2023) for name in ("demo", "alias", "alias:latest")]
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.models.retrieve("gpt")
    assert caught.value.type == "not_found_error"


@pytest.mark.parametrize(
    ("path", "given", "expected"),
    [
        ("/v1/models/gpt", {}, (404, "not_found_error")),
        ("/v1/nothing", {}, (404, "not_found_error")),
        ("/v1/models", {"host": "evil.example"}, (403, "permission_error")),
        ("/v1/models", {"x-api-key": "wrong"}, (401, "authentication_error")),
        ("/v1/models", {"content-length": "1" + 9 * "0"}, (413, "request_too_large")),
    ],
)
def test_errors_on_shared_paths_have_the_form_of_the_client(path: str, given: Any, expected: Any):
    client = stubbed(Stub(), Settings(DEMO, api_key="k")).client
    headers = {"x-api-key": "k", **given}
    error_of(client.get(path, headers=headers), expected[0])
    reply = client.get(path, headers=headers | {"anthropic-version": "2023-06-01"})
    assert (reply.status_code, reply.json()["error"]["type"]) == expected
    assert set(reply.json()) == {"type", "error"} and reply.json()["type"] == "error"


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, "/infill", "/race", f"{RESPONSES}/x", "/api/chat"])
def test_the_form_of_errors_on_a_protocols_own_path_is_fixed(place: Place, path: str):
    post = place.endpoint.client.post
    replies = [
        post(path, json=[], headers=dict.fromkeys(names, "")) for names in ((), ("anthropic-version",))
    ]
    assert replies[0].status_code in (400, 405) and replies[0].json() == replies[1].json()


# --- answers


@pytest.mark.parametrize("line", ["cc_version=2.1.197.123; cch=1ea;", "cc_version=2.1.197.84c;\n"])
def test_the_accounting_of_claude_code_is_not_in_the_prompt(place: Place, line: str):
    """It differs between sessions and stands before everything else: no cache would ever hold."""
    header = {"type": "text", "text": f"x-anthropic-billing-header: {line}"}
    brief = {"type": "text", "text": "Be brief."}
    for system in ([header, brief], header["text"].strip() + "\nBe brief."):
        found = place.request(system=system).prompt.messages
        assert [turn["content"] for turn in found] == ["Be brief.", "What does zip do?"]
    assert [turn["role"] for turn in place.request(system=[header]).prompt.messages] == ["user"]
    kept = "Say x-anthropic-billing-header: no"
    assert place.request(system=kept).prompt.messages[0]["content"] == kept


def test_a_whole_answer(place: Place, stub: Stub, anthropic: Any):
    stub.events = TURN
    status, body = place.post()
    message = anthropic.types.Message.model_validate(body, strict=True)
    assert status == 200 and message.stop_reason == "tool_use" and message.model == "demo"
    assert message.model_dump(exclude_none=True)["content"] == [
        {"type": "thinking", "thinking": "Weather?", "signature": MessageWriter.signature},
        {"type": "text", "text": "I ask: zwölf\n\n🌦 data: x"},
        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Köln", "days": [1, 2]}},
        {"type": "tool_use", "id": "call_2", "name": "now", "input": {}},
    ]
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (3, 2, 4)
    assert body["timings"]["draft_n_accepted"] == 2 and body["timings"]["speculation"] == "on"


def test_a_stream(place: Place, stub: Stub, anthropic: Any):
    event_type: TypeAdapter[Any] = TypeAdapter(anthropic.types.RawMessageStreamEvent)
    stub.events = TURN
    found = [(name, content) for name, content in place.frames() if name != "ping"]
    for name, content in found:
        assert event_type.validate_python(content, strict=True).type == name
    with pytest.raises(ValidationError):
        event_type.validate_python(without(found[1][1], "index"), strict=True)
    names = [name for name, _ in found]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-2:] == ["message_delta", "message_stop"]
    assert found[0][1]["message"]["content"] == [] and found[0][1]["message"]["usage"]["input_tokens"] == 3
    assert found[-2][1]["timings"]["predicted_n"] == 4
    deltas = [content["delta"]["type"] for name, content in found if name == "content_block_delta"]
    thinking, text = ["thinking_delta"] * 2 + ["signature_delta"], ["text_delta"] * 2
    assert deltas == [*thinking, *text, "input_json_delta"]
    borders = [c["index"] for name, c in found if name in ("content_block_start", "content_block_stop")]
    assert borders == [0, 0, 1, 1, 2, 2, 3, 3]
    signed = [c["delta"]["signature"] for _, c in found if "signature" in c.get("delta", {})]
    assert (
        signed == [MessageWriter.signature] and MessageWriter.signature
    )  # pi takes a block without one for a broken one


CUT = said("one", " two", reason="length")
FULL = replace(CLOSED, usage=replace(CLOSED.usage, completion_tokens=64))


@pytest.mark.parametrize(
    ("script", "reason", "stop"),
    [
        (said(), "end_turn", None),
        (said("a", stop="END"), "stop_sequence", "END"),
        (TURN, "tool_use", None),
        (CUT, "model_context_window_exceeded", None),  # 4 of 64 tokens
        ((*CUT[:-1], FULL), "max_tokens", None),
    ],
)
def test_the_client_accumulates_the_whole_answer(
    client: Any, stub: Stub, script: Any, reason: str, stop: str | None
):
    stub.events = script
    with client.messages.stream(**BODY) as stream:
        streamed = stream.get_final_message().model_dump(exclude_none=True)
    whole = client.messages.create(**BODY)
    for block in streamed["content"]:
        block.pop("parsed_output", None)
    assert without(streamed, "id") == without(whole.model_dump(exclude_none=True), "id", "timings")
    assert (whole.stop_reason, whole.stop_sequence) == (reason, stop)


def test_thinking_can_be_omitted(place: Place, stub: Stub):
    stub.events = TURN
    thinking = {"type": "adaptive", "display": "omitted"}
    found = place.frames(thinking=thinking)
    assert "Wea" not in str(found) and "zwölf" in str(found)
    _, body = place.post(thinking=thinking)
    assert body["content"][0] == {"type": "thinking", "thinking": "", "signature": MessageWriter.signature}
    assert stub.requests[-1].prompt.thinking


# --- requests


def test_a_conversation_with_everything(place: Place):
    cached = {"cache_control": {"type": "ephemeral"}}
    answer = [
        {"type": "thinking", "thinking": "I ask.", "signature": ""},
        {"type": "redacted_thinking", "data": "b3BhcXVl"},
        {"type": "text", "text": "One "},
        {"type": "text", "text": "moment."},
        {"type": "tool_use", "id": "a", "name": "weather", "input": json.loads(ARGUMENTS)},
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
    assert request.model == "demo" and list(request.prompt.messages) == CONVERSATION


@pytest.mark.parametrize("nothing", ["", [], [{"type": "text", "text": ""}]])
def test_a_turn_may_be_empty(place: Place, nothing: Any):
    messages = [{"role": role, "content": nothing} for role in ("user", "assistant", "user")]
    found = place.request(messages=messages).prompt.messages
    assert [turn["content"] for turn in found] == ["", "", ""]


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


@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_a_conversation_held_by_the_server_is_refused_so_that_the_sdk_sends_it(
    place: Place, path: str, thread: dict[str, str]
):
    """`tool_runner` of Anthropic's SDK sends a thread, and by these details goes on without."""
    response = place.endpoint.client.post(path, json=BODY | {"thread": thread})
    error = response.json()["error"]
    assert response.status_code == 400 and error["message"].startswith("thread: ")
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert place.stub.requests == []


# --- counting


def test_tokens_are_counted_without_an_answer(client: Any, stub: Stub, anthropic: Any):
    prompt = {"model": "demo", "messages": BODY["messages"]}
    assert client.messages.count_tokens(**prompt, system="Be brief.").input_tokens == 7
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(**prompt | {"model": "gpt"})
    with pytest.raises(anthropic.BadRequestError, match="is not fetched"):
        client.messages.count_tokens(**prompt | {"messages": [{"role": "user", "content": [IMAGE]}]})
    assert stub.requests == []
