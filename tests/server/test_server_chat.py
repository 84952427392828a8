"""OpenAI's chat and text completions: conversations and answers."""

from __future__ import annotations

import math
from typing import Any

from support.endpoint import (
    ARGUMENTS,
    CHAT,
    CLOSED,
    CONVERSATION,
    DEMO,
    HELLO,
    READ,
    TEXT,
    TOKENS,
    Stub,
    fresh,
    parsed,
    stubbed,
)

from mlx_spec.apps.server.engine.answers import ChoiceEnded, PromptRead, TextDelta
from mlx_spec.apps.server.protocols.openai_completions import logprobs_json
from mlx_spec.apps.server.requests.request import Chat, GenerationRequest
from mlx_spec.apps.server.settings import Limits, Settings
from mlx_spec.sampling import Sampling
from mlx_spec.types import TokenLogprob

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}},
}


def chat_of(**body: Any) -> Chat:
    prompt = parsed(CHAT, **body).prompt
    assert isinstance(prompt, Chat)
    return prompt


# --- fields


def test_defaults_are_those_of_openai():
    found = parsed(CHAT)
    chat = Chat(({"role": "user", "content": "What does zip do?"},))
    assert found == GenerationRequest("demo", chat, Sampling(temperature=1.0), key="")


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


# --- sizes


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


# --- text completions


def test_logprobs_name_bytes_and_offsets():
    tokens = (
        TokenLogprob(0, b"a", math.nan),
        TokenLogprob(1, b"\xc3", -1.0, offset=1),
        TokenLogprob(2, b"\xa9", -math.inf, offset=1),
        TOKENS[0],
    )
    found = logprobs_json(tokens)
    assert found["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "Hel"]
    assert found["token_logprobs"] == [None, -1.0, -9999.0, -0.5]
    assert found["top_logprobs"] == [None, {}, {}, {"Hel": -0.5, "bytes:\\xff": -9999.0}]
    assert found["text_offset"] == [0, 1, 1, 0]


def test_chunks_of_completions():
    events = (
        PromptRead(1, 0),
        TextDelta(0, "answer", "Hel", TOKENS[:1]),
        ChoiceEnded(0, "stop"),
        PromptRead(1, 0),
        TextDelta(1, "answer", "lo", TOKENS[1:]),
        ChoiceEnded(1, "length"),
        CLOSED,
    )
    found = fresh(events)[1].chunks(TEXT, prompt=["a", "b"], logprobs=1)
    assert {chunk["object"] for chunk in found} == {"text_completion"}
    choices = [chunk["choices"][0] for chunk in found]
    said = [(choice["index"], choice["text"], choice["finish_reason"]) for choice in choices]
    assert said == [(0, "Hel", None), (0, "", "stop"), (1, "lo", None), (1, "", "length")]
    assert choices[0]["logprobs"]["tokens"] == ["Hel"]
    assert ["timings" in chunk for chunk in found] == [False, False, False, True]
