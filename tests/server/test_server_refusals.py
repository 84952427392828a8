"""Requests that a protocol cannot answer: each error names the field and says what is wrong with it."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from support import served
from support.endpoint import (
    BODIES,
    CHAT,
    GENERATE,
    HELLO,
    INFILL,
    MESSAGES,
    OLLAMA,
    RACE,
    RESPONSES,
    TEXT,
    error_of,
    fresh,
    place_of,
)
from support.spans import file

Row = tuple[str, dict[str, Any], str, str]  # path, changes of the body, field, words of the error

ROUTES = (CHAT, TEXT, RESPONSES, MESSAGES)
LONG = "x" * 9999
PNG = base64.b64encode(file("a")).decode()
URL = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}
WEATHER = {"type": "function", "function": FUNCTION}
TOOLS: dict[str, dict[str, Any]] = {
    CHAT: WEATHER,
    RESPONSES: {"type": "function", **FUNCTION},
    MESSAGES: {"name": "weather", "input_schema": {"type": "object"}},
}
CALL_IDS: list[dict[str, str]] = [{}, {"tool_call_id": "c"}]  # missing, and of no call
JSON = {"type": "json_object"}
INVALID, MISSING, UNSUPPORTED = "invalid_value", "missing_required_parameter", "unsupported_value"


def said(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(parts)}]}


def after(**fields: Any) -> dict[str, Any]:
    """A conversation that ends with this message."""
    return {"messages": [*HELLO, fields]}


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


def picture(**source: str) -> dict[str, Any]:
    return {"type": "image", "source": source}


def chosen(path: str, **choice: Any) -> dict[str, Any]:
    return {"tools": [TOOLS[path]], "tool_choice": choice}


EVERYWHERE: list[tuple[dict[str, Any], str, str]] = [
    ({"typical_p": 0.9}, "typical_p", "leave it out, or give 1"),
    ({"use_beam_search": True}, "use_beam_search", "or give false"),
    ({"functions": []}, "functions", "`tools`"),
    ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n", "give -1"),
    ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty", "give one"),
    ({"separate_reasoning": False}, "separate_reasoning", "or give true"),
    ({"guided_choice": []}, "guided_choice", "a list of texts"),
    ({"guided_json": "{"}, "guided_json", "a JSON schema"),
    ({"grammar": 'root ::= "a"'}, "grammar", "Lark"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not supported"),
    ({"guided_json": {"type": "object"}, "regex": "a"}, "regex", "guided_json gives the form"),
    ({"temprature": 0.5}, "temprature", "temprature: unknown; did you mean temperature?"),
    ({"qqq": 1}, "qqq", "--allow-extra-parameters"),
    ({LONG: 1}, LONG[:40], "`serve --allow-extra-parameters` accepts such"),
]
OPENAI: list[Row] = [
    (CHAT, said({"type": "image_url", "image_url": {"url": "https://x.org/SECRET.png"}}),
     "messages.0.content.0", "a https: URL is not fetched"),
    (CHAT, said({"type": "image_url", "image_url": "file:///etc/SECRET"}), "messages.0.content.0",
     "a file: URL is not fetched"),
    (CHAT, said({"type": "image_url"}), "messages.0.content.0.image_url", ""),
    (CHAT, said(URL, role="system"), "messages.0.content.0", "a part of type"),
    (CHAT, said(URL, role="assistant"), "messages.0.content.0", ""),
    (CHAT, said({"type": "input_audio", "input_audio": {}}), "messages.0.content.0", ""),
    (CHAT, said({"type": "video_url", "video_url": {}}), "messages.0.content.0",
     "a part of type 'video_url'"),
    *((CHAT, {"temperature": value}, "temperature", INVALID) for value in ("0.5", 2.1, -1e-9, True)),
    (CHAT, {"min_p": 2}, "min_p", INVALID),
    (CHAT, {"seed": 1.5}, "seed", INVALID),
    *((CHAT, {"logit_bias": {token: 1}}, "logit_bias", INVALID) for token in ("x", "-1")),
    *((path, {"max_tokens": 0}, "max_tokens", INVALID) for path in (CHAT, TEXT)),
    (CHAT, {"n": 0}, "n", INVALID),
    (CHAT, {"stop": [str(i) for i in range(65)]}, "stop", "65 stop strings: 64 are the most"),
    (CHAT, {"top_logprobs": 1}, "top_logprobs", INVALID),
    *((CHAT, {"messages": value}, "messages", INVALID) for value in ([], None)),
    (CHAT, after(role="wizard", content="x"), "messages.1.role", INVALID),
    *((CHAT, after(role=role), "messages.1.content", "") for role in ("user", "assistant")),
    *((CHAT, after(role="tool", content="x", **call), "messages.1.tool_call_id", "") for call in CALL_IDS),
    (CHAT, {"continue_final_message": True}, "messages.0", ""),
    (CHAT, {"continue_final_message": True, "response_format": JSON,
            **after(role="assistant", content="It joi")}, "continue_final_message", ""),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", INVALID),
    (CHAT, {"tools": [WEATHER, WEATHER]}, "tools", INVALID),
    (CHAT, {"tool_choice": "required"}, "tool_choice", INVALID),
    (CHAT, chosen(CHAT, type="function", function={"name": "x"}), "tool_choice", INVALID),
    (CHAT, chosen(CHAT, type="allowed_tools", allowed_tools={"mode": "auto", "tools": [
        {"type": "function", "function": {"name": "rain"}}]}), "tool_choice", "none of the tools"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", MISSING),
    (CHAT, {"response_format": JSON, "guided_regex": "a"}, "guided_regex", "leave one of them out"),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs.enable_thinking", INVALID),
    (CHAT, {"stream": "yes"}, "stream", INVALID),
    (CHAT, {"n": 17}, "n", UNSUPPORTED),
    (CHAT, {"n": 10**4000}, "n", "a request may have 16 in all"),
    (CHAT, {"min_tokens": 10**4000, "max_tokens": 1}, "min_tokens", "are more than the limit of 1"),
    (CHAT, {"min_tokens": 2, "stop": "a"}, "min_tokens", "stop strings"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities", UNSUPPORTED),
    (CHAT, {"web_search_options": {}}, "web_search_options", UNSUPPORTED),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type", UNSUPPORTED),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type", UNSUPPORTED),
    (CHAT, {"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice", UNSUPPORTED),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", UNSUPPORTED),
    (CHAT, {"stop_sequences": 5}, "stop_sequences", "did you mean stop?"),
    *((path, {"stream_options": {"include_usage": True}}, "stream_options", "")
      for path in (CHAT, TEXT, RESPONSES)),
    *((path, {"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "")
      for path in (CHAT, TEXT, RESPONSES)),
    (TEXT, {"prompt": None}, "prompt", MISSING),
    *((TEXT, {"prompt": prompt}, "prompt", INVALID)
      for prompt in ([], [[]], ["a", 1], [1, "a"], [True], [1.5], {"a": 1}, ["a"] * 17)),
    (TEXT, {"prompt": ["a"] * 9, "n": 2}, "n", UNSUPPORTED),
    (TEXT, {"best_of": 2}, "best_of", UNSUPPORTED),
    *((TEXT, {"logprobs": value}, "logprobs", INVALID) for value in (21, True)),
    (TEXT, {"echo": 1}, "echo", INVALID),
    (TEXT, {"prompt": [1, 2], "suffix": "b"}, "suffix", ""),
    (TEXT, {"suffix": "b", "echo": True}, "suffix", ""),
    (INFILL, {"n": 2}, "n", ""),
    (INFILL, {"n_predict": -3}, "n_predict", ""),
    (INFILL, {"input_extra": [{"filename": "a"}]}, "input_extra.0.text", ""),
    (RACE, {"temperature": 1}, "seed", ""),
    (RACE, {"n": 2}, "n", ""),
    (RACE, {"stop": "x"}, "stop", ""),
    (RACE, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", ""),
    (RACE, {"temprature": 1}, "temprature", ""),
    (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id", "never stored"),
    (RESPONSES, {"conversation": {"id": "c"}}, "conversation", "previous_response_id"),
    (RESPONSES, {"background": True}, "background", "background"),
    (RESPONSES, {"include": ["file_search_call.results"]}, "include", "file_search_call.results"),
    (RESPONSES, {"include": [LONG]}, "include", "'message.output_text.logprobs'"),
    (RESPONSES, {"text": {"format": {"type": "grammar"}}}, "text.format.type", "'grammar'"),
    (RESPONSES, {"text": {"format": {"type": "regex"}}}, "text.format.pattern", "required"),
    (RESPONSES, {"response_format": JSON, "guided_regex": "a"}, "guided_regex", "leave one of them out"),
    (RESPONSES, {"input": []}, "input", "at least 1"),
    (RESPONSES, item(type=LONG), "input.0", "is not supported here"),
    (RESPONSES, item(type="item_reference", id="msg_x"), "input.0", "not found"),
    (RESPONSES, item(type="item_reference"), "input.0.id", ""),
    (RESPONSES, item(role="robot", content="x"), "input.0.role", "role"),
    (RESPONSES, item(role="user", content=[{"type": "input_image"}]), "input.0.content.0.image_url", ""),
    (RESPONSES, item(role="user", content=[{"type": "input_image", "file_id": "file-1"}]),
     "input.0.content.0.file_id", "no files are kept here"),
    (RESPONSES, item(type="function_call_output", call_id="x", output="y"), "input.0.call_id", "'x'"),
    (RESPONSES, {"tools": [{"type": "web_serch"}]}, "tools.0", "'web_serch'"),
    (RESPONSES, {"tools": [{"type": LONG}]}, "tools.0", "only 'function' and 'namespace'"),
    (RESPONSES, {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "x"}]}]},
     "tools.0.tools.0", "'x'"),
    (RESPONSES, {"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "needs tools"),
    (RESPONSES, chosen(RESPONSES, type="function", name="x"), "tool_choice", "'x'"),
    (RESPONSES, chosen(RESPONSES, type="allowed_tools", mode="auto",
                       tools=[{"type": "function", "name": "rain"}]), "tool_choice", "none of the tools"),
    (RESPONSES, {"max_tokens": 5}, "max_tokens", "did you mean max_output_tokens?"),
    (RESPONSES, {"stop": 5}, "stop", "--allow-extra-parameters"),
]  # fmt: skip
OTHERS: list[Row] = [
    (MESSAGES, said(picture(type="url", url="http://x.org/SECRET.png")), "messages.0.content.0.source.type",
     "'url' is not fetched"),
    (MESSAGES, said(picture(type="base64", media_type="image/png", data="?")), "messages.0.content.0",
     "a picture is not valid base64"),
    (MESSAGES, {"messages": [*said(picture(type="base64", media_type="image/png", data=PNG),
                                   role="assistant")["messages"], *HELLO]}, "messages.0.content.0", ""),
    (MESSAGES, said({"type": "tool_result", "tool_use_id": "x", "content": "y"}),
     "messages.0.content.0.tool_use_id", "'x'"),
    (MESSAGES, {"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", ""),
    (MESSAGES, said({"type": "text", "text": "Sure, "}, role="assistant"), "the conversation", "prefilled"),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 64}}, "thinking.budget_tokens",
     "max_tokens is 64"),
    (MESSAGES, {"container": "c1"}, "container", ""),
    (MESSAGES, {"compaction": {"type": "enabled"}}, "compaction", "summarized"),
    (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0", "bash_20250124"),
    (MESSAGES, {"tools": [{"type": LONG}]}, "tools.0", "only custom tools work here"),
    (MESSAGES, chosen(MESSAGES, type="tool", name="rain"), "tool_choice", "'rain'"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", ""),
    (MESSAGES, {"response_format": JSON, "guided_regex": "a"}, "guided_regex", "leave one of them out"),
    (MESSAGES, {"min_tokens": 65}, "min_tokens", "more than the limit"),
    (MESSAGES, {"max_completion_tokens": 5}, "max_completion_tokens", "did you mean max_tokens?"),
    (MESSAGES, {"stop": 5}, "stop", "did you mean stop_sequences?"),
    *((OLLAMA, body, "typical_p", "is not supported")
      for body in ({"typical_p": 0.5}, {"options": {"typical_p": 0.5}})),
    (OLLAMA, {"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "repeat_last_n", ""),
    (OLLAMA, {"options": {"num_predict": 0}}, "options.num_predict", ""),
    (OLLAMA, {"keep_alive": "soon"}, "keep_alive", ""),
    (OLLAMA, after(role="assistant", content="Sure"), "messages.1", ""),
    (OLLAMA, {"modle": "x"}, "modle", "unknown; did you mean model?"),
    (OLLAMA, {"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice", ""),
    (OLLAMA, {"top_logprobs": 2}, "top_logprobs", "only with logprobs true"),
    (OLLAMA, {"messages": [{"role": "system", "content": "x", "images": [PNG]}]}, "messages.0.images",
     "pictures"),
    (OLLAMA, {"messages": [{"role": "user", "content": "x", "images": ["?"]}]}, "messages.0.images.0",
     "a picture"),
    (GENERATE, {"suffix": "y", "system": "z"}, "system", ""),
    (GENERATE, {"raw": True, "think": "high"}, "think", "goes with neither raw"),
    (GENERATE, {"raw": True, "images": [PNG]}, "images", "goes with neither raw nor suffix"),
    (GENERATE, {"context": [1, 2]}, "context", ""),
    *((path, {"chat_template_kwargs": {name: "yes"}}, "chat_template_kwargs", name)
      for path in (CHAT, RESPONSES, MESSAGES, OLLAMA) for name in ("messages", "enable_thinking")),
]  # fmt: skip
TABLE = [*((path, *row) for path in ROUTES for row in EVERYWHERE), *OPENAI, *OTHERS]


@pytest.mark.parametrize(("path", "changes", "field", "words"), TABLE, ids=lambda value: str(value)[:30])
def test_the_error_names_the_field(path: str, changes: dict[str, Any], field: str, words: str):
    """The words stand in the line or are the code; a line repeats little of a request, and no address."""
    error = place_of(path).error(**changes)
    assert (error.get("param") or error["message"]).startswith(field), error
    assert words in f"{error.get('code')}: {error['message']}", error
    assert "SECRET" not in error["message"]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b'{"model": "\\ud8"}', b"[" * 10**5]
)
def test_a_body_that_is_no_json_object(path: str, body: bytes):
    stub, endpoint = fresh()
    response = endpoint.client.post(path, content=body)
    error = response.json()["error"]
    assert response.status_code == 400 and "\n" not in error["message"]
    assert error["type"] == "invalid_request_error" and stub.requests == []


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
@pytest.mark.parametrize("path", TOOLS)
def test_a_schema_has_finite_numbers(path: str, number: str):
    """Python reads them, but a response that repeats its tools could not be written."""
    body = json.dumps(BODIES[path] | {"tools": [TOOLS[path]]}).replace(
        '"object"', f'"object", "maximum": {number}', 1
    )
    response = fresh()[1].client.post(path, content=body)
    assert response.status_code == 400 and "finite" in response.json()["error"]["message"]


def test_a_text_beyond_the_limit_is_refused():
    """Pictures alone may be larger: base64 holds no text."""
    text = "a b " * (2**21 + 1)
    response = fresh()[1].client.post(CHAT, json={"messages": [{"role": "user", "content": text}]})
    failure = error_of(response, 413)
    assert failure["code"] == "body_too_large" and failure["param"] == "messages"


def test_a_prompt_that_no_context_holds_is_refused_before_it_is_tokenized():
    """Words of the error as for other long prompts: coding agents look for them."""
    with served.working(served.PLAIN, served.load_once) as engine:
        text = "x" * 1_000_000
        for request in (served.chat(text), served.raw(text)):
            failure = served.failure(served.answer(engine, request))
            assert (failure.status, failure.code) == (400, "context_length_exceeded")
            assert failure.message.startswith("the prompt is too long: at least ")
