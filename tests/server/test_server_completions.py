"""Text completions: prompts of every form, echo, logprobs."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.endpoint import CLOSED, TEXT, TOKENS, fresh, parsed, refused

from mlx_spec.apps.server.engine.answers import ChoiceEnded, PromptRead, TextDelta
from mlx_spec.apps.server.protocols.openai_completions import logprobs_json
from mlx_spec.apps.server.requests.request import RawPrompts
from mlx_spec.sampling import Sampling
from mlx_spec.types import TokenLogprob


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a", ("a",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ],
)
def test_prompts(given, expected):
    found = parsed(TEXT, prompt=given)
    assert (found.model, found.prompt, found.max_tokens) == ("demo", RawPrompts(expected), 16)
    assert found.sampling == Sampling(temperature=1.0) and found.prompt_param == "prompt"


BAD_PROMPTS: list[Any] = [[], [[]], ["a", 1], [1, "a"], [True], [1.5], {"a": 1}, ["a"] * 17]


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"prompt": None}, "prompt", "missing_required_parameter"),
        *(({"prompt": prompt}, "prompt", "invalid_value") for prompt in BAD_PROMPTS),
        ({"prompt": ["a"] * 9, "n": 2}, "n", "unsupported_value"),
        ({"prompt": "a", "best_of": 2}, "best_of", "unsupported_value"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "invalid_value"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "invalid_value"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"prompt": "a", "echo": 1}, "echo", "invalid_value"),
    ],
)
def test_refusals(body, param, code):
    error = refused(TEXT, **body)
    assert (error["param"], error["code"]) == (param, code)


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


def test_chunks():
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
