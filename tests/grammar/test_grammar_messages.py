"""Grammars that cannot be used end with one line that says why."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from support.grammars import compiled
from support.refusals import refusal

from mlx_spec.errors import InvalidValue, SpecError
from mlx_spec.grammar import GrammarKind
from mlx_spec.grammar.json_schema import enforceable

Rows = list[tuple[str, Callable[[], object]]]


def of(kind: GrammarKind, source: str) -> Callable[[], object]:
    return lambda: compiled(kind, source)


def schema(**keywords: Any) -> Callable[[], object]:
    return lambda: enforceable(keywords)


def with_v(v: Any, **more: Any) -> Callable[[], object]:
    return schema(type="object", properties={"v": v}, required=["v"], **more)


def dead_end(rest: str) -> Callable[[], object]:
    return lambda: compiled("lark", f'start: "a" {rest}').matcher([]).legal([ord("a")], [])


UNUSABLE: Rows = [
    ("uniqueItems at #", of("json_schema", '{"type": "array", "uniqueItems": true}')),
    ("not at #: no grammar enforces it", of("json_schema", '{"not": {"pattern": "a"}}')),
    ("nothing is fetched", of("json_schema", '{"$ref": "http://example.org/schema"}')),
    ("look-around", of("json_schema", '{"type": "string", "pattern": "(?=a)"}')),
    ("JSON schema cannot be used", of("json_schema", "{bad")),
    ("recursion", of("json_schema", '{"a":' * 3000 + "1" + "}" * 3000)),
    ("characters, the most are", of("json_schema", " " * 100_001)),
    ("unclosed group", of("regex", "(")),
    ("regular expression cannot be used: no text matches it", of("regex", "[a&&b]")),
    ('unknown name: "foo"', of("lark", "start: foo")),
    ("unknown special token", of("lark", "start: <|nope|>")),
    ("cannot be followed: no text matches it", dead_end(r"/[^\s\S]/")),
    ("cannot be followed: no text matches it", dead_end("X\nX: /b+/ & /c+/")),
]
UNMATCHED: Rows = [  # schemas that no text matches
    ("nothing matches it, because of #, which", schema(enum=[])),
    (
        "nothing matches it, because of #/properties/v",
        with_v({"type": "string", "minLength": 3, "maxLength": 2}),
    ),
    (
        "nothing matches it, because of #/required: 'z' is not among",
        schema(type="object", additionalProperties=False, required=["z"]),
    ),
    ("because of #/properties/v, which demands itself without end", with_v({"$ref": "#"})),
    ("'#/$defs/none' is not within this schema", schema(**{"$ref": "#/$defs/none"})),
    ("minimum at #: give a number", schema(type="integer", minimum="1")),
    ("the schema at #/properties/v is not one", with_v(5)),
    ("half a character", schema(const="\ud83d")),
]


@pytest.mark.parametrize(("words", "use"), [*UNUSABLE, *UNMATCHED])
def test_refusals(words: str, use: Callable[[], object]) -> None:
    assert words in refusal(InvalidValue, use)


def test_missing_llguidance_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert "pip install llguidance" in refusal(SpecError, compiled, "regex", "a")
