"""Bodies: half surrogate pairs, and what reading a large one costs."""

from __future__ import annotations

import json
import random
import re
import time

from support import served
from support.endpoint import CHAT, error_of, fresh

from mlx_spec.apps.server.requests.parsing import replace_halves

HALF_PIECES = (
    r"\\",
    r"\n",
    r"\"",
    "a",
    "u",
    "d83d",
    r"\ud83d",
    r"\uD83D",
    r"\ude00",
    r"\uDE00",
    r"\u0041",
    "é",
)


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


def test_a_text_beyond_the_limit_is_refused():
    """Pictures alone may be larger: base64 holds no text."""
    text = "a b " * (2**21 + 1)
    response = fresh()[1].client.post(CHAT, json={"messages": [{"role": "user", "content": text}]})
    failure = error_of(response, 413)
    assert failure["code"] == "body_too_large" and failure["param"] == "messages"


def test_a_prompt_that_no_context_holds_is_refused_before_it_is_tokenized():
    """Words of the error as for other long prompts: coding agents look for them."""
    with served.working() as engine:
        text = "x" * 1_000_000
        for request in (served.chat(text), served.raw(text)):
            failure = served.failure(served.answer(engine, request))
            assert (failure.status, failure.code) == (400, "context_length_exceeded")
            assert failure.message.startswith("the prompt is too long: at least ")
