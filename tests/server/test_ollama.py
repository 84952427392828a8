"""Ollama's native API: requests, lines, models, refusals."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient
from support import served
from support.endpoint import (
    ANSWER,
    CALLS,
    CONVERSATION,
    DEMO,
    GENERATE,
    HELLO,
    OLLAMA,
    SHUTDOWN,
    TURN,
    Stub,
    fresh,
    said,
    shared,
    stubbed,
)
from support.waiting import wait_until

from mlx_spec.apps.server import http
from mlx_spec.apps.server.engine.answers import Finished, RoundDone, timestamp
from mlx_spec.apps.server.engine.engine_thread import EngineThread
from mlx_spec.apps.server.engine.models import ModelCard
from mlx_spec.apps.server.requests.parameters import parse_duration
from mlx_spec.apps.server.requests.request import (
    Chat,
    FillIn,
    GenerationRequest,
    OutputFormat,
    RawPrompts,
    Tool,
    ToolUse,
)
from mlx_spec.apps.server.settings import Settings
from mlx_spec.sampling import Sampling

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
BRIEF, HI = {"role": "system", "content": "Be brief."}, ({"role": "user", "content": "Hi"},)


def post(path: str = OLLAMA, **body: Any) -> Any:
    return shared()[1].post(path, **body)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    fresh(ANSWER)


def client() -> TestClient:
    return shared()[1].client


def parsed(path: str = OLLAMA, **body: Any) -> GenerationRequest:
    response = post(path, **body)
    assert response.status_code == 200, response.text
    return shared()[0].requests[-1]


def lines(path: str = OLLAMA, **body: Any) -> list[dict[str, Any]]:
    response = post(path, **body, stream=None)
    assert response.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in response.text.splitlines()]


# --- requests


def test_a_conversation_with_everything() -> None:
    calls = [{"function": {"name": name, "arguments": arguments}} for _, name, arguments in CALLS]
    answer = {"role": "assistant", "content": "One moment.", "thinking": "I ask.", "tool_calls": calls}
    results = [
        {"role": "tool", "tool_name": "weather", "content": "dry"},
        {"role": "tool", "tool_name": "now", "content": "Error: no clock"},
    ]
    found = parsed(
        model="demo:latest",
        temperature=0.3,  # what is in `options` goes first
        frequency_penalty=1,
        max_output_tokens=99.0,
        tool_choice={"type": "function", "name": "weather"},
        parallel_tool_calls=False,
        keep_alive=60.0,
        messages=[*CONVERSATION[:2], answer, *results, CONVERSATION[-1]],
        tools=[WEATHER],
        think=False,
        options={
            "temperature": 1,
            "top_k": 0,
            "top_p": 1,
            "num_predict": 9.0,
            "num_ctx": 8192.0,
            "stop": ["x", "x", ""],
            "seed": 3,
        },
        format={"type": "object"},
    )
    ids = json.dumps(CONVERSATION).replace('"a"', '"call_2_0"').replace('"b"', '"call_2_1"')
    tools = ToolUse((Tool("weather", None, CITY),), "required", "weather", parallel=False)
    assert found.prompt == Chat(tuple(json.loads(ids)), tools, False)
    assert found.sampling == Sampling(1.0, top_k=0, top_p=1.0, seed=3, frequency_penalty=1)
    assert (found.max_tokens, found.stop, found.keep_alive) == (9, ("x",), 60)
    assert found.format == OutputFormat("json_schema", '{"type": "object"}', "format", strict=False)


def test_defaults_are_ollamas() -> None:
    found = parsed(options=None, format="", template="", images=[], suffix=None, context=[])
    assert found.sampling == Sampling(temperature=0.8, top_k=40, top_p=0.9)
    assert isinstance(found.prompt, Chat) and found.prompt.thinking  # the stub does not say that it cannot
    assert (found.max_tokens, found.format, found.keep_alive, found.top_logprobs) == (None, None, None, None)


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"prompt": "Hi", "think": "high"}, Chat(HI, None, True, {"reasoning_effort": "high"})),
        ({"prompt": "Hi", "think": False, "system": "Be brief."}, Chat((BRIEF, *HI), thinking=False)),
        ({"prompt": "Hi", "raw": True}, RawPrompts(("Hi",))),
        ({"prompt": ""}, RawPrompts(())),
        ({"prompt": "a = ", "suffix": "\nprint(a)"}, RawPrompts((FillIn("a = ", "\nprint(a)"),))),
    ],
)
def test_prompts_of_generate(body: dict[str, Any], prompt: Any) -> None:
    assert parsed(GENERATE, **body).prompt == prompt


def test_an_option_that_is_not_known_is_a_note() -> None:
    """Ollama warns of it and goes on."""
    note = "temprature: is not known here and has no effect; did you mean temperature?"
    body = {"options": {"temprature": 1, "max_tokens": 9.0}, "echo": False, "top_p": None, "nothing": []}
    assert post(**body).json()["mlx_spec"] == {"notes": [note]}
    assert parsed(**body).max_tokens == 9
    assert lines(**body)[-1]["mlx_spec"] == {"notes": [note]}


def test_results_find_their_calls_by_name() -> None:
    calls = [{"function": {"name": name}} for name in ("weather", "now")]
    results = [{"role": "tool", "tool_name": name, "content": name} for name in ("now", "weather")]
    turns = [*HELLO, {"role": "assistant", "tool_calls": calls}, *results, *HELLO]
    found = parsed(messages=turns).prompt.messages  # type: ignore[union-attr]
    ids = {turn["tool_call_id"]: turn["content"] for turn in found if turn["role"] == "tool"}
    assert ids == {"call_1_0": "weather", "call_1_1": "now"}


def test_a_result_may_come_without_its_call() -> None:
    """A client cuts the beginning of a long conversation off."""
    turns = [*HELLO, {"role": "tool", "content": "dry", "tool_name": "weather"}, *HELLO]
    found = parsed(messages=turns).prompt.messages[1]  # type: ignore[union-attr]
    assert found == {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "dry"}


def test_thinking_is_refused_where_the_model_cannot() -> None:
    plain = Stub()
    plain.models = lambda: (ModelCard("demo", (), 0, loaded=True, thinks=False),)  # type: ignore[method-assign]
    other = stubbed(plain).client
    body = {"messages": HELLO, "stream": False}
    refused = other.post(OLLAMA, json=body | {"think": True}).json()
    assert refused == {"error": "think: 'demo' does not support thinking"}
    assert other.post(OLLAMA, json=body).status_code == 200
    assert not plain.requests[0].prompt.thinking  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(None, None), (0, 0), ("0", 0), (300, 300), (1.5, 1.5), ("5m", 300), ("1h30m", 5400), ("100ms", 0.1)]
    + [(given, math.inf) for given in (-1, "-1", "-1m")],
)
def test_durations(given: Any, seconds: Any) -> None:
    assert parse_duration(given) == pytest.approx(seconds)


@pytest.mark.parametrize("given", ["999999999999s", f"{10**30}h", -1])
def test_a_model_may_stay_beyond_all_dates(given: Any) -> None:
    seconds = parse_duration(given)
    assert seconds is not None and timestamp(time.time() + seconds).startswith("9999-12-31T")


# --- answers


def test_a_whole_chat() -> None:
    found = post(logprobs=True, options={}).json()
    assert found["message"] == {"role": "assistant", "content": "Hello you", "thinking": "Hm."}
    assert (found["model"], found["done"], found["done_reason"]) == ("demo", True, "stop")
    assert (found["prompt_eval_count"], found["eval_count"]) == (5, 4)
    assert (found["prompt_eval_duration"], found["eval_duration"]) == (10**8, 2 * 10**8)
    assert found["load_duration"] == 10**7 and found["total_duration"] > 0
    assert [one["token"] for one in found["logprobs"]] == ["Hel", "lo"]
    assert found["timings"]["draft_kind"] == "lookup" and found["created_at"].endswith("Z")


def test_the_lines_of_a_stream_add_up_to_the_whole() -> None:
    fresh(TURN)
    streamed, whole = lines(), post().json()
    for key in ("content", "thinking"):
        assert "".join(line["message"].get(key, "") for line in streamed) == whole["message"][key]
    calls = [call for line in streamed for call in line["message"].get("tool_calls", [])]
    assert calls == whole["message"]["tool_calls"]
    arguments = {"city": "Köln", "days": [1, 2]}
    assert calls[0] == {"id": "call_1", "function": {"index": 0, "name": "weather", "arguments": arguments}}
    assert calls[1]["function"] == {"index": 1, "name": "now", "arguments": {}}
    assert [line["done"] for line in streamed] == [False] * (len(streamed) - 1) + [True]
    assert streamed[-1]["done_reason"] == whole["done_reason"] == "stop"
    fresh(said("Hi", reason="length"))
    assert lines()[-1]["done_reason"] == post().json()["done_reason"] == "length"


def test_generate_has_its_own_shape() -> None:
    streamed = lines(GENERATE)
    assert "".join(line["response"] for line in streamed) == "Hello you"
    assert streamed[0]["thinking"] == "Hm." and "message" not in streamed[0]
    found = post(GENERATE).json()
    assert found["response"] == "Hello you" and found["context"] == streamed[-1]["context"] == []


def test_silence_and_failures_are_lines_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def played(*_: Any, **__: Any) -> Any:
        for event in (None, ANSWER[0], SHUTDOWN):
            yield event

    monkeypatch.setattr(http, "read_events", played)
    silence, failure = lines()
    assert silence["message"] == {"role": "assistant", "content": ""}
    assert failure == {"error": "shutting down"}


# --- models and routes


def test_models() -> None:
    listed = client().get("/api/tags").json()["models"]
    assert [model["name"] for model in listed] == ["demo:latest", "alias:latest"]
    assert listed[0]["details"]["family"] and listed[0]["size"] > 10**6 and len(listed[0]["digest"]) == 64
    for body in ({"model": "demo:latest"}, {"name": "alias"}):
        shown = client().post("/api/show", json=body).json()
        assert (shown["capabilities"], shown["template"]) == (["completion"], "")
        assert shown["model_info"][f"{shown['details']['family']}.context_length"] == 64
    assert client().head("/api/version").status_code == client().head("/").status_code == 200


def test_pull_knows_what_is_served() -> None:
    assert client().post("/api/pull", json={"model": "demo"}).json() == {"status": "success"}
    response = client().post("/api/pull", json={"model": "llama3"})
    assert response.status_code == 404 and "mlx-spec convert" in response.json()["error"]


@pytest.mark.parametrize("path", ["embed", "embeddings", "create", "copy", "push", "delete", "nothing"])
def test_other_routes_are_refused_in_ollamas_shape(path: str) -> None:
    response = client().request(
        "DELETE" if path == "delete" else "POST", f"/api/{path}", json={"model": "demo"}
    )
    assert response.status_code in (400, 404) and f"/api/{path}" in response.json()["error"]


def test_the_guards_stand_before_these_routes() -> None:
    other = stubbed(Stub(), Settings(DEMO, api_key="secret")).client
    foreign = ({"host": "evil.example"}, 403), ({"origin": "http://evil.example"}, 403)
    for headers, status in (({}, 401), *foreign):
        response = other.get("/api/tags", headers=headers)
        assert response.status_code == status and isinstance(response.json()["error"], str)


# --- with a real engine


def test_the_template_of_a_model_with_tools_is_shown() -> None:
    """LiteLLM looks for "tools" in it."""
    shown = stubbed(EngineThread(served.DEMO)).client.post("/api/show", json={"model": "demo"}).json()  # type: ignore[arg-type]
    assert "tools" in shown["template"] and "tools" in shown["capabilities"]


def test_an_empty_prompt_loads_and_keep_alive_unloads() -> None:
    with served.working(served.PLAIN, served.load_once, idle_s=0.05) as engine:
        other = stubbed(engine, served.PLAIN).client  # type: ignore[arg-type]

        def running() -> list[str]:
            return [model["name"] for model in other.get("/api/ps").json()["models"]]

        assert running() == ["demo:latest"]
        unload = {"model": "demo", "keep_alive": 0, "stream": False}
        assert other.post(GENERATE, json=unload).json()["done_reason"] == "unload"
        wait_until(lambda: running() == [])
        assert other.post(GENERATE, json=unload).json()["done_reason"] == "unload"
        assert running() == []
        load = other.post(OLLAMA, json={"model": "demo", "keep_alive": "5m"}).json()
        assert (load["done_reason"], load["message"]["content"]) == ("load", "")
        busy = served.begin(engine, served.chat(served.QUESTION, sampling=served.ENDLESS, max_tokens=400))
        busy.until(RoundDone)
        notes = other.post(GENERATE, json=unload).json()["mlx_spec"]["notes"]
        assert notes == ["keep_alive: it goes once no request uses it"]
        busy.job.cancel()
        wait_until(lambda: running() == [])
        other.post(OLLAMA, json={"model": "demo", "keep_alive": "5m"})
        expires = other.get("/api/ps").json()["models"][0]["expires_at"]
        assert expires < time.strftime("%Y-%m-%dT", time.gmtime(time.time() + 86400 * 2))
        events = served.answer(engine, replace(served.chat(served.QUESTION), keep_alive=0.0))
        assert isinstance(events[-1], Finished)
        wait_until(lambda: running() == [])  # after an answer, too
