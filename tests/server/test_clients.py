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

import pytest

openai = pytest.importorskip("openai")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from openai.types import Completion, Model  # noqa: E402
from openai.types.chat import ChatCompletion, ChatCompletionChunk  # noqa: E402
from pydantic import BaseModel  # noqa: E402
from serving import CHAT, Serving, serving  # noqa: E402

SUPPORT = Path(__file__).parents[1] / "support"
ZIP = [{"role": "user", "content": "What does zip do?"}]
EXACT = {"model": "demo", "temperature": 0}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2, 3]}},
            "required": ["city"],
        },
    },
}


class Answer(BaseModel):
    """What a schema asks for."""

    function: Literal["zip", "map"]
    pure: bool


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving() as started:
        yield started


@pytest.fixture(scope="module", autouse=True)
def no_open_loop() -> Iterator[None]:
    """No client leaves an event loop behind: a later test, in which it is collected, would fail for it."""
    yield
    loops = [one for one in gc.get_objects() if isinstance(one, asyncio.AbstractEventLoop)]
    assert all(loop.is_closed() for loop in loops)


@pytest.fixture
def client(server: Serving) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def chunks(server: Serving, body: dict[str, Any]) -> list[ChatCompletionChunk]:
    """A stream, every chunk checked by type."""
    reply = server.send(CHAT, body | {"stream": True})
    assert reply.status == 200 and reply.headers["content-type"].startswith("text/event-stream")
    assert reply.events[-1] == "[DONE]"
    return [ChatCompletionChunk.model_validate_json(data, strict=True) for data in reply.events[:-1]]


def test_chat(server: Serving, client: Any) -> None:
    found = client.chat.completions.create(messages=ZIP, max_tokens=40, **EXACT)
    assert "iterable" in found.choices[0].message.content
    assert found.choices[0].finish_reason == "stop"
    assert found.usage.prompt_tokens > 5 and found.usage.completion_tokens > 5
    reply = server.send(CHAT, EXACT | {"messages": ZIP})
    checked = ChatCompletion.model_validate_json(reply.body, strict=True)
    assert checked.choices[0].message.content == found.choices[0].message.content
    timings = reply.json["timings"]
    assert timings["draft_n"] >= timings["draft_n_accepted"] >= 0 and timings["predicted_per_second"] > 0


def test_a_stream_says_what_the_whole_answer_says(server: Serving) -> None:
    body = EXACT | {"messages": ZIP}
    whole = ChatCompletion.model_validate_json(server.send(CHAT, body).body, strict=True)
    found = chunks(server, body | {"stream_options": {"include_usage": True}})
    assert found[0].choices[0].delta.role == "assistant" and found[0].choices[0].delta.content == ""
    assert all(chunk.choices[0].delta.role is None for chunk in found[1:-1])
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in found}) == 1
    text = "".join(chunk.choices[0].delta.content or "" for chunk in found[:-1])
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in found[:-1]][-1] == "stop"
    assert found[-1].choices == [] and found[-1].usage is not None and whole.usage is not None
    assert found[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in found[:-1])


def test_the_stream_helper_of_the_client(client: Any) -> None:
    with client.chat.completions.stream(messages=ZIP, max_tokens=30, **EXACT) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert len(deltas) > 1 and "".join(deltas) == final.choices[0].message.content


def test_parse_a_schema(client: Any) -> None:
    found = client.chat.completions.parse(messages=ZIP, response_format=Answer, max_tokens=200, **EXACT)
    assert found.choices[0].finish_reason == "stop"
    assert isinstance(found.choices[0].message.parsed, Answer)


def test_tools(server: Serving, client: Any) -> None:
    ask = {"messages": ZIP, "tools": [WEATHER], "max_tokens": 120, **EXACT}
    found = client.chat.completions.create(tool_choice="required", **ask)
    choice = found.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    call = choice.message.tool_calls[0]
    assert call.function.name == "weather" and "city" in json.loads(call.function.arguments)
    found = chunks(server, ask | {"tool_choice": {"type": "function", "function": {"name": "weather"}}})
    deltas = [d for c in found if c.choices for d in c.choices[0].delta.tool_calls or []]
    assert deltas[0].id and deltas[0].function and deltas[0].function.name == "weather"
    assert all(delta.id is None for delta in deltas[1:] if delta.index == 0)
    text = "".join((d.function.arguments or "") for d in deltas if d.function and d.index == 0)
    assert text == call.function.arguments
    answer = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    history = [*ZIP, {"role": "assistant", "tool_calls": [call.model_dump()]}, answer]
    again = client.chat.completions.create(messages=history, tools=[WEATHER], max_tokens=8, **EXACT)
    assert again.choices[0].finish_reason in ("stop", "length")


def test_logprobs(client: Any) -> None:
    found = client.chat.completions.create(
        messages=ZIP, logprobs=True, top_logprobs=3, max_tokens=20, **EXACT
    )
    content = found.choices[0].logprobs.content
    assert b"".join(bytes(t.bytes) for t in content).decode() == found.choices[0].message.content
    assert all(len(t.top_logprobs) == 3 and t.top_logprobs[0].logprob <= 0 for t in content)
    assert all(t.top_logprobs[0].token == t.token for t in content)  # greedy
    assert len(content) == found.usage.completion_tokens


def test_two_choices_and_a_seed(client: Any) -> None:
    ask = {"messages": ZIP, "model": "demo", "temperature": 1.5, "seed": 3, "n": 2, "max_tokens": 16}
    first, second = (client.chat.completions.create(**ask) for _ in range(2))
    texts = [[choice.message.content for choice in found.choices] for found in (first, second)]
    assert texts[0] == texts[1] and texts[0][0] != texts[0][1]
    assert [choice.index for choice in first.choices] == [0, 1]


def test_stop_inside_a_token(client: Any) -> None:
    whole = client.chat.completions.create(messages=ZIP, **EXACT).choices[0].message.content
    stop = whole[12:15]
    found = client.chat.completions.create(messages=ZIP, stop=[stop], **EXACT)
    assert found.choices[0].message.content == whole[: whole.index(stop)]
    assert found.choices[0].finish_reason == "stop"


def test_prediction(client: Any) -> None:
    text = client.chat.completions.create(messages=ZIP, **EXACT).choices[0].message.content
    for predicted, right in ((text, True), ("Nothing of the kind, never at all.", False)):
        found = client.chat.completions.create(
            messages=ZIP, prediction={"type": "content", "content": predicted}, **EXACT
        )
        details = found.usage.completion_tokens_details
        assert found.choices[0].message.content == text
        assert (details.accepted_prediction_tokens > details.rejected_prediction_tokens) is right


@pytest.mark.parametrize(
    ("change", "error", "param"),
    [
        ({"model": "gpt-9"}, "NotFoundError", "model"),
        ({"n": 0}, "BadRequestError", "n"),
        ({"temperature": 9}, "BadRequestError", "temperature"),
        ({"max_tokens": 0}, "BadRequestError", "max_tokens"),
        ({"logit_bias": {"x": 1}}, "BadRequestError", "logit_bias"),
        ({"logit_bias": {"999999999": 1}}, "BadRequestError", "logit_bias"),
        ({"messages": []}, "BadRequestError", "messages"),
        ({"messages": [{"role": "user", "content": "long " * 9000}]}, "BadRequestError", "messages"),
        ({"modalities": ["audio"]}, "BadRequestError", "modalities"),
    ],
)
def test_errors(client: Any, change: dict[str, Any], error: str, param: str) -> None:
    with pytest.raises(getattr(openai, error)) as caught:
        client.chat.completions.create(**{"messages": ZIP, "max_tokens": 4, **EXACT, **change})
    assert caught.value.param == param
    assert {"message", "type", "param", "code"} == set(caught.value.body)


def test_completions(server: Serving, client: Any) -> None:
    found = client.completions.create(
        prompt=["zip returns", "map returns"], max_tokens=6, logprobs=2, echo=True, **EXACT
    )
    assert [choice.index for choice in found.choices] == [0, 1]
    assert found.choices[0].text.startswith("zip returns")
    logprobs = found.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None and all(x <= 0 for x in logprobs.token_logprobs[1:])
    assert len(logprobs.tokens) == len(logprobs.text_offset) == len(logprobs.token_logprobs)
    reply = server.send("/v1/completions", EXACT | {"prompt": "zip returns", "max_tokens": 5})
    Completion.model_validate_json(reply.body, strict=True)


def test_models(server: Serving, client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by
    Model.model_validate_json(server.send("/v1/models/demo").body, strict=True)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.skipif(find_spec("litellm") is None, reason="needs LiteLLM")
def test_litellm(server: Serving) -> None:
    program = [sys.executable, str(SUPPORT / "litellm_client.py"), server.url, "demo"]
    offline = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(program, capture_output=True, text=True, timeout=240, env=offline)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert "iterable" in found["whole"] and found["streamed"] == found["whole"]
    assert found["refused"] == 404


@pytest.mark.filterwarnings("ignore")
def test_langchain(server: Serving) -> None:
    module = pytest.importorskip("langchain_openai")
    ask = {"model": "demo", "temperature": 0, "max_retries": 0, "api_key": "none"}
    chat = module.ChatOpenAI(base_url=f"{server.url}/v1", max_tokens=8, **ask)
    found = chat.invoke("What does zip do?")  # max_tokens travels as max_completion_tokens
    assert found.usage_metadata["output_tokens"] == 8
    assert found.response_metadata["finish_reason"] == "length"
    assert "".join(str(piece.content) for piece in chat.stream("What does zip do?")) == found.content
    longer = module.ChatOpenAI(base_url=f"{server.url}/v1", max_tokens=100, **ask)
    called = longer.bind_tools([WEATHER], tool_choice="required").invoke("Weather?")
    assert called.tool_calls[0]["name"] == "weather" and "city" in called.tool_calls[0]["args"]
