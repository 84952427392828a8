"""Answers to the schemas of the benchmarks match them and end, whoever writes them."""

from __future__ import annotations

import json
import random

import pytest
from grammars import END, STOP, compiled, row

jsonschema = pytest.importorskip("jsonschema")
from schema_draws import Draws  # noqa: E402

MOST = 2000  # bytes


@pytest.mark.parametrize("number", range(18))
def test_one_who_goes_on_as_long_as_may_be_comes_to_an_end(number: int) -> None:
    schema, chance = Draws(0).schemas(18)[number], random.Random(number)
    matcher, written = compiled("json_schema", json.dumps(schema)).matcher([]), b""
    while allowed := sorted(row(matcher, list(written)) - {END, STOP}):
        written += bytes([chance.choice(allowed)])
        assert len(written) < MOST
    jsonschema.Draft202012Validator(schema).validate(json.loads(written))


def test_a_seed_draws_the_same_schemas() -> None:
    assert Draws(7).schemas(12) == Draws(7).schemas(12) != Draws(8).schemas(12)
