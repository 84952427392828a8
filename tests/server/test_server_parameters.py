"""Parameters of all protocols and runtimes: read alike, or accepted because nothing depends on them."""

from __future__ import annotations

import json
import random
import re
import time
from typing import Any

import pytest
from support.endpoint import (
    BODIES,
    CHAT,
    DEMO,
    MESSAGES,
    OLLAMA,
    RESPONSES,
    TEXT,
    Stub,
    fresh,
    parsed,
    place_of,
    stubbed,
)

from mlx_spec.apps.server.requests.parameters import HARMLESS, NEUTRAL, NO_VERBOSITY
from mlx_spec.apps.server.requests.parsing import replace_halves
from mlx_spec.apps.server.requests.request import OutputFormat, RawPrompts, Tool, ToolUse
from mlx_spec.apps.server.settings import Settings
from mlx_spec.sampling import Sampling

ROUTES = (CHAT, TEXT, RESPONSES, MESSAGES)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def schema(param: str, strict: bool = True) -> OutputFormat:
    return OutputFormat("json_schema", json.dumps(SCHEMA), param, strict)


def any_json(param: str) -> OutputFormat:
    return OutputFormat("json_object", param=param)


CONSTRAINTS = [
    ({"guided_json": SCHEMA}, schema("guided_json")),
    ({"guided_json": json.dumps(SCHEMA)}, schema("guided_json")),
    ({"guided_regex": "[ab]+"}, OutputFormat("regex", "[ab]+", "guided_regex")),
    ({"guided_choice": ["yes", "a.b\n"]}, OutputFormat("regex", r"yes|a\.b\n", "guided_choice")),
    ({"guided_grammar": 'start: "a"'}, OutputFormat("lark", 'start: "a"', "guided_grammar")),
    ({"structured_outputs": {"json": SCHEMA}}, schema("structured_outputs.json")),
    ({"structured_outputs": {"choice": ["a"]}}, OutputFormat("regex", "a", "structured_outputs.choice")),
    (
        {"structured_outputs": {"regex": "a|b", "disable_any_whitespace": True, "json": None}},
        OutputFormat("regex", "a|b", "structured_outputs.regex"),
    ),
    ({"structured_outputs": {"json_object": True}}, any_json("structured_outputs.json_object")),
    ({"regex": "a"}, OutputFormat("regex", "a", "regex")),
    ({"ebnf": 'start: "a"'}, OutputFormat("lark", 'start: "a"', "ebnf")),
    ({"grammar": 'start: "a"'}, OutputFormat("lark", 'start: "a"', "grammar")),
    ({"json_schema": json.dumps(SCHEMA)}, schema("json_schema")),
    ({"format": "json"}, any_json("format")),
    ({"format": SCHEMA}, schema("format")),
    ({"format": "", "guided_json": None, "structured_outputs": None}, None),
]


@pytest.mark.parametrize("path", ROUTES)
def test_constraints_of_other_runtimes(path: str):
    for changes, expected in CONSTRAINTS:
        assert parsed(path, **changes).format == expected


FORMATS: dict[str, tuple[str, Any]] = {  # where a protocol has the format, and how it is given there
    "response_format": (CHAT, lambda given: {"response_format": given}),
    "text.format": (RESPONSES, lambda given: {"text": {"format": given}}),
    "output_config.format": (MESSAGES, lambda given: {"output_config": {"format": given, "effort": "low"}}),
    "output_format": (MESSAGES, lambda given: {"output_format": given}),
}


@pytest.mark.parametrize("place", FORMATS)
def test_forms_of_response_format(place: str):
    path, body = FORMATS[place]
    named = {"type": "json_schema", "name": "n", "schema": SCHEMA}
    binds = path == MESSAGES  # without `strict`
    for given, expected in (
        ({"type": "text"}, None),
        ({"type": "json_object"}, any_json(place)),
        ({"type": "json_object", "schema": SCHEMA}, schema(f"{place}.schema", binds)),
        (named, schema(f"{place}.schema", binds)),
        ({**named, "strict": True}, schema(f"{place}.schema")),
        ({**named, "strict": False}, schema(f"{place}.schema", False)),
        ({"type": "regex", "pattern": "a+"}, OutputFormat("regex", "a+", f"{place}.pattern")),
        ({"type": "lark", "grammar": "start: A"}, OutputFormat("lark", "start: A", f"{place}.grammar")),
    ):
        assert parsed(path, **body(given)).format == expected
    for strict in (None, False, True):
        given = {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": strict}}
        expected = schema("response_format.json_schema.schema", bool(strict))
        assert parsed(path, response_format=given).format == expected
    assert not parsed(MESSAGES, output_config={"effort": "low"}).prompt.thinking


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"repeat_penalty": 1.1, "repeat_last_n": -1}, {"repetition_penalty": 1.1}),
        ({"repeat_penalty": 1, "repeat_last_n": 64}, {}),
        ({"repetition_penalty": 1.2, "seed": 3}, {"repetition_penalty": 1.2, "seed": 3}),
        ({"top_k": -1, "seed": -1.0}, {}),
        ({"temperature": 1e-5, "seed": 3}, {"temperature": 0.0, "seed": 3}),  # as vLLM reads it
        ({"extra_body": {"top_k": 5.0, "min_p": 0.5}, "min_p": 0.1}, {"top_k": 5, "min_p": 0.1}),
        ({"options": {"num_ctx": 8192, "top_k": 5, "min_p": 0.5}, "min_p": 0.1}, {"top_k": 5, "min_p": 0.1}),
        ({"top_k": 9, "top_p": 0}, {"top_k": 1}),
        ({"temperature": 0, "top_p": 0.9}, {"temperature": 0.0, "top_p": 0.9}),
        ({"frequency_penalty": 1, "logit_bias": {"5": 1}}, {"frequency_penalty": 1, "logit_bias": {5: 1}}),
        *((same, same) for same in ({"top_k": 5, "min_p": 0.1, "presence_penalty": 1}, {"min_tokens": 4})),
    ],
)
def test_sampling_on_every_route(changes: dict[str, Any], expected: dict[str, Any]):
    for path in ROUTES:
        assert parsed(path, **changes).sampling == Sampling(**{"temperature": 1.0} | expected)


LIMITS = "max_tokens max_completion_tokens max_output_tokens max_new_tokens n_predict num_predict".split()
STOPS = [str(i) for i in range(64)]
PARTS = [{"type": "text", "text": text} for text in "ab"]
FIELDS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [  # path, changes of a body, fields of the request
    *((path, {name: 9.0}, {"max_tokens": 9}) for path in (CHAT, TEXT) for name in LIMITS),
    *((path, {name: -1}, {"max_tokens": None}) for path in (CHAT, TEXT) for name in LIMITS),
    *((CHAT, {"max_tokens": 5, "n_predict": value}, {"max_tokens": 5}) for value in (-1, 9)),
    *((CHAT, {"max_tokens": 5, name: 3}, {"max_tokens": 3}) for name in LIMITS[1:4]),
    (RESPONSES, {"max_output_tokens": 9}, {"max_tokens": 9}),
    (MESSAGES, {"min_tokens": 64}, {"max_tokens": 64}),
    *((path, {"stop_token_ids": [5, 7.0, 5]}, {"stop_tokens": (5, 7)}) for path in ROUTES),
    *((path, {"ignore_eos": True}, {"ignore_eos": True}) for path in ROUTES),
    (CHAT, {"stop": "a"}, {"stop": ("a",)}),
    *((CHAT, {"stop": stops}, {"stop": (*stops,)}) for stops in (STOPS, [])),
    (CHAT, {"n": 3}, {"n": 3}),
    *((CHAT, {"logprobs": True, "top_logprobs": n}, {"top_logprobs": n or 0}) for n in (None, 20)),
    (CHAT, {"logprobs": False, "top_logprobs": 0}, {"top_logprobs": None}),
    *((CHAT, {"prediction": {"type": "content", "content": x}}, {"prediction": "ab"}) for x in ("ab", PARTS)),
    *(
        (TEXT, {"prompt": given}, {"model": "demo", "prompt": RawPrompts(read), "max_tokens": 16})
        for given, read in (
            ("a", ("a",)),
            ("", ("",)),
            (["a", "b"], ("a", "b")),
            ([1, 2], ((1, 2),)),
            ([[1, 2], [3]], ((1, 2), (3,))),
        )
    ),
    (TEXT, {"prompt": "a"}, {"sampling": Sampling(temperature=1.0), "prompt_param": "prompt"}),
    *((path, {"keep_alive": "5m"}, {"keep_alive": 300}) for path in ROUTES),
    *((path, {"include_reasoning": False}, {"shows_thinking": False}) for path in ROUTES),
]


@pytest.mark.parametrize(("path", "changes", "expected"), FIELDS, ids=lambda value: str(value)[:30])
def test_fields_of_a_request(path: str, changes: dict[str, Any], expected: dict[str, Any]):
    request = parsed(path, **changes)
    assert {name: getattr(request, name) for name in expected} == expected


FUNCTION = {"name": "weather", "description": "Rain?", "parameters": {"type": "object"}}
TOOLS: dict[str, dict[str, Any]] = {
    CHAT: {"type": "function", "function": FUNCTION},
    MESSAGES: {"name": "weather", "description": "Rain?", "input_schema": {"type": "object"}},
    RESPONSES: {"type": "function", **FUNCTION},
}
OTHER = {
    CHAT: {"type": "function", "function": {"name": "other"}},
    RESPONSES: {"type": "function", "name": "other"},
}


def allowed(path: str, name: str, mode: str = "auto") -> dict[str, Any]:
    """The choice among some of the tools, as a protocol writes it."""
    function = {"function": {"name": name}} if path == CHAT else {"name": name}
    given = {"mode": mode, "tools": [{"type": "function", **function}]}
    return {"tool_choice": {"type": "allowed_tools", **({"allowed_tools": given} if path == CHAT else given)}}


REQUIRED, NAMED = {"choice": "required"}, {"choice": "required", "named": "weather"}


@pytest.mark.parametrize(
    ("path", "changes", "use"),
    [
        *((path, {}, {}) for path in TOOLS),
        *((path, {"tool_choice": "required"}, REQUIRED) for path in (CHAT, RESPONSES)),
        *((path, {"tool_choice": "none"}, {"choice": "none"}) for path in (CHAT, RESPONSES)),
        *((path, {"parallel_tool_calls": False}, {"parallel": False}) for path in TOOLS),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "weather"}}}, NAMED),
        (RESPONSES, {"tool_choice": {"type": "function", "name": "weather"}}, NAMED),
        *((path, {"tools": [OTHER[path], TOOLS[path]], **allowed(path, "weather")}, {}) for path in OTHER),
        *((path, allowed(path, "weather", "required"), REQUIRED) for path in OTHER),
        (MESSAGES, {"tool_choice": {"type": "any"}}, REQUIRED),
        (MESSAGES, {"tool_choice": {"type": "none"}}, {"choice": "none"}),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "weather"}}, NAMED),
        (MESSAGES, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, {"parallel": False}),
    ],
)
def test_tools_and_their_choice(path: str, changes: dict[str, Any], use: dict[str, Any]):
    found = parsed(path, **{"tools": [TOOLS[path]]} | changes).prompt.tools
    assert found == ToolUse((Tool("weather", "Rain?", {"type": "object"}),), **use)
    assert parsed(path, tools=[]).prompt.tools is None


@pytest.mark.parametrize("path", ROUTES)
def test_harmless_and_neutral_values_are_accepted(path: str):
    values: dict[str, Any] = {name: values[0] for name, values in NEUTRAL.items() if values}
    # Typed or refused by some routes; the tests of those routes have them.
    own = "metadata store stream_options parallel_tool_calls echo best_of context_management background"
    values |= dict.fromkeys(HARMLESS, "anything")
    given = {name: value for name, value in values.items() if name not in own.split()}
    assert parsed(path, **given) == parsed(path)
    assert parsed(path, **dict.fromkeys(NEUTRAL)) == parsed(path)


@pytest.mark.parametrize("path", ROUTES)
def test_fields_mean_the_same_on_every_route(path: str):
    """Refused on one and ignored on the other, or typed here and not there."""
    idle = {"service_tier": "flex", "store": False, "user": "u", "safety_identifier": "s"}
    idle |= {"metadata": {"n": 1, "x": "y"}, "prompt_cache_key": "k", "n": 1.0, "plugins": []}
    for given in (idle, dict.fromkeys(idle.keys() - {"n", "plugins", "store"}, 5)):
        assert parsed(path, **given) == parsed(path)
    assert parsed(path, verbosity="medium") == parsed(path)
    place = place_of(path)
    status, found = place.post(verbosity="low")
    assert status == 200 and found["mlx_spec"]["notes"] == [NO_VERBOSITY]
    assert NO_VERBOSITY in place.endpoint.post(path, verbosity="low", stream=True).text


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        *((path, {"include_reasoning": False}) for path in (CHAT, RESPONSES, MESSAGES, OLLAMA)),
        (CHAT, {"reasoning": {"exclude": True}}),
        (CHAT, {"extra_body": {"include_reasoning": False}}),
    ],
)
def test_thinking_may_be_left_out(path: str, changes: dict[str, Any]):
    for more, shown in (({}, True), (changes, False)):
        for stream in (False, True):
            text = fresh()[1].post(path, **more, stream=stream).text
            assert ("Hm." in text) is shown and "Hel" in text


VARIABLES = {"preserve_thinking": True, "clear_thinking": False}
ALIKE: list[tuple[dict[str, Any], bool, dict[str, Any]]] = [
    ({"reasoning_effort": "high"}, True, {"reasoning_effort": "high"}),
    ({"reasoning_effort": "none"}, False, {"reasoning_effort": "none"}),
    ({"enable_thinking": True}, True, {}),
    ({"enable_thinking": False, "reasoning_effort": "low"}, False, {"reasoning_effort": "low"}),
    ({"chat_template_kwargs": {"enable_thinking": False, "x": 1}}, False, {"x": 1}),
    ({"chat_template_kwargs": VARIABLES | {"enable_thinking": True}}, True, VARIABLES),
]
REASONING: list[tuple[str, dict[str, Any], bool | None, str | None]] = [  # of a protocol, and OpenRouter's
    (CHAT, {}, None, None),  # as the template says
    (CHAT, {"effort": "high"}, True, "high"),
    (CHAT, {"effort": "none"}, False, "none"),
    (CHAT, {"enabled": True, "max_tokens": 900}, True, None),
    (CHAT, {"enabled": False}, False, None),
    (CHAT, {"summary": "auto"}, None, None),
    (RESPONSES, {"effort": "low", "summary": "auto"}, True, "low"),
    (RESPONSES, {"effort": "none"}, False, "none"),
]


@pytest.mark.parametrize(
    ("path", "changes", "thinks", "variables"),
    [
        *((path, *row) for path in (CHAT, RESPONSES, MESSAGES, OLLAMA) for row in ALIKE),
        *(
            (path, {"reasoning": given}, thinks, {"reasoning_effort": effort} if effort else {})
            for path, given, thinks, effort in REASONING
        ),
        (CHAT, {}, None, {}),
        (CHAT, {"reasoning_effort": "minimal"}, False, {"reasoning_effort": "minimal"}),
        (CHAT, {"thinking": {"type": "enabled"}}, True, {}),
    ],
)
def test_thinking_and_variables_of_the_template(path: str, changes: Any, thinks: Any, variables: Any):
    prompt = parsed(path, **changes).prompt
    assert (prompt.thinking, prompt.variables) == (thinks, variables)


@pytest.mark.parametrize("path", ROUTES)
def test_half_a_surrogate_pair_is_the_replacement_character(path: str):
    """JSON.stringify writes it where a text was cut within an emoji, and it stays in the history."""
    for text, read in (
        (r"cut \ud83d", "cut \ufffd"),
        (r"\udf89 \ud83d\ud83c\udf89", "\ufffd \ufffd\U0001f389"),
        (r"a \\ud83d \\\ud83d", "a \\ud83d \\\ufffd"),
        (r"\uD83D\uFB00", "\ufffd\ufb00"),
    ):
        stub, endpoint = fresh()
        body = json.dumps(BODIES[path] | {"user": "U"}).replace('"What does zip do?"', '"x"')
        assert endpoint.client.post(path, content=body.replace('"x"', f'"{text}"')).status_code == 200
        prompt = stub.requests[-1].prompt
        found = prompt.prompts[0] if path == TEXT else prompt.messages[-1]["content"]
        assert found == read
        raw = body.replace('"x"', json.dumps(read).replace(r"\ufffd", "#")).encode()
        assert endpoint.client.post(path, content=raw.replace(b"#", b"\xed\xa0\xbd")).status_code == 200
        assert stub.requests[-1].prompt == prompt


HALF_PIECES = (r"\\", r"\n", r"\"", "a", "u", "é", "d83d", *r"\ud83d \uD83D \ude00 \uDE00 \u0041".split())


def test_halves_are_replaced_as_a_decoder_pairs_them():
    """Python's own decoder keeps halves: what it finds alone is replaced, and nothing else."""
    rng = random.Random(5)
    for _ in range(3000):
        written = '"' + "".join(rng.choices(HALF_PIECES, k=rng.randrange(12))) + '"'
        expected = re.sub("[\ud800-\udfff]", "\ufffd", json.loads(written))
        assert json.loads(replace_halves(written.encode())) == expected, written


def test_a_body_of_escapes_costs_what_one_of_letters_costs():
    def seconds(piece: bytes) -> float:
        body = b'{"messages":[{"role":"user","content":"' + piece * (2**21 // len(piece)) + b'\\ud800"}]}'
        began = time.thread_time()
        replace_halves(body)
        return time.thread_time() - began

    letters = min(seconds(b"aaaaaaaa") for _ in range(3))
    for piece in (rb"\\", rb"\ud800", rb"\ud83d\ude00", rb"\\a"):
        assert min(seconds(piece) for _ in range(3)) < 10 * letters + 0.02, piece


NULLABLE = (
    "temperature top_p top_k seed logit_bias stream tools tool_choice parallel_tool_calls user metadata"
)
NULLABLE_HERE = {
    CHAT: "model stream_options n max_tokens max_completion_tokens stop response_format prediction logprobs"
    " top_logprobs reasoning_effort chat_template_kwargs modalities service_tier verbosity audio functions",
    TEXT: "model echo logprobs best_of suffix max_tokens n stop",
    MESSAGES: "system thinking output_config stop_sequences container mcp_servers service_tier speed",
    RESPONSES: "model instructions max_output_tokens top_logprobs include text reasoning stream_options"
    " truncation background conversation previous_response_id prompt store max_tool_calls service_tier",
}


@pytest.mark.parametrize("path", ROUTES)
def test_null_means_the_default(path: str):
    names = f"{NULLABLE} {NULLABLE_HERE[path]}".split()
    assert parsed(path, **dict.fromkeys(names)) == parsed(path)


def test_editors_send_more():
    """Continue's list of stops for Qwen Coder and Python; what llama.vscode edits with."""
    marks = ("endoftext", "fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep")
    stops = [f"<|{mark}|>" for mark in marks]
    stops += [
        "<|im_start|>",
        "<|im_end|>",
        "\n\n",
        "\r\n\r\n",
        "/src/",
        "#- coding: utf-8",
        "```",
        "def",
        "class",
    ]
    assert parsed(TEXT, stop=stops).stop == tuple(stops)
    assert parsed(MESSAGES, stop_sequences=stops).stop == tuple(stops)
    neutral = {"samplers": "edkypmxt", "max_tokens": -1, "repeat_last_n": 64, "repeat_penalty": 1}
    neutral |= {"typical_p": 1, "dry_base": 1.75, "dry_penalty_last_n": -1, "timings_per_token": False}
    assert parsed(CHAT, **neutral) == parsed(CHAT)


def test_claude_code_and_codex_send_more():
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    thinking = {"type": "enabled", "budget_tokens": 32}
    parsed(MESSAGES, context_management=edits, betas=["x"], thinking=thinking, metadata={"user_id": "u"})
    parsed(MESSAGES, fallbacks="default", workspace_id="w", user_profile_id="p", fallback_credit_token="t")
    parsed(RESPONSES, access_programs={"x": "y"}, background_options={"completion_window": "2h"})
    parsed(RESPONSES, client_metadata={"a": "b"}, store=False, service_tier="auto", prompt_cache_key="k")


def test_unknown_parameters_may_be_allowed(caplog: pytest.LogCaptureFixture):
    stub = Stub()
    endpoint = stubbed(stub, Settings(DEMO, allow_extra_parameters=True))
    for _ in range(2):
        for path in ROUTES:
            response = endpoint.post(path, no_such_parameter="secret")
            (note,) = response.json()["mlx_spec"]["notes"]
            assert response.status_code == 200 and note.startswith("no_such_parameter: ")
    (record,) = caplog.records
    assert "no_such_parameter" in record.getMessage() and "secret" not in record.getMessage()
    assert endpoint.post(CHAT, typical_p=0.5).status_code == 400


def test_fields_that_clients_add_inside_objects_are_no_error():
    message = {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {}}], "id": "m"}
    tool = {"name": "f", "input_schema": {"type": "object"}, "defer_loading": True, "cache_control": {}}
    parsed(CHAT, messages=[message], tools=[{"type": "function", "function": {"name": "f", "x": 1}, "y": 2}])
    parsed(MESSAGES, messages=[message], tools=[tool], system=[{**message["content"][0]}])
