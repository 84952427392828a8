"""OpenAI's Responses API without state: bodies, streams, refusals; answers checked by its SDK's own types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

openai = pytest.importorskip("openai")
from openai.types.responses import Response, ResponseStreamEvent  # noqa: E402
from pydantic import TypeAdapter, ValidationError  # noqa: E402
from scripted import (  # noqa: E402
    ARGUMENTS,
    CLOSED,
    OPENED,
    TURN,
    Scripted,
    frames,
    listening,
    logprob,
    post,
    said,
)

from mlx_spec.apps.server.ask import (  # noqa: E402
    CallArguments,
    CallDropped,
    CallOpened,
    Ended,
    Failed,
    Format,
    Piece,
    Tool,
    ToolUse,
)
from mlx_spec.apps.server.failures import Failure, broken, busy, unavailable  # noqa: E402
from mlx_spec.apps.server.responses import router  # noqa: E402
from mlx_spec.apps.server.responses.sealed import opened, sealed  # noqa: E402
from mlx_spec.apps.server.settings import Limits, Settings  # noqa: E402
from mlx_spec.sampling import Sampling  # noqa: E402

SETTINGS = Settings((), keepalive_seconds=0.05, limits=Limits(body_bytes=100_000, schema_bytes=2000))
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
BODY: dict[str, Any] = {"model": "demo", "input": "Hello"}
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": None}
CUT = (*TURN[:13], Ended(0, "length"), CLOSED)  # in the middle of what comes after a call
DROPPED = (  # a call that is one, then one that is cut off
    *TURN[:13],
    CallArguments(0, 1, '{"at": "xyzzy'),
    CallDropped(0, 1),
    Piece(0, "answer", "<now>"),
    Ended(0, "length"),
    CLOSED,
)
NEW = (
    "id",
    "item_id",
    "created_at",
    "completed_at",
    "sequence_number",
    "timings",
    "parsed",
    "parsed_arguments",
)


class Place:
    """A running server and its worker."""

    def __init__(self, worker: Scripted, url: str) -> None:
        self.worker, self.url = worker, f"{url}/v1/responses"
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def ask(self, **changes: Any) -> Any:
        """What the worker is asked for a body."""
        status, reply = post(self.url, BODY | changes)
        assert status == 200, reply
        Response.model_validate(reply, strict=True)
        return self.worker.asked


@pytest.fixture(scope="module")
def running() -> Iterator[Place]:
    worker = Scripted()
    with listening(router(worker, SETTINGS)) as url:
        place = Place(worker, url)
        yield place
        place.client.close()


@pytest.fixture
def place(running: Place) -> Place:
    running.worker.script, running.worker.refuses = said("Hi"), None
    running.worker.jobs.clear()
    return running


def settled(value: Any) -> Any:
    """Without what is new in every response, or the SDK adds."""
    if isinstance(value, dict):
        return {k: settled(v) for k, v in value.items() if k not in NEW}
    return [settled(v) for v in value] if isinstance(value, list) else value


# --- answers


def test_whole_answer_is_theirs_by_type(place: Place):
    place.worker.script = TURN
    status, body = post(place.url, BODY)
    response = Response.model_validate(body, strict=True)
    assert status == 200 and response.status == "completed" and response.model == "demo"
    assert response.output_text == "I ask: zwölf\n\n🌦 data: x"
    thoughts, _, call, empty = response.output
    assert thoughts.content[0].text == "Weather?" and thoughts.encrypted_content is None
    assert (call.call_id, call.name, call.arguments) == ("call_1", "weather", ARGUMENTS)
    assert (empty.call_id, empty.arguments) == ("call_2", "")
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (30, 17, 47)
    assert usage.input_tokens_details.cached_tokens == 12
    assert usage.output_tokens_details.reasoning_tokens == 4
    assert body["timings"]["accepted_at"] == [5, 4, 2] and body["store"] is False


def test_every_event_is_theirs_by_type(place: Place):
    place.worker.script = TURN
    found = frames(place.url, BODY)
    for number, (name, content) in enumerate(found):
        event = EVENT.validate_python(content, strict=True)
        assert (event.type, event.sequence_number) == (name, number)
    with pytest.raises(ValidationError):
        EVENT.validate_python({k: v for k, v in found[2][1].items() if k != "output_index"}, strict=True)
    text = ["output_item.added", "content_part.added", "{0}.delta", "{0}.done", "content_part.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
    names = [name.removeprefix("response.") for name, _ in found]
    once = [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
    assert once == [
        "created",
        "in_progress",
        *(name.format("reasoning_text") for name in text),
        "output_item.done",
        *(name.format("output_text") for name in text),
        "output_item.done",
        *call,
        "output_item.done",
        call[0],
        call[2],
        "output_item.done",
        "completed",
    ]


def test_the_end_repeats_what_was_streamed(place: Place):
    place.worker.script = TURN
    found = frames(place.url, BODY)
    last = found[-1][1]["response"]
    items = [content["item"] for name, content in found if name == "response.output_item.done"]
    assert last["output"] == items and found[0][1]["response"]["output"] == []
    for place_, item in enumerate(items):
        own = [c for _, c in found if c.get("output_index") == place_]
        assert {c["item_id"] for c in own if "item_id" in c} == {item["id"]}
        deltas = "".join(c["delta"] for c in own if c["type"].endswith(".delta"))
        assert deltas == (item.get("arguments") if "arguments" in item else item["content"][0]["text"])


@pytest.mark.parametrize(
    "script",
    [TURN, said("one", " two"), said(), CUT, DROPPED],
    ids=["turn", "text", "none", "cut", "dropped"],
)
def test_what_their_client_accumulates_is_the_whole_answer(place: Place, script: Any):
    place.worker.script = script
    snapshot = None
    with place.client.responses.stream(**BODY) as stream:
        for event in stream:
            if event.type in ("response.completed", "response.incomplete"):
                snapshot = event.response
    assert snapshot is not None
    whole = place.client.responses.create(**BODY)
    assert settled(snapshot.model_dump(exclude_none=True)) == settled(whole.model_dump(exclude_none=True))


@pytest.mark.parametrize("script", [CUT, said("a", "b", reason="length")], ids=["call", "text"])
def test_an_answer_that_is_cut_is_incomplete(place: Place, script: Any):
    place.worker.script = script
    response = place.client.responses.create(**BODY, max_output_tokens=17)
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert response.output[-1].status == "incomplete" and response.completed_at is None
    assert all(item.status == "completed" for item in response.output[:-1])
    assert frames(place.url, BODY)[-1][0] == "response.incomplete"


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
    assert names.count(None) >= 2 and names.count("response.function_call_arguments.delta") == 1


LOGPROBS = (
    OPENED,
    Piece(0, "thinking", "so", logprobs=(logprob(b"so"),)),
    Piece(0, "answer", "", logprobs=(logprob(b"\xc3"),)),
    Piece(0, "answer", "ü", logprobs=(logprob(b"\xbc", -1.5),)),
    Piece(0, "answer", "", logprobs=(logprob(b""),)),
    Ended(0, "stop"),
    CLOSED,
)


@pytest.mark.parametrize("asked", [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}])
def test_logprobs(place: Place, asked: dict[str, Any]):
    place.worker.script = LOGPROBS
    response = place.client.responses.create(**BODY, **asked)
    found = response.output[1].content[0].logprobs
    assert [bytes(token.bytes) for token in found] == [b"\xc3", b"\xbc", b""]
    assert [token.logprob for token in found] == [-0.25, -1.5, -0.25]
    assert found[0].top_logprobs[1].logprob == -9999.0  # JSON has no infinity
    assert place.worker.asked.top_logprobs == asked.get("top_logprobs", 0)
    events = frames(place.url, BODY | asked)
    deltas = [token for name, c in events if name == "response.output_text.delta" for token in c["logprobs"]]
    assert deltas == [token.model_dump() for token in found]


def test_thoughts_come_back_sealed(place: Place):
    place.worker.script = TURN
    response = place.client.responses.create(**BODY, include=["reasoning.encrypted_content"])
    field = response.output[0].encrypted_content
    assert opened(field) == "Weather?"
    back = {"type": "reasoning", "summary": [], "id": "rs_1", "encrypted_content": field}
    asked = place.ask(input=[{"role": "user", "content": "x"}, back])
    assert asked.prompt.messages[-1]["reasoning_content"] == "Weather?"
    assert [opened(f) for f in (None, "", "gAAAAABo", "mlx-spec.%", sealed("") + "A")] == [""] * 5


def test_silence_is_filled_with_comments(place: Place):
    place.worker.script = (0.12, *said("late")[:2], 0.12, *said("late")[2:])
    names = [name for name, _ in frames(place.url, BODY)]
    assert names[:3] == ["response.created", "response.in_progress", None] and names.count(None) >= 3
    with place.client.responses.stream(**BODY) as stream:
        assert stream.get_final_response().output_text == "late"


# --- requests


def test_a_conversation_with_everything(place: Place):
    asked = place.ask(
        model="alias",
        instructions="Be brief.",
        input=[
            {"type": "message", "role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "input_text", "text": "Rain"}]},
            {"type": "message", "role": "user", "content": "in Köln?", "id": "msg_0"},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "I ask."}],
            },
            {
                "type": "message",
                "role": "assistant",
                "id": "msg_1",
                "status": "completed",
                "content": [
                    {"type": "output_text", "text": "One moment.", "annotations": [], "logprobs": []}
                ],
            },
            {
                "type": "function_call",
                "call_id": "a",
                "name": "weather",
                "arguments": ARGUMENTS,
                "id": "fc_1",
            },
            {"type": "function_call", "call_id": "b", "name": "now", "arguments": ""},
            {"type": "function_call_output", "call_id": "a", "output": "dry"},
            {
                "type": "function_call_output",
                "call_id": "b",
                "output": [{"type": "input_text", "text": "noon"}],
            },
            {"role": "user", "content": "So?"},
        ],
    )
    calls = [("a", "weather", json.loads(ARGUMENTS)), ("b", "now", {})]
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
        {"role": "tool", "tool_call_id": "b", "name": "now", "content": "noon"},
        {"role": "user", "content": "So?"},
    ]


def test_our_own_answer_can_be_sent_back(place: Place):
    place.worker.script = TURN
    output = place.client.responses.create(**BODY).model_dump(exclude_none=True)["output"]
    results = [{"type": "function_call_output", "call_id": f"call_{i}", "output": "x"} for i in (1, 2)]
    asked = place.ask(input=[{"role": "user", "content": "Hello"}, *output, *results])
    assistant = asked.prompt.messages[1]
    assert assistant["reasoning_content"] == "Weather?" and assistant["content"].endswith("data: x")
    assert [call["function"]["name"] for call in assistant["tool_calls"]] == ["weather", "now"]


def test_every_optional_field_may_be_null_and_unknown_ones_are_ignored(place: Place):
    names = "model instructions max_output_tokens temperature top_p top_logprobs include tools tool_choice"
    names += " parallel_tool_calls text reasoning stream stream_options truncation background conversation"
    names += " context_management moderation previous_response_id prompt store max_tool_calls metadata user"
    names += " prompt_cache_key safety_identifier service_tier"
    nulls = place.ask(**dict.fromkeys(names.split()), unheard_of=[1])
    assert nulls == place.ask() == place.ask(store=False, background=False)
    assert nulls.sampling == Sampling(temperature=1.0) and nulls.max_tokens is None
    chat = nulls.prompt
    assert (nulls.top_logprobs, chat.tools, chat.thinking, nulls.format) == (None, None, False, None)
    assert place.ask(text={"format": None}, reasoning={"effort": None, "summary": None}) == nulls


def test_sampling_and_reasoning(place: Place):
    asked = place.ask(
        temperature=0, top_p=0.9, max_output_tokens=9, reasoning={"effort": "low", "summary": "auto"}
    )
    assert asked.sampling == Sampling(top_p=0.9) and asked.max_tokens == 9
    assert asked.prompt.thinking and asked.prompt.variables == {"reasoning_effort": "low"}
    assert not place.ask(reasoning={"effort": "none"}).prompt.thinking


def test_formats(place: Place):
    assert place.ask(text={"format": {"type": "text"}}).format is None
    assert place.ask(text={"format": {"type": "json_object"}}).format == Format(
        "json_object", param="text.format"
    )
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    asked = place.ask(text={"format": schema, "verbosity": "medium"})
    assert asked.format == Format("json_schema", '{"type": "object"}', "text.format")


@pytest.mark.parametrize(
    ("choice", "use"),
    [
        (None, {}),
        ("auto", {}),
        ("required", {"choice": "required"}),
        ("none", {"choice": "none"}),
        ({"type": "function", "name": "weather"}, {"choice": "required", "named": "weather"}),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
            {"choice": "required", "allowed": ["weather"]},
        ),
    ],
)
def test_tools(place: Place, choice: Any, use: dict[str, Any]):
    rain = WEATHER | {"name": "rain", "strict": True, "description": "Rain?"}
    asked = place.ask(tools=[WEATHER, rain], tool_choice=choice)
    tools = (
        Tool("weather", None, {"type": "object"}),
        Tool("rain", "Rain?", {"type": "object"}, strict=True),
    )
    allowed = use.pop("allowed", ["weather", "rain"])
    assert asked.prompt.tools == ToolUse(tuple(tool for tool in tools if tool.name in allowed), **use)
    assert not place.ask(tools=[WEATHER], parallel_tool_calls=False).prompt.tools.parallel


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


def call(arguments: str) -> dict[str, Any]:
    return item(type="function_call", call_id="a", name="f", arguments=arguments)


@pytest.mark.parametrize(
    ("changes", "param", "word"),
    [
        ({"store": True}, "store", "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is kept"),
        ({"conversation": {"id": "c"}}, "conversation", "conversation"),
        ({"background": True}, "background", "background"),
        ({"prompt": {"id": "p"}}, "prompt", "prompt"),
        ({"moderation": {"model": "m"}}, "moderation", "moderation"),
        ({"truncation": "auto"}, "truncation", "'auto'"),
        ({"include": ["file_search_call.results"]}, "include", "file_search_call.results"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "'low'"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format", "'grammar'"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "required"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name", "required"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "stream"),
        ({"input": None}, "input", "input"),
        ({"input": []}, "input", "at least 1"),
        ({"input": 3}, "input", "array"),
        (item(role="user"), "input.0.message.content", "required"),
        (item(role="robot", content="x"), "input.0.message.role", "role"),
        (item(role="user", content=[{"type": "input_image"}]), "input.0.content.0", "'input_image'"),
        (item(role="user", content=[{"type": "input_text"}]), "input.0.content.0.text", "required"),
        (item(type="item_reference", id="x"), "input.0", "'item_reference'"),
        (item(type="web_search_call"), "input.0", "'web_search_call'"),
        (item(type="function_call_output", call_id="x", output="y"), "input.0.call_id", "'x'"),
        (call("{"), "input.0.arguments", "no JSON"),
        (call("[]"), "input.0.arguments", "no JSON object"),
        (call("[" * 50_000), "input.0.arguments", "no JSON"),
        ({"tools": [{"type": "web_search"}]}, "tools.0", "'web_search'"),
        ({"tools": [{"type": "function"}]}, "tools.0.name", "required"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "'weather'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "'x'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice", "'mcp'"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"temperature": 2.1}, "temperature", "2"),
        ({"top_p": 0}, "top_p", "greater"),
        ({"top_logprobs": 21}, "top_logprobs", "20"),
        ({"max_output_tokens": 0}, "max_output_tokens", "1"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "none"),
    ],
)
def test_refused_by_name(place: Place, changes: dict[str, Any], param: str | None, word: str):
    status, reply = post(place.url, BODY | changes)
    error = reply["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert set(error) == {"message", "type", "param", "code"} and word in error["message"]
    assert "\n" not in error["message"] and place.worker.jobs == []


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"null", b'{"input": "\\ud800"}', b"[" * 50_000, b"\xff\xfe"]
)
def test_bodies_that_are_no_request(place: Place, raw: bytes):
    status, reply = post(place.url, raw)
    assert (status, reply["error"]["type"]) == (400, "invalid_request_error")


def test_a_huge_body(place: Place):
    status, reply = post(place.url, BODY | {"instructions": "x" * 100_001})
    assert (status, reply["error"]["code"]) == (413, "body_too_large")


# --- failures


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (busy(32, 7), openai.RateLimitError),
        (unavailable("the server is loading its model", "loading"), openai.InternalServerError),
        (broken(), openai.InternalServerError),
        (Failure(400, "too long", param="x", code="y"), openai.BadRequestError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("admitted", [False, True])
def test_a_failure_before_the_first_event_has_a_status(
    place: Place, failure: Failure, error: type[Exception], stream: bool, admitted: bool
):
    place.worker.script = (Failed(failure),)
    place.worker.refuses = None if admitted else failure
    with pytest.raises(error) as caught:
        place.client.responses.create(**BODY, stream=stream)
    assert caught.value.status_code == failure.status and caught.value.body == failure.body["error"]
    seconds = None if failure.retry_after is None else str(failure.retry_after)
    assert caught.value.response.headers.get("retry-after") == seconds


def test_a_prompt_that_is_too_long_is_the_input(place: Place):
    place.worker.script = (Failed(Failure(400, "too long", code="context_length_exceeded")),)
    with pytest.raises(openai.BadRequestError) as caught:
        place.client.responses.create(**BODY)
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")


def test_a_failure_in_a_stream_is_an_event(place: Place):
    place.worker.script = (*TURN[:6], Failed(unavailable("shutting down", "shutting_down")))
    found = frames(place.url, BODY)
    for _, content in found:
        EVENT.validate_python(content, strict=True)
    names = [name for name, _ in found]
    assert "error" in names and names[-1] == "response.failed"
    failed = found[-1][1]["response"]
    assert failed["status"] == "failed"
    assert failed["error"] == {"code": "server_error", "message": "shutting down"}
    assert [item["status"] for item in failed["output"]] == ["completed", "incomplete"]


def test_an_unknown_model_reaches_no_worker(place: Place):
    with pytest.raises(openai.NotFoundError, match="gpt") as caught:
        place.client.responses.create(model="gpt", input="x")
    assert caught.value.code == "model_not_found" and place.worker.jobs == []


# --- hanging up


@pytest.mark.parametrize("early", [False, True])
def test_the_worker_hears_of_a_client_that_hangs_up(place: Place, early: bool):
    begun = () if early else (OPENED, Piece(0, "answer", "x"))
    place.worker.script = (*begun, 5.0, *said("late")[2:])
    with pytest.raises(openai.APITimeoutError):
        place.client.with_options(timeout=0.2).responses.create(**BODY)
    assert place.worker.jobs[-1].gone.wait(2)


@pytest.mark.parametrize("script", [(5.0,), (OPENED, Piece(0, "answer", "x"), 5.0)], ids=["silent", "begun"])
def test_the_worker_hears_of_a_client_that_leaves_a_stream(place: Place, script: Any):
    place.worker.script = script
    with place.client.responses.create(**BODY, stream=True) as stream:
        next(iter(stream))
    assert place.worker.jobs[-1].gone.wait(2)
