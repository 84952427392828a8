"""Pictures in the four protocols: each way to send one becomes the same conversation, and is answered."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx2
import mlx.core as mx
import pytest
from support.drafting import GOLDEN
from support.endpoint import CHAT, GENERATE, MESSAGES, OLLAMA, RESPONSES, listening, parsed
from support.served import PLAIN, load_once
from support.spans import ROOT, facts, file, pair_of, tokenizer_of
from support.waiting import LIMIT

from mlx_spec.apps.server.engine.engine_thread import EngineThread
from mlx_spec.apps.server.engine.preparation import find_prompts
from mlx_spec.apps.server.errors import Failure
from mlx_spec.apps.server.requests.request import Chat, PictureFile
from mlx_spec.apps.server.settings import ServedModel, Settings
from mlx_spec.errors import NoVision
from mlx_spec.hub.catalog import PairSpec
from mlx_spec.pair import Pair
from mlx_spec.vision.pictures import MAX_PICTURES

A, B = (base64.b64encode(file(name)).decode() for name in "ab")
URL_A, URL_B = f"data:image/png;base64,{A}", f"data:image/png;base64,{B}"
ASSISTANT = str(GOLDEN / "e2b-trained" / "assistant")
PNG = {"type": "image_url", "image_url": {"url": URL_A, "detail": "high"}}
QUESTION = "What is the capital of Italy?"


def shown(name: str) -> dict[str, Any]:
    return {"type": "image", "image": PictureFile(file(name), "")}


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


# --- the ways to send one


def block(data: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [user(PNG, said("x"))]}),
        (CHAT, {"messages": [user({"type": "image_url", "image_url": URL_A}, said("x"))]}),
        (CHAT, {"messages": [user({"type": "input_image", "image_url": URL_A}, said("x"))]}),
        (RESPONSES, {"input": [user({"type": "input_image", "image_url": URL_A, "detail": "auto"},
                                    {"type": "input_text", "text": "x"})]}),
        (MESSAGES, {"messages": [user(block(A), said("x"))]}),
        (OLLAMA, {"messages": [{"role": "user", "content": "x", "images": [A]}]}),
        (OLLAMA, {"messages": [{"role": "user", "content": "x", "images": [URL_A]}]}),
        (GENERATE, {"prompt": "x", "images": [A]}),
    ],
)  # fmt: skip
def test_each_protocol_sends_the_same_conversation(path: str, body: dict[str, Any]) -> None:
    chat = parsed(path, stream=False, **body).prompt
    assert isinstance(chat, Chat)
    assert list(chat.messages) == [user(shown("a"), said("x"))]
    assert [picture.data for picture in chat.pictures] == [file("a")]


def test_a_picture_without_a_text_is_not_a_request_to_load() -> None:
    """Ollama's clients load a model with an empty prompt."""
    chat = parsed(GENERATE, stream=False, images=[A]).prompt
    assert isinstance(chat, Chat) and [picture.data for picture in chat.pictures] == [file("a")]


def test_texts_and_pictures_of_neighbours_stay_in_their_order() -> None:
    turns = [{"role": "user", "content": "one"}, user({"type": "image_url", "image_url": URL_A}, said("two"))]
    found = parsed(CHAT, messages=[*turns, {"role": "user", "content": "three"}]).prompt.messages
    assert list(found) == [user(said("one"), shown("a"), said("two"), said("three"))]


CALLS = [{"role": "tool", "tool_call_id": id, "name": "look"} for id in ("1", "2")]


def called(found: Any) -> list[dict[str, Any]]:
    return [message for message in found.prompt.messages if message["role"] in ("tool", "user")][1:]


def test_pictures_of_tools_follow_their_results() -> None:
    """Agents read picture files by a tool. Results stay together, as their calls do."""
    note = "The result is the picture that follows."
    uses = [{"type": "tool_use", "id": id, "name": "look", "input": {}} for id in ("1", "2")]
    results = [
        {"type": "tool_result", "tool_use_id": "1", "content": [block(A)]},
        {"type": "tool_result", "tool_use_id": "2", "content": [said("second"), block(B)]},
    ]
    turns = [{"role": "user", "content": "look"}, {"role": "assistant", "content": uses}]
    found = parsed(MESSAGES, messages=[*turns, user(*results, said("So?"))])
    expected = [CALLS[0] | {"content": note}, CALLS[1] | {"content": "second"}]
    assert called(found) == [*expected, user(shown("a"), shown("b"), said("So?"))]
    items = [
        {"role": "user", "content": "look"},
        *({"type": "function_call", "call_id": id, "name": "look", "arguments": "{}"} for id in ("1", "2")),
        {"type": "function_call_output", "call_id": "1",
         "output": [{"type": "input_image", "image_url": URL_A}]},
        {"type": "function_call_output", "call_id": "2",
         "output": [{"type": "input_text", "text": "second"}, {"type": "input_image", "image_url": URL_B}]},
    ]  # fmt: skip
    assert called(parsed(RESPONSES, input=items)) == [*expected, user(shown("a"), shown("b"))]
    answer = {"role": "assistant", "content": "Aha."}
    assert called(parsed(RESPONSES, input=[*items, answer]))[2:] == [user(shown("a"), shown("b"))]
    calls = [{"id": id, "function": {"name": "look", "arguments": "{}"}} for id in ("1", "2")]
    tools = [
        {"role": "tool", "tool_call_id": "1", "content": [PNG]},
        {"role": "tool", "tool_call_id": "2", "content": [said("second"), {**PNG, "image_url": URL_B}]},
    ]
    turns = [{"role": "user", "content": "look"}, {"role": "assistant", "tool_calls": calls}]
    assert called(parsed(CHAT, messages=[*turns, *tools])) == [*expected, user(shown("a"), shown("b"))]


# --- refusals


def test_damaged_files_and_models_without_a_tower_are_named() -> None:
    request = parsed(
        CHAT, messages=[user(said("x"), {"type": "image_url", "image_url": "data:;base64,aGVsbG8="})]
    )
    tokenizer = tokenizer_of("e2b")
    with pytest.raises(Failure, match=r"messages\.0\.content\.1: a file is not a picture"):
        find_prompts(request, tokenizer, pair_of("e2b").vision)
    with pytest.raises(Failure, match="model 'demo' reads no pictures: it is blind"):
        find_prompts(request, tokenizer, NoVision("it is blind"))
    many = parsed(CHAT, messages=[user(*[PNG] * (MAX_PICTURES + 1), said("x"))])
    with pytest.raises(Failure, match="21 pictures: 20 are the most"):
        find_prompts(many, tokenizer, pair_of("e2b").vision)


# --- a model that sees


def in_float32(served: ServedModel) -> Pair:
    """The pair as the server loads it, in the type of the golden files."""
    pair = load_once(served)
    if isinstance(pair.vision_or_reason, NoVision):
        return pair
    pair.vision.load()
    for network in (pair._model, pair.vision._tower, pair._drafters[0].network):
        network.set_dtype(mx.float32)
    return pair


@pytest.fixture(scope="module")
def client() -> Iterator[httpx2.Client]:
    served = ServedModel("e2b", PairSpec(str(ROOT / "e2b"), ASSISTANT, num_draft_tokens=3))
    (blind,) = PLAIN.models
    other = ServedModel("qwen", PairSpec(str(ROOT / "qwen"), "none"))  # which no test loads
    settings = Settings(models=(served, blind, other))
    engine = EngineThread(settings, in_float32)
    with listening(engine, settings) as url:
        assert engine.wait_loaded()
        with httpx2.Client(base_url=url, timeout=LIMIT, trust_env=False) as found:
            yield found


GREEDY = {"temperature": 0, "max_tokens": 8}


@pytest.mark.parametrize(
    ("path", "body", "read"),
    [
        (CHAT, {"messages": [user(PNG, said(QUESTION))]},
         lambda reply: reply["choices"][0]["message"]["content"]),
        (MESSAGES, {"messages": [user(block(A), said(QUESTION))]}, lambda reply: reply["content"][0]["text"]),
        (RESPONSES, {"input": [user({"type": "input_image", "image_url": URL_A},
                                    {"type": "input_text", "text": QUESTION})]},
         lambda reply: reply["output"][0]["content"][0]["text"]),
        (OLLAMA, {"messages": [{"role": "user", "content": QUESTION, "images": [A]}], "stream": False},
         lambda reply: reply["message"]["content"]),
        ("/race", {"messages": [user(PNG, said(QUESTION))]},
         lambda reply: " ".join({racer["text"] for racer in reply["racers"]})),
    ],
)  # fmt: skip
def test_an_answer_is_that_of_transformers(client: Any, path: str, body: dict[str, Any], read: Any) -> None:
    limits = {"max_output_tokens": 24} if path == RESPONSES else {"max_tokens": 24}
    response = client.post(path, json={"model": "e2b", "temperature": 0, **limits, **body})
    assert response.status_code == 200, response.text
    assert read(response.json()).strip() == facts("e2b")[0]["one"][0]["answer"].strip()


def test_rows_are_counted_and_cached(client: Any) -> None:
    body = {"model": "e2b", "messages": [user(PNG, said(QUESTION))], **GREEDY}
    usages = [client.post(CHAT, json=body).json()["usage"] for _ in range(2)]
    told = facts("e2b")[0]["one"][0]
    assert [usage["prompt_tokens"] for usage in usages] == [len(told["ids"])] * 2
    assert [usage["prompt_tokens_details"]["image_tokens"] for usage in usages] == [64, 64]
    assert usages[1]["prompt_tokens_details"]["cached_tokens"] == len(told["ids"]) - 2
    other = {**body, "messages": [user({"type": "image_url", "image_url": URL_B}, said(QUESTION))]}
    assert client.post(CHAT, json=other).json()["usage"]["prompt_tokens_details"]["cached_tokens"] < 16
    for model in ("e2b", "qwen"):
        asked = {"model": model, "messages": [user(block(A), said(QUESTION))]}
        count = client.post(f"{MESSAGES}/count_tokens", json=asked)
        assert count.json() == {"input_tokens": len(facts(model)[0]["one"][0]["ids"])}


def test_models_say_that_they_see(client: Any) -> None:
    cards = {card["id"]: card["images"] for card in client.get("/v1/models").json()["data"]}
    assert cards == {"e2b": True, "demo": False, "qwen": True}
    shows = [client.post("/api/show", json={"model": name}).json() for name in cards]
    assert ["vision" in show["capabilities"] for show in shows] == list(cards.values())


def test_a_model_that_does_not_see_says_why(client: Any) -> None:
    """It does so before it is loaded, when it is, and in a stream."""
    body = {"model": "demo", "messages": [user(block(A), said("x"))], "max_tokens": 4}
    loading = client.post(MESSAGES, json={**body, "messages": [user(said("x"))]})
    for path, more in (("/count_tokens", {}), ("", {}), ("", {"stream": True})):
        response = client.post(MESSAGES + path, json=body | more)
        assert response.status_code == 400 and loading.status_code == 200
        message = response.json()["error"]["message"]
        reason = "it is a text model: its config.json names no vision tower"
        assert message == f"messages.0.content.0: model 'demo' reads no pictures: {reason}"


def test_openais_and_anthropics_own_clients(client: Any) -> None:
    """Pictures of two turns, streamed and not, and the error that each client knows."""
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    later = [{"role": "assistant", "content": "Rome."}, user(block(B), said("And it?"))]
    for turns in ([user(block(A), said(QUESTION))], [user(block(A), said(QUESTION)), *later]):
        with anthropic.Anthropic(base_url=str(client.base_url), api_key="x", max_retries=0) as made:
            asked = {"max_tokens": 8, "messages": turns, "extra_body": {"temperature": 0}}
            whole = made.messages.create(model="e2b", **asked)
            with made.messages.stream(model="e2b", **asked) as stream:
                assert stream.get_final_text() == whole.content[0].text
            told = made.messages.count_tokens(model="e2b", messages=turns).input_tokens
            assert told == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
            with pytest.raises(anthropic.BadRequestError, match="'demo' reads no pictures: it is a text"):
                made.messages.create(model="demo", **asked)
        messages = [{**m, "content": [PNG, said(QUESTION)]} if m["role"] == "user" else m for m in turns]
        with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="x", max_retries=0) as made:
            answer = made.chat.completions.create(model="e2b", messages=messages, **GREEDY)
            chunks = list(made.chat.completions.create(model="e2b", messages=messages, stream=True, **GREEDY))
            streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert streamed == answer.choices[0].message.content
            assert answer.usage.prompt_tokens_details.image_tokens == 64 * ((len(turns) + 1) // 2)
            with pytest.raises(openai.BadRequestError, match="'demo' reads no pictures") as caught:
                made.chat.completions.create(model="demo", messages=messages, **GREEDY)
            assert caught.value.param == "messages.0.content.0"
