"""Answers to the schemas of the benchmarks match them and end, whatever allowed token comes next."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
from grammars import END, STOP, compiled, row

jsonschema = pytest.importorskip("jsonschema")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from schemas import Draws  # noqa: E402

MAX_BYTES = 2000  # of an answer


@pytest.mark.parametrize("number", range(18))
def test_random_answers_match_and_end(number: int) -> None:
    schema, draw = Draws(0).schemas(18)[number], random.Random(number)
    matcher, written = compiled("json_schema", json.dumps(schema)).matcher([]), b""
    while allowed := sorted(row(matcher, list(written)) - {END, STOP}):
        written += bytes([draw.choice(allowed)])
        assert len(written) < MAX_BYTES
    jsonschema.Draft202012Validator(schema).validate(json.loads(written))
