"""Anthropic's Messages API and OpenAI's Responses API on the demo pair, through their own clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")
from scripted import frames, listening, post  # noqa: E402

from mlx_spec.apps.server import messages, responses  # noqa: E402
from mlx_spec.apps.server.settings import Served, Settings  # noqa: E402
from mlx_spec.apps.server.worker import Worker  # noqa: E402

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
CLAUDE: dict[str, Any] = {"model": "demo", "max_tokens": 40, "messages": ASKED, **TEMPERATURE}
OPENAI: dict[str, Any] = {"model": "demo", "max_output_tokens": 40, "temperature": 0, "input": QUESTION}
NEW = (
    "id",
    "item_id",
    "created_at",
    "completed_at",
    "timings",
    "parsed_output",
    "parsed_arguments",
    "call_id",
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    settings = Settings((Served("demo", "demo"),))
    worker = Worker(settings)
    worker.start()
    try:
        assert worker.begun(60)
        with listening(messages.router(worker, settings), responses.router(worker, settings)) as address:
            yield address
    finally:
        worker.close()


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
    "text": {},
    "thoughts": {"thinking": {"type": "adaptive"}, "max_tokens": 60},
    "cut": {"max_tokens": 3},
    "schema": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "call": {"tools": [{"name": "weather", "input_schema": WEATHER}], "tool_choice": {"type": "any"}},
}


@pytest.mark.parametrize("asked", CLAUDE_ASKS.values(), ids=CLAUDE_ASKS)
def test_messages_streamed_and_whole_are_the_same(claude: Any, asked: dict[str, Any]):
    with claude.messages.stream(**(CLAUDE | asked)) as stream:
        streamed = stream.get_final_message()
    whole = claude.messages.create(**(CLAUDE | asked))
    assert whole.content and settled(streamed.model_dump()) == settled(whole.model_dump())
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert whole.usage.cache_read_input_tokens > 0  # the prompt has just been read


def test_messages_say_what_they_are_asked_to(claude: Any):
    thought = claude.messages.create(**(CLAUDE | CLAUDE_ASKS["thoughts"]))
    assert thought.content[0].type == "thinking" and thought.usage.output_tokens_details.thinking_tokens > 0
    cut = claude.messages.create(**(CLAUDE | CLAUDE_ASKS["cut"]))
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
    schema = claude.messages.create(**(CLAUDE | CLAUDE_ASKS["schema"]))
    assert set(json.loads(schema.content[0].text)) == {"name", "pure"}
    call = claude.messages.create(**(CLAUDE | CLAUDE_ASKS["call"]))
    assert call.stop_reason == "tool_use" and call.content[-1].name == "weather"
    assert call.content[-1].input["days"] in (1, 2)


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
    "text": {},
    "thoughts": {"reasoning": {"effort": "low"}, "max_output_tokens": 60},
    "cut": {"max_output_tokens": 3},
    "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "schema": {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
    "call": {
        "tools": [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}],
        "tool_choice": "required",
    },
}


@pytest.mark.parametrize("asked", GPT_ASKS.values(), ids=GPT_ASKS)
def test_responses_streamed_and_whole_are_the_same(gpt: Any, url: str, asked: dict[str, Any]):
    events = [content for _, content in frames(f"{url}/v1/responses", OPENAI | asked)]
    _, whole = post(f"{url}/v1/responses", OPENAI | asked)
    assert whole["output"] and settled(events[-1]["response"]) == settled(whole)
    deltas = "".join(event["delta"] for event in events if event["type"].endswith("output_text.delta"))
    assert deltas == gpt.responses.create(**(OPENAI | asked)).output_text


def test_responses_say_what_they_are_asked_to(gpt: Any):
    thought = gpt.responses.create(**(OPENAI | GPT_ASKS["thoughts"]))
    assert thought.output[0].type == "reasoning"
    assert thought.usage.output_tokens_details.reasoning_tokens > 0
    cut = gpt.responses.create(**(OPENAI | GPT_ASKS["cut"]))
    assert (cut.status, cut.usage.output_tokens) == ("incomplete", 3)
    likely = gpt.responses.create(**(OPENAI | GPT_ASKS["logprobs"])).output[0].content[0]
    assert b"".join(bytes(token.bytes) for token in likely.logprobs).decode() == likely.text
    assert all(token.logprob == token.top_logprobs[0].logprob for token in likely.logprobs)
    assert set(json.loads(gpt.responses.create(**(OPENAI | GPT_ASKS["schema"])).output_text)) == {
        "name",
        "pure",
    }
    call = gpt.responses.create(**(OPENAI | GPT_ASKS["call"])).output[-1]
    assert call.name == "weather" and json.loads(call.arguments)["days"] in (1, 2)


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
