"""Chat completions: fields of the body, refusals, answers."""

from __future__ import annotations

from typing import Any

import pytest
from support.endpoint import (
    ARGUMENTS,
    CHAT,
    CLOSED,
    CONVERSATION,
    DEMO,
    HELLO,
    READ,
    TOKENS,
    Stub,
    fresh,
    parsed,
    refused,
    stubbed,
)

from mlx_spec.apps.server.engine.answers import ChoiceEnded, TextDelta
from mlx_spec.apps.server.requests.request import Chat, GenerationRequest
from mlx_spec.apps.server.settings import Limits, Settings
from mlx_spec.sampling import Sampling

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}},
}
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}


def chat_of(**body: Any) -> Chat:
    prompt = parsed(CHAT, **body).prompt
    assert isinstance(prompt, Chat)
    return prompt


# --- fields


def test_defaults_are_those_of_openai():
    found = parsed(CHAT)
    chat = Chat(({"role": "user", "content": "What does zip do?"},))
    assert found == GenerationRequest("demo", chat, Sampling(temperature=1.0), key="")


def test_limits_and_logprobs():
    assert parsed(CHAT, max_tokens=5).max_tokens == 5
    assert parsed(CHAT, max_tokens=5, max_completion_tokens=3).max_tokens == 3
    assert parsed(CHAT, stop="a").stop == ("a",) and parsed(CHAT, stop=["a", "b"]).stop == ("a", "b")
    assert parsed(CHAT, stop=[]).stop == () and parsed(CHAT, n=3).n == 3
    assert [parsed(CHAT, logprobs=True, top_logprobs=top).top_logprobs for top in (None, 20)] == [0, 20]
    assert parsed(CHAT, logprobs=False, top_logprobs=0).top_logprobs is None


def test_prediction():
    assert parsed(CHAT, prediction={"type": "content", "content": "ab"}).prediction == "ab"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parsed(CHAT, prediction={"type": "content", "content": parts}).prediction == "ab"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),  # as the template says
        ({"reasoning": {"summary": "auto"}}, None),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "minimal"}, False),
        ({"reasoning_effort": "low"}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"reasoning_effort": "high", "enable_thinking": False}, False),
        ({"thinking": {"type": "enabled"}}, True),
    ],
)
def test_thinking(body, expected):
    assert chat_of(**body).thinking is expected
    assert chat_of(chat_template_kwargs={"enable_thinking": True, "x": 1}).variables == {"x": 1}


def test_a_conversation():
    calls = [{"id": "a", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}]
    calls += [{"id": "b", "type": "function", "function": {"name": "now", "arguments": ""}}]
    messages = [
        {"role": "developer", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": [{"type": "text", "text": text} for text in ("Rain", "in Köln?")]},
        {"role": "assistant", "content": "One moment.", "tool_calls": calls, "reasoning_content": "I ask."},
        {"role": "tool", "tool_call_id": "a", "content": "dry"},
        {"role": "tool", "tool_call_id": "b", "content": "Error: no clock"},
        {"role": "user", "content": "So?", "name": None},
    ]
    assert list(chat_of(messages=messages).messages) == CONVERSATION


def test_a_cut_answer_goes_on():
    cut = [*HELLO, {"role": "assistant", "content": "It joi"}]
    chat = chat_of(messages=cut, continue_final_message=True)
    assert (chat.messages, chat.begun) == (chat_of(messages=HELLO).messages, "It joi")
    assert chat_of(messages=cut).begun == ""
    assert refused(CHAT, continue_final_message=True)["param"] == "messages.0"
    form = {"type": "json_object"}
    found = refused(CHAT, messages=cut, continue_final_message=True, response_format=form)
    assert found["param"] == "continue_final_message"


def test_an_answer_may_be_thinking_alone():
    for name in ("reasoning", "reasoning_content"):
        answer = {"role": "assistant", "content": None, name: "Hm."}
        found = chat_of(messages=[*HELLO, answer, *HELLO]).messages[1]
        assert found == {"role": "assistant", "content": None, "reasoning_content": "Hm."}


def test_a_call_that_was_cut_off_is_text_of_the_conversation():
    given = [("c", "{"), ("w", "{}"), ("h", r'{"a": "\ud83d"}')]  # the last one ends in half a character
    cut, whole, half = ({"id": id, "function": {"name": "f", "arguments": text}} for id, text in given)
    (call,) = chat_of(messages=[*HELLO, {"role": "assistant", "tool_calls": [half]}]).messages[1][
        "tool_calls"
    ]
    assert call["function"]["arguments"] == {"a": "\ufffd"}
    results = [{"role": "tool", "tool_call_id": id, "content": "?"} for id in "cw"]
    for calls in ([cut], [cut, whole]):
        answer = {"role": "assistant", "content": "So.", "tool_calls": calls}
        messages = [*HELLO, answer, *results[: len(calls)], {"role": "user", "content": "Again?"}]
        found = chat_of(messages=messages).messages[1:]
        assert found[0]["content"] == "So.\n\nf {" and len(found[0].get("tool_calls", ())) == len(calls) - 1
        assert found[1]["role"] == "user" and found[1]["content"].startswith("?")
        assert [turn["content"] for turn in found[2:]] == ["?", "Again?"][: 2 * (len(calls) - 1)]


# --- refusals


CALL_IDS: list[dict[str, str]] = [{}, {"tool_call_id": "c"}]  # missing, and of no call


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [*HELLO, fields]}


BAD: list[tuple[dict[str, Any], str]] = [
    (message(role="user", content=[IMAGE]), "messages.1.content.0"),  # not fetched
    *(({"temperature": value}, "temperature") for value in ("0.5", 2.1, -1e-9, True)),
    ({"min_p": 2}, "min_p"),
    ({"seed": 1.5}, "seed"),
    *(({"logit_bias": {token: 1}}, "logit_bias") for token in ("x", "-1")),
    ({"max_tokens": 0}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"stop": [str(i) for i in range(65)]}, "stop"),
    ({"top_logprobs": 1}, "top_logprobs"),
    *(({"messages": value}, "messages") for value in ([], None)),
    (message(role="wizard", content="x"), "messages.1.role"),
    *((message(role=role), "messages.1.content") for role in ("user", "assistant")),
    *((message(role="tool", content="x", **call), "messages.1.tool_call_id") for call in CALL_IDS),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs.enable_thinking"),
    ({"stream": "yes"}, "stream"),
]
UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"n": 17}, "n"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type"),
    ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(
    ("body", "param", "codes"),
    [(*one, {"invalid_value", "missing_required_parameter"}) for one in BAD]
    + [(*one, {"unsupported_value"}) for one in UNSUPPORTED],
)
def test_bad_and_unsupported_values_are_refused_by_name(body, param, codes):
    error = refused(CHAT, **body)
    assert error["param"] == param and error["code"] in codes


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
    found = fresh()[1].chat(logprobs=True, top_logprobs=2).json()
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


def test_several_choices():
    thought = TextDelta(1, "thinking", "Hm.", TOKENS[1:])
    half = TextDelta(0, "answer", "", TOKENS[1:])  # of a character
    events = (READ, thought, TextDelta(1, "answer", "Hel", TOKENS[:1]), half, TextDelta(0, "answer", "lo"))
    ends = (ChoiceEnded(1, "stop"), ChoiceEnded(0, "length"), CLOSED)
    endpoint = fresh((*events, *ends))[1]
    found = endpoint.chat(n=2, logprobs=True).json()["choices"]
    assert [(choice["index"], choice["finish_reason"]) for choice in found] == [(0, "length"), (1, "stop")]
    tokens = [[token["token"] for token in choice["logprobs"]["content"]] for choice in found]
    assert tokens == [["lo"], ["Hel"]]
    chunks = endpoint.chunks(n=2, logprobs=True, stream_options={"include_usage": True})
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    scored = [choice for choice in choices if choice["logprobs"]]
    tokens = [(choice["index"], choice["logprobs"]["content"][0]["token"]) for choice in scored]
    assert tokens == [(1, "Hel"), (0, "lo")]
    reasons = [(choice["index"], choice["finish_reason"]) for choice in choices if choice["finish_reason"]]
    assert reasons == [(1, "stop"), (0, "length")]  # none is lost, though both end at once
    assert [i for i, chunk in enumerate(chunks) if chunk["usage"]] == [len(chunks) - 1]
    assert [i for i, chunk in enumerate(chunks) if "timings" in chunk] == [len(chunks) - 1]
