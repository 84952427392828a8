"""Chat completions: fields of the body, refusals, answers."""

from __future__ import annotations

from typing import Any

import pytest
from endpoint import DEMO, HELLO, Stub, fresh, stubbed

from mlx_spec.apps.server.request import Chat, GenerationRequest, OutputFormat, Tool, ToolUse
from mlx_spec.apps.server.settings import Limits, Settings
from mlx_spec.sampling import Sampling

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}},
}
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}


def parsed(**body: Any) -> GenerationRequest:
    """The request that a body becomes."""
    stub, endpoint = fresh()
    response = endpoint.chat(**body)
    assert response.status_code == 200, response.text
    return stub.requests[0]


def chat_of(**body: Any) -> Chat:
    prompt = parsed(**body).prompt
    assert isinstance(prompt, Chat)
    return prompt


# --- fields


def test_defaults_are_those_of_openai():
    found = parsed()
    assert found == GenerationRequest(
        "demo", Chat(({"role": "user", "content": "What does zip do?"},)), Sampling(temperature=1.0)
    )


NULLABLE = """model stream stream_options n max_tokens max_completion_tokens stop temperature top_p top_k
min_p seed presence_penalty frequency_penalty repetition_penalty logit_bias response_format prediction
user metadata store tools tool_choice parallel_tool_calls logprobs top_logprobs reasoning_effort
chat_template_kwargs modalities service_tier verbosity audio functions function_call
web_search_options safety_identifier prompt_cache_key""".split()


def test_null_means_the_default():
    assert parsed(**dict.fromkeys(NULLABLE)) == parsed()


def test_sampling():
    found = parsed(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=-(2**70),
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        logit_bias={"5": -100, "7": 2.5},
    )
    assert found.sampling == Sampling(0.5, 40, 0.9, 0.1, 1.1, 1, -1, {5: -100, 7: 2.5}, -(2**70))
    assert parsed(temperature=0).sampling == Sampling()


def test_limits_and_logprobs():
    assert parsed(max_tokens=5).max_tokens == 5
    assert parsed(max_tokens=5, max_completion_tokens=3).max_tokens == 3
    assert parsed(stop="a").stop == ("a",) and parsed(stop=["a", "b"]).stop == ("a", "b")
    assert parsed(stop=[]).stop == () and parsed(n=3).n == 3
    assert [parsed(logprobs=True, top_logprobs=top).top_logprobs for top in (None, 20)] == [0, 20]
    assert parsed(logprobs=False, top_logprobs=0).top_logprobs is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, OutputFormat("json_object")),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"b": 1, "a": 2}, "strict": True}},
            OutputFormat("json_schema", '{"b": 1, "a": 2}', "response_format.json_schema.schema"),
        ),
        ({"type": "regex", "pattern": "a+"}, OutputFormat("regex", "a+", "response_format.pattern")),
        (
            {"type": "lark", "grammar": "start: A"},
            OutputFormat("lark", "start: A", "response_format.grammar"),
        ),
    ],
)
def test_formats(given, expected):
    assert parsed(response_format=given).format == expected


def test_prediction():
    assert parsed(prediction={"type": "content", "content": "ab"}).prediction == "ab"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parsed(prediction={"type": "content", "content": parts}).prediction == "ab"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "minimal"}, False),
        ({"reasoning_effort": "low"}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, False),
    ],
)
def test_thinking(body, expected):
    assert chat_of(**body).thinking is expected
    assert chat_of(chat_template_kwargs={"enable_thinking": True, "x": 1}).variables == {"x": 1}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", None)),
        ("none", ("none", None)),
        ("required", ("required", None)),
        ({"type": "function", "function": {"name": "weather"}}, ("required", "weather")),
    ],
)
def test_tools(choice, expected):
    found = chat_of(tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False).tools
    parameters = {"type": "object", "properties": {"city": {}}}
    assert found == ToolUse((Tool("weather", None, parameters),), *expected, parallel=False)
    assert chat_of(tools=[]).tools is None


def test_a_conversation():
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts, "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
        {"role": "user", "content": ""},
    ]
    function = {"name": "weather", "arguments": {"city": "Oslo"}}
    calls = [{"id": "c", "type": "function", "function": function}]
    assert chat_of(messages=messages).messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\n\nb"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "name": "weather", "content": "sunny"},
        {"role": "user", "content": ""},
    )


# --- refusals


CALL_IDS: list[dict[str, str]] = [{}, {"tool_call_id": "c"}]  # missing, and of no call


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [*HELLO, fields]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        *(({"temperature": value}, "temperature") for value in ("0.5", 2.1, 1e-9, True)),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 1.5}, "seed"),
        *(({"logit_bias": {token: 1}}, "logit_bias") for token in ("x", "-1")),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1, "max_tokens": 5}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        *(({"stop": value}, "stop") for value in ("", list("abcde"))),
        ({"stop": [1]}, "stop.0"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        *(({"messages": value}, "messages") for value in ([], None)),
        (message(role="wizard", content="x"), "messages.1.role"),
        *((message(role=role), "messages.1.content") for role in ("user", "assistant")),
        *((message(role="tool", content="x", **call), "messages.1.tool_call_id") for call in CALL_IDS),
        (message(role="user", content=[{"type": "text"}]), "messages.1.content.0.text"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "regex"}}, "response_format.pattern"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs.enable_thinking"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_bad_values_are_refused_by_name(body, param):
    stub, endpoint = fresh()
    error = endpoint.refused(**body)
    assert error["param"] == param and error["type"] == "invalid_request_error" and stub.requests == []
    assert error["code"] in ("invalid_value", "missing_required_parameter")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 17}, "n"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x", "format": "wav"}}, "audio"),
        ({"functions": [{"name": "x"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"verbosity": "low"}, "verbosity"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"prediction": {"type": "guess", "content": "x"}}, "prediction.type"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type"),
        ({"tools": [WEATHER], "tool_choice": "allowed_tools"}, "tool_choice"),
        (message(role="user", content=[IMAGE]), "messages.1.content.0"),
        (message(role="user", content=[{"type": "input_audio"}]), "messages.1.content.0"),
        (message(role="function", name="x", content="y"), "messages.1"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
def test_unsupported_values_are_refused_by_name(body, param):
    stub, endpoint = fresh()
    error = endpoint.refused(**body)
    assert (error["param"], error["code"]) == (param, "unsupported_value") and stub.requests == []


def test_values_without_effect_are_accepted():
    body = {"modalities": ["text"], "service_tier": "auto", "verbosity": "medium", "store": True, "user": "u"}
    assert parsed(**body, metadata={"a": "b"}) == parsed()
    assert fresh()[1].chat(service_tier="auto").json()["service_tier"] == "default"


def test_sizes_are_limited():
    endpoint = stubbed(Stub(), Settings(DEMO, limits=Limits(schema_bytes=40, tools=1)))
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"x": "y" * 40}}}
    assert endpoint.refused(response_format=schema)["param"] == "response_format.json_schema.schema"
    assert endpoint.refused(tools=[WEATHER])["param"] == "tools"
    small = [{"type": "function", "function": {"name": name}} for name in "ab"]
    assert endpoint.refused(tools=small)["param"] == "tools"
    assert endpoint.chat(tools=small[:1]).status_code == 200


# --- answers


def test_a_whole_answer():
    found = stubbed(Stub()).chat(logprobs=True, top_logprobs=2).json()
    assert found["object"] == "chat.completion" and found["id"].startswith("chatcmpl-")
    (choice,) = found["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Hello you",
        "refusal": None,
        "reasoning_content": "Hm.",
    }
    assert choice["finish_reason"] == "stop"
    first = choice["logprobs"]["content"][0]
    assert (first["token"], first["logprob"], first["bytes"]) == ("Hel", -0.5, [72, 101, 108])
    assert first["top_logprobs"][1] == {"token": "\ufffd", "logprob": -9999.0, "bytes": [255]}
    usage = found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 4, 9)
    assert found["timings"]["draft_n"] == 6
