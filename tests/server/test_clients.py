"""Clients that other people wrote, against a running server on the demo pair.

openai-python does not validate what it gets: its own types do here, strictly, chunk by chunk.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import httpx2
import pytest
from pydantic import BaseModel
from support import served
from support.endpoint import CHAT, RESPONSES, TEXT, events_of, frames, serving, settled
from support.waiting import LIMIT

SUPPORT = Path(__file__).parents[1] / "support"
ZIP = [{"role": "user", "content": "What does zip do?"}]
EXACT = {"model": "demo", "temperature": 0}


def record(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object with exactly these properties."""
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": [*properties]}
    return schema | {"additionalProperties": False}


SCHEMA = record(name={"type": "string", "maxLength": 4}, pure={"type": "boolean"})
FORECAST = record(city={"type": "string", "maxLength": 4}, days={"enum": [1, 2]})
FUNCTION = {"name": "weather", "parameters": FORECAST}
WEATHER = {"type": "function", "function": FUNCTION}


class Answer(BaseModel):
    """An answer with a schema."""

    function: Literal["zip", "map"]
    pure: bool


@pytest.fixture(scope="module")
def server() -> Iterator[httpx2.Client]:
    """A plain client of the server."""
    with serving(served.DEMO) as client:
        yield client


@pytest.fixture(scope="module", autouse=True)
def no_open_loop() -> Iterator[None]:
    """No client leaves an event loop behind: a later test, in which it is collected, would fail for it."""
    yield
    kept = gc.get_objects()  # by their types: what stands for another object may fail to give its class
    loops = [one for one in kept if issubclass(type(one), asyncio.AbstractEventLoop)]
    assert all(loop.is_closed() for loop in loops)


@pytest.fixture
def client(server: httpx2.Client, openai: Any) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0) as made:
        yield made


def chunks(server: httpx2.Client, body: dict[str, Any]) -> list[Any]:
    """A stream, every chunk checked by type."""
    from openai.types.chat import ChatCompletionChunk

    reply = server.post(CHAT, json=body | {"stream": True})
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
    *events, last = events_of(reply.text)
    assert last == "[DONE]"
    return [ChatCompletionChunk.model_validate_json(data, strict=True) for data in events]


def test_parse_a_schema(client: Any) -> None:
    found = client.chat.completions.parse(messages=ZIP, response_format=Answer, max_tokens=200, **EXACT)
    assert found.choices[0].finish_reason == "stop"
    assert isinstance(found.choices[0].message.parsed, Answer)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_the_models_choice_fits_its_schema(client: Any, stream: bool) -> None:
    """The demo writes calls when its marker is likely; without a grammar they were none."""
    ask = {"messages": ZIP, "tools": [WEATHER], "max_tokens": 60, "logit_bias": {"6": 30}, **EXACT}
    if stream:
        deltas = [c.choices[0].delta for c in client.chat.completions.create(stream=True, **ask)]
        call = next(call for delta in deltas for call in delta.tool_calls or ())
    else:
        call = client.chat.completions.create(**ask).choices[0].message.tool_calls[0]
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "weather" and arguments.keys() == {"city", "days"}


def test_a_schema_that_nothing_fits_is_refused_without_its_grammar(client: Any, openai: Any) -> None:
    none = {"properties": {"n": {"type": "integer", "minimum": 5, "maximum": 2}}, "required": ["n"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": none}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(messages=ZIP, tools=[tool], tool_choice="required", **EXACT)
    message = caught.value.body["message"]
    assert message.startswith("tools: the parameters of 'f' cannot be enforced: ")
    assert "#/properties/n" in message and "start:" not in message and "\n" not in message
    assert caught.value.param == "tools"


def test_prediction(client: Any) -> None:
    ask = {"messages": ZIP, "max_tokens": 16, **EXACT}
    text = client.chat.completions.create(**ask).choices[0].message.content
    for predicted, right in ((text, True), ("Nothing of the kind, never at all.", False)):
        found = client.chat.completions.create(prediction={"type": "content", "content": predicted}, **ask)
        details = found.usage.completion_tokens_details
        assert found.choices[0].message.content == text
        assert (details.accepted_prediction_tokens > details.rejected_prediction_tokens) is right


def test_a_stop_may_be_a_control_token(client: Any) -> None:
    """No text has its name: such a stop never ended an answer."""
    ask = {"messages": ZIP, "logit_bias": {"14": 100}, "max_tokens": 3, **EXACT}
    for stop, reason in ((["<turn>"], "length"), (["x", "<|turn>"], "stop")):
        choice = client.chat.completions.create(**ask, stop=stop).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("", reason)


def test_completions(server: httpx2.Client, client: Any) -> None:
    from openai.types import Completion

    found = client.completions.create(
        prompt=["zip returns", "map returns"], max_tokens=6, logprobs=2, echo=True, **EXACT
    )
    assert [choice.index for choice in found.choices] == [0, 1]
    assert found.choices[0].text.startswith("zip returns")
    logprobs = found.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None and all(x <= 0 for x in logprobs.token_logprobs[1:])
    assert len(logprobs.tokens) == len(logprobs.text_offset) == len(logprobs.token_logprobs)
    reply = server.post(TEXT, json=EXACT | {"prompt": "zip returns", "max_tokens": 5})
    Completion.model_validate_json(reply.text, strict=True)


@pytest.mark.skipif(find_spec("litellm") is None, reason="needs LiteLLM")
def test_litellm(server: httpx2.Client) -> None:
    program = [sys.executable, str(SUPPORT / "litellm_client.py"), str(server.base_url), "demo"]
    offline = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(program, capture_output=True, text=True, timeout=2 * LIMIT, env=offline)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    whole, *others = found["texts"]  # OpenAI's dialect and Ollama's, whole and streamed
    assert "tuples" in whole and others == [whole] * 3
    assert found["refused"] == 404


# --- OpenAI's two APIs and Anthropic's


TEMPERATURE = {"extra_body": {"temperature": 0}}  # newer clients have no field for it
CLAUDE: dict[str, Any] = {"model": "demo", "max_tokens": 30, "messages": ZIP, **TEMPERATURE}
COMPLETE: dict[str, Any] = EXACT | {"max_tokens": 30, "messages": ZIP}
OPENAI: dict[str, Any] = EXACT | {"max_output_tokens": 30, "input": ZIP[0]["content"]}


@pytest.fixture
def claude(server: httpx2.Client, anthropic: Any) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=str(server.base_url), api_key="none", max_retries=0) as made:
        yield made


FORM = {"type": "json_schema", "schema": SCHEMA}
ASKS: dict[str, tuple[dict[str, Any], ...]] = {  # in chat completions, messages and responses
    "text": (
        {"logprobs": True, "top_logprobs": 2, "max_tokens": 12},
        {"max_tokens": 12},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 12},
    ),
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        {"output_config": {"format": FORM}},
        {"text": {"format": FORM | {"name": "n"}}},
    ),
    "call": (
        {"tools": [WEATHER], "tool_choice": "required"},
        {"tools": [{"name": "weather", "input_schema": FORECAST}], "tool_choice": {"type": "any"}},
        {"tools": [{"type": "function", **FUNCTION, "strict": True}], "tool_choice": "required"},
    ),
}


@pytest.mark.parametrize("kind", ASKS)
def test_all_protocols_say_the_same_streamed_and_whole(claude: Any, client: Any, server: Any, kind: str):
    from openai.types.chat import ChatCompletion

    chat, ours, theirs = (
        base | more for base, more in zip((COMPLETE, CLAUDE, OPENAI), ASKS[kind], strict=True)
    )
    with claude.messages.stream(**ours) as stream:
        streamed = stream.get_final_message()
    message, response = claude.messages.create(**ours), client.responses.create(**theirs)
    assert settled(streamed.model_dump(), "usage") == settled(message.model_dump(), "usage")  # of the cache
    raw = server.post(RESPONSES, json=theirs | {"stream": True}).text
    events = [content for _, content in frames(raw)]
    body = response.model_dump(by_alias=True, exclude_unset=True)
    assert settled(events[-1]["response"], "usage") == settled(body, "usage")
    *found, last = chunks(server, chat | {"stream_options": {"include_usage": True}})
    whole = ChatCompletion.model_validate_json(server.post(CHAT, json=chat).text, strict=True)
    choice, deltas = whole.choices[0], [chunk.choices[0].delta for chunk in found]
    assert deltas[0].role == "assistant" and not any(delta.role for delta in deltas[1:])
    assert [chunk.choices[0].finish_reason for chunk in found][-1] == choice.finish_reason
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in (*found, last)}) == 1
    assert last.choices == [] and last.usage and not any(chunk.usage for chunk in found)
    counts = last.usage.completion_tokens, whole.usage.completion_tokens, message.usage.output_tokens
    assert {*counts, streamed.usage.output_tokens} == {response.usage.output_tokens}
    if kind == "call":
        calls = [call.function for delta in deltas for call in delta.tool_calls or ()]
        arguments = "".join(call.arguments or "" for call in calls)
        called, call, block = choice.message.tool_calls[0].function, response.output[-1], message.content[-1]
        assert message.stop_reason == "tool_use" and choice.finish_reason == "tool_calls"
        assert called.name == calls[0].name == call.name == block.name == "weather"
        assert arguments == called.arguments == call.arguments
        assert json.loads(arguments) == block.input and block.input["days"] in (1, 2)
        return
    text = "".join(event["delta"] for event in events if event["type"].endswith("output_text.delta"))
    assert text == response.output_text == message.content[0].text == choice.message.content
    assert text == "".join(delta.content or "" for delta in deltas)
    if kind == "text":
        tokens = response.output[0].content[0].logprobs
        assert b"".join(bytes(token.bytes) for token in tokens).decode() == text
        assert all(token.logprob == token.top_logprobs[0].logprob for token in tokens)
        assert [token.token for token in choice.logprobs.content] == [token.token for token in tokens]
    else:
        assert set(json.loads(text)) == {"name", "pure"}


def test_only_the_new_tokens_of_the_next_turn_are_read(client: Any):
    first = client.responses.create(**OPENAI)
    usage = client.responses.create(**OPENAI | {"input": "Why?", "previous_response_id": first.id}).usage
    cached = usage.input_tokens_details.cached_tokens
    assert cached >= first.usage.total_tokens - 1  # the token drawn last has not been read
    assert 0 < usage.input_tokens - cached < first.usage.input_tokens


def test_a_prompt_that_is_too_long(claude: Any, client: Any, anthropic: Any, openai: Any):
    long = "word " * 40_000
    words = r"prompt is too long[^0-9]*\d+\s*tokens?\s*>\s*\d+"  # by which Claude Code knows it
    with pytest.raises(anthropic.BadRequestError, match=words):
        claude.messages.create(**CLAUDE | {"messages": [{"role": "user", "content": long}]})
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**OPENAI | {"input": long})
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


def test_a_call_that_is_cut_off_is_text_without_markup(claude: Any, client: Any):
    """An agent shows such a text as the answer."""
    said = claude.messages.create(**CLAUDE | ASKS["call"][1] | {"max_tokens": 12})
    response = client.responses.create(**OPENAI | ASKS["call"][2] | {"max_output_tokens": 12})
    chat = COMPLETE | ASKS["call"][0] | {"max_tokens": 12}
    choice = client.chat.completions.create(**chat).choices[0]
    pieces = [piece.choices[0].delta for piece in client.chat.completions.create(**chat, stream=True)]
    streamed = "".join(piece.content or "" for piece in pieces)
    assert [block.type for block in said.content] == ["text"] and said.stop_reason == "max_tokens"
    assert response.status == "incomplete" and choice.finish_reason == "length"
    assert choice.message.tool_calls is None and not any(piece.tool_calls for piece in pieces)
    (text,) = {said.content[0].text, response.output_text, choice.message.content, streamed}
    assert text.startswith('call:weather{city:"') and not set("<|>") & set(text)
