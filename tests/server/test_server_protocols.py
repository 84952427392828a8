"""Anthropic's Messages API and OpenAI's Responses API on the demo pair, through their own clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from endpoint import frames, listening, wait_until

from mlx_spec.apps.server.engine_thread import EngineThread
from mlx_spec.apps.server.settings import ServedModel, Settings

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")

QUESTION = "What does zip do?"
ASKED = [{"role": "user", "content": QUESTION}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "pure": {"type": "boolean"}},
    "required": ["name", "pure"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TEMPERATURE = {"extra_body": {"temperature": 0}}  # newer clients have no field for it
CLAUDE: dict[str, Any] = {"model": "demo", "max_tokens": 30, "messages": ASKED, **TEMPERATURE}
OPENAI: dict[str, Any] = {"model": "demo", "max_output_tokens": 30, "temperature": 0, "input": QUESTION}
NEW = "id item_id created_at completed_at timings parsed_output parsed_arguments call_id".split()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    settings = Settings((ServedModel("demo", "demo"),))
    engine = EngineThread(settings)
    with listening(engine, settings) as address:
        wait_until(lambda: engine.status().state == "ready")
        yield address


@pytest.fixture
def claude(url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def gpt(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def settled(value: Any) -> Any:
    """Without what is new in every answer, and what the cache held."""
    if isinstance(value, dict):
        return {k: settled(v) for k, v in value.items() if k not in NEW and k != "usage"}
    return [settled(v) for v in value] if isinstance(value, list) else value


CLAUDE_ASKS = {
    "text": {"max_tokens": 12},
    "schema": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "call": {"tools": [{"name": "weather", "input_schema": WEATHER}], "tool_choice": {"type": "any"}},
}


@pytest.mark.parametrize("kind", CLAUDE_ASKS)
def test_messages_streamed_and_whole_are_the_same(claude: Any, kind: str):
    asked = CLAUDE | CLAUDE_ASKS[kind]
    with claude.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    whole = claude.messages.create(**asked)
    assert whole.content and settled(streamed.model_dump()) == settled(whole.model_dump())
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    if kind == "text":
        assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 12)
    elif kind == "schema":
        assert set(json.loads(whole.content[0].text)) == {"name", "pure"}
    else:
        assert whole.stop_reason == "tool_use" and whole.content[-1].name == "weather"
        assert whole.content[-1].input["days"] in (1, 2)


def test_a_stop_sequence_is_named(claude: Any):
    text = claude.messages.create(**CLAUDE).content[0].text
    stop = text[5:9]
    found = claude.messages.create(**CLAUDE, stop_sequences=["never said", stop])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    assert found.content[0].text == text[: text.index(stop)]


def test_a_tool_is_called_and_its_result_read(claude: Any):
    asked = CLAUDE | CLAUDE_ASKS["call"]
    call = claude.messages.create(**asked).content
    use = call[-1]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "dry", "is_error": False}
    turns = [*ASKED, {"role": "assistant", "content": call}, {"role": "user", "content": [result]}]
    found = claude.messages.create(**(asked | {"messages": turns, "tool_choice": {"type": "none"}}))
    assert [block.type for block in found.content] == ["text"]


GPT_ASKS = {
    "text": {"max_output_tokens": 12, "include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "schema": {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
    "call": {
        "tools": [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}],
        "tool_choice": "required",
    },
}


@pytest.mark.parametrize("kind", GPT_ASKS)
def test_responses_streamed_and_whole_are_the_same(gpt: Any, url: str, kind: str):
    asked = OPENAI | GPT_ASKS[kind]
    events = [content for _, content in frames(f"{url}/v1/responses", asked)]
    whole = gpt.responses.create(**asked)
    body = whole.model_dump(by_alias=True, exclude_unset=True)
    assert whole.output and settled(events[-1]["response"]) == settled(body)
    deltas = "".join(event["delta"] for event in events if event["type"].endswith("output_text.delta"))
    assert deltas == whole.output_text
    if kind == "text":
        part = whole.output[0].content[0]
        assert (whole.status, whole.usage.output_tokens) == ("incomplete", 12)
        assert b"".join(bytes(token.bytes) for token in part.logprobs).decode() == part.text
        assert all(token.logprob == token.top_logprobs[0].logprob for token in part.logprobs)
    elif kind == "schema":
        assert set(json.loads(whole.output_text)) == {"name", "pure"}
    else:
        call = whole.output[-1]
        assert call.name == "weather" and json.loads(call.arguments)["days"] in (1, 2)


def test_a_call_that_is_cut_off_is_text_without_markup(claude: Any, gpt: Any):
    """An agent shows such a text as the answer."""
    said = claude.messages.create(**CLAUDE | CLAUDE_ASKS["call"] | {"max_tokens": 12})
    response = gpt.responses.create(**OPENAI | GPT_ASKS["call"] | {"max_output_tokens": 12})
    function = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
    chat: dict[str, Any] = {"model": "demo", "messages": ASKED, "tools": [function], "max_tokens": 12}
    chat |= {"temperature": 0, "tool_choice": "required"}
    choice = gpt.chat.completions.create(**chat).choices[0]
    pieces = [piece.choices[0].delta for piece in gpt.chat.completions.create(**chat, stream=True)]
    streamed = "".join(piece.content or "" for piece in pieces)
    assert [block.type for block in said.content] == ["text"] and said.stop_reason == "max_tokens"
    assert response.status == "incomplete" and choice.finish_reason == "length"
    assert choice.message.tool_calls is None and not any(piece.tool_calls for piece in pieces)
    (text,) = {said.content[0].text, response.output_text, choice.message.content, streamed}
    assert text.startswith('call:weather{city:"') and not set("<|>") & set(text)


def test_the_next_turn_reads_on(claude: Any):
    first = claude.messages.create(**CLAUDE)
    turns = [*ASKED, {"role": "assistant", "content": first.content}, {"role": "user", "content": "And map?"}]
    usage = claude.messages.create(**(CLAUDE | {"messages": turns})).usage
    read = first.usage.input_tokens + first.usage.cache_read_input_tokens + first.usage.output_tokens
    assert read - 3 <= usage.cache_read_input_tokens < read and 0 < usage.input_tokens < 20


def test_both_protocols_say_the_same(claude: Any, gpt: Any):
    text = claude.messages.create(**CLAUDE, system="Be brief.").content[0].text
    assert gpt.responses.create(**OPENAI, instructions="Be brief.").output_text == text


def test_what_cannot_be_asked_of_this_model_is_refused(claude: Any, gpt: Any):
    schema = {"type": "object", "properties": {"a": {"$ref": "https://example.com/x.json"}}}
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(**CLAUDE, output_config={"format": {"type": "json_schema", "schema": schema}})
    with pytest.raises(openai.BadRequestError) as caught:
        gpt.responses.create(
            **OPENAI, text={"format": {"type": "json_schema", "name": "n", "schema": schema}}
        )
    assert caught.value.param == "text.format"
    with pytest.raises(openai.BadRequestError) as caught:
        gpt.responses.create(**(OPENAI | {"input": "word " * 40_000}))
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
