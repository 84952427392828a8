"""Schemas of any draft and generator are enforced exactly, or what they demand in vain is named."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from support.grammars import END, STOP, compiled, row

from mlx_spec.errors import InvalidValue
from mlx_spec.grammar import Matcher
from mlx_spec.grammar.json_schema import enforceable
from mlx_spec.grammar.patterns import PatternChecker, translated

ENDS = {END, STOP}
WALKS = 5  # random answers to each schema
TEXT, WHOLE, FEW = {"type": "string"}, {"type": "integer"}, {"enum": ["a", "b"]}


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def closed(**properties: Any) -> dict[str, Any]:
    return {**of(**properties), "additionalProperties": False}


def walk(matcher: Matcher, draw: random.Random) -> bytes:
    """A random answer that ends soon. Some of it is drafted, and taken back."""
    written: list[int] = []
    while allowed := sorted(row(matcher, written) - ENDS):
        if written and row(matcher, written) & ENDS and draw.random() < 0.3:
            break
        short = (
            [token for token in allowed if token in b'"}],:09'] if draw.random() < len(written) / 60 else []
        )
        plain = [token for token in allowed if 32 <= token < 127]
        token = draw.choice(short or plain or allowed)
        if draw.random() < 0.1:
            matcher.allowed(written, [token, draw.choice(allowed), draw.randrange(256)], 4)
        written.append(token)
        assert len(written) < 1000, bytes(written)
    return bytes(written)


def accepts(schema: Any, value: Any) -> bool:
    text = json.dumps(value, ensure_ascii=False).encode()
    return compiled("json_schema", json.dumps(schema)).matcher([]).legal([], [*text, END]) == len(text) + 1


# --- schemas, and values that match them, then values that do not
ENFORCED: dict[str, tuple[Any, list[Any], list[Any]]] = {
    # annotations
    "formats": (of(v={**TEXT, "format": "password"}), [{"v": ""}], []),
    "a format that no text has": (
        of(v={"type": "string", "pattern": "^a$", "format": "uuid"}),
        [{"v": "a"}],
        [],
    ),
    "no unique items": ({"type": "array", "items": WHOLE, "uniqueItems": False}, [[1, 1]], []),
    "at most one item": ({"type": "array", "maxItems": 1, "uniqueItems": True}, [[1]], [[1, 2]]),
    "unknown keywords": (
        {
            **of(v=WHOLE),
            "x-order": 1,
            "discriminator": {"propertyName": "v"},
            "deprecated": True,
            "example": {},
        },
        [{"v": 1}],
        [{"v": "x"}],
    ),
    "x-guidance is an annotation": ({"x-guidance": {"lenient": True}, "const": 1}, [1], [2]),
    "required as in draft 3": ({"type": "object", "properties": {"v": {**TEXT, "required": True}}}, [{}], []),
    # drafts
    "draft 4 bounds": (
        {"type": "integer", "minimum": 0, "exclusiveMinimum": True, "maximum": 3, "exclusiveMaximum": False},
        [1, 3],
        [0, 4],
    ),
    "draft 4 without bounds": ({"type": "integer", "exclusiveMinimum": True}, [-5], []),
    "draft 7 siblings": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            **of(v={"$ref": "#/definitions/n", "maximum": 1}),
            "definitions": {"n": WHOLE},
        },
        [{"v": 5}],
        [{"v": "x"}],
    ),
    "tuples as lists": (
        {"type": "array", "items": [WHOLE, TEXT], "additionalItems": False, "minItems": 2},
        [[1, "a"]],
        [["a", 1], [1, "a", 2]],
    ),
    "nullable": (
        of(v={"type": "string", "nullable": True, "enum": ["a", None]}),
        [{"v": None}],
        [{"v": "b"}],
    ),
    "upper case": ({"type": "OBJECT", "properties": {"v": {"type": "STRING"}}}, [{"v": ""}], [{"v": 1}]),
    # references
    "an anchor": ({"$ref": "#n", "$defs": {"x": {"$anchor": "n", **WHOLE}}}, [1], ["x"]),
    "an id": ({"$id": "https://a.example/s", "$ref": "n", "$defs": {"x": {"$id": "n", **WHOLE}}}, [1], ["x"]),
    "components": (
        {"$ref": "#/components/schemas/a~1b%20c", "components": {"schemas": {"a/b c": FEW}}},
        ["a"],
        [1],
    ),
    "into a list": ({"anyOf": [WHOLE, of(v={"$ref": "#/anyOf/0"})]}, [{"v": 1}], [{"v": "x"}]),
    "dynamic": (
        {"$dynamicAnchor": "t", "type": "array", "items": {"$dynamicRef": "#t"}, "maxItems": 1},
        [[[]]],
        [[1]],
    ),
    "endless where it may be left out": (
        {
            "type": "object",
            "properties": {"v": {"$ref": "#/$defs/e"}},
            "$defs": {"e": of(v={"$ref": "#/$defs/e"})},
        },
        [{}],
        [{"v": {}}],
    ),
    # logic
    "not nothing": ({"anyOf": [{"not": {}}, WHOLE]}, [1], ["x"]),
    "not a type": ({"not": {"type": ["string", "null"]}}, [1, {}], ["x", None]),
    "not a value": ({**FEW, "not": {"const": "a"}}, ["b"], ["a"]),
    "not a property": (
        {**closed(v=WHOLE), "properties": {"v": WHOLE, "w": WHOLE}, "not": {"required": ["w"]}},
        [{"v": 1}],
        [{"v": 1, "w": 1}],
    ),
    "if": (
        {
            "type": "object",
            "properties": {"k": FEW, "v": WHOLE},
            "required": ["k"],
            "additionalProperties": False,
            "if": {"properties": {"k": {"const": "a"}}},
            "then": {"required": ["v"]},
            "else": {"properties": {"v": False}},
        },
        [{"k": "a", "v": 1}, {"k": "b"}],
        [{"k": "a"}, {"k": "b", "v": 1}],
    ),
    "dependent": (
        {**closed(), "properties": {"a": WHOLE, "b": WHOLE}, "dependentRequired": {"a": ["b"]}},
        [{}, {"b": 1}, {"a": 1, "b": 1}],
        [{"a": 1}],
    ),
    "dependencies": (
        {
            **closed(),
            "properties": {"a": WHOLE, "b": TEXT},
            "dependencies": {"a": {"properties": {"b": FEW}}},
        },
        [{"b": "x"}, {"a": 1, "b": "a"}],
        [{"a": 1, "b": "x"}],
    ),
    "one by a constant": (
        {
            "oneOf": [closed(k={"const": "a"}, v=WHOLE), {"$ref": "#/$defs/b"}],
            "$defs": {"b": closed(k={"const": "b"})},
        },
        [{"k": "a", "v": 1}, {"k": "b"}],
        [{"k": "a"}],
    ),
    "exactly one of two": (
        {
            **closed(),
            "properties": {"a": {"const": 1}, "b": {"const": 1}},
            "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    "unevaluated": (
        {
            "allOf": [of(a=WHOLE), {"$ref": "#/$defs/b"}],
            "unevaluatedProperties": False,
            "$defs": {"b": of(b=WHOLE)},
        },
        [{"a": 1, "b": 1}],
        [{"a": 1, "b": 1, "c": 1}],
    ),
    # objects
    "a pattern of a listed key": (
        {**closed(score=WHOLE, tags=TEXT), "patternProperties": {"^score$": {"maximum": 9}}},
        [{"score": 5, "tags": ""}],
        [{"score": 10, "tags": ""}],
    ),
    "patterns of listed keys": (
        {
            **closed(a=WHOLE),
            "properties": {"a": WHOLE, "b": WHOLE},
            "patternProperties": {"^(a|b)$": {"minimum": 3}},
        },
        [{"a": 3}, {"a": 3, "b": 4}],
        [{"a": 2}, {"a": 3, "b": 2}],
    ),
    "patterns that match the same": (
        {
            "type": "object",
            "patternProperties": {"^a[a-z]$": WHOLE, "^[a-z]z$": WHOLE},
            "additionalProperties": False,
        },
        [{"az": 1, "bz": 2}],
        [{"b": 1}],
    ),
    "patterns and another type": (
        {"patternProperties": {"^x": WHOLE}},
        [{"x": 1, "y": "z"}, 5],
        [{"x": "y"}],
    ),
    "names of a list": (
        {"type": "object", "propertyNames": FEW, "additionalProperties": WHOLE},
        [{}, {"a": 1}, {"a": 1, "b": 2}],
        [{"c": 1}],
    ),
    "names of a list and patterns": (
        {
            "type": "object",
            "properties": {"a": TEXT, "c": TEXT},
            "patternProperties": {"^(a|b)$": {"maxLength": 1}},
            "propertyNames": FEW,
        },
        [{"a": "x", "b": "y"}, {"b": 1}],
        [{"a": "xx"}, {"c": ""}],
    ),
    "names of a pattern": (
        {
            "type": "object",
            "propertyNames": {"type": "string", "pattern": "^x"},
            "additionalProperties": WHOLE,
        },
        [{"xy": 1}],
        [{"y": 1}],
    ),
    "names of a length": ({"type": "object", "propertyNames": {"maxLength": 2}}, [{"ab": 1}], [{"abc": 1}]),
    "a key written in another way": (
        {"type": "object", "properties": {"a": WHOLE}, "additionalProperties": TEXT},
        [{"a": 1, "b": "x"}],
        [{"a": "x"}],
    ),
    "some property": ({"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    "implied counts": ({**closed(a=WHOLE), "minProperties": 1, "maxProperties": 5}, [{"a": 1}], []),
    "no further property": (
        {"type": "object", "properties": {"a": WHOLE, "b": WHOLE}, "required": ["a"], "maxProperties": 1},
        [{"a": 1}],
        [{"a": 1, "b": 1}],
    ),
    "a required name that is not listed": ({"type": "object", "required": ["z"]}, [{"z": 1}], [{}]),
    # numbers
    "a bound next to another": ({"type": "number", "exclusiveMinimum": 1, "maximum": 1.1}, [1.05], [1, 1.0]),
    "a bound below zero": ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, [-0.25], [0]),
    "64 bits": ({"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1}, [2**62, -(2**62)], [2**64]),
    "32 bits of a float": ({"type": "number", "minimum": -3.4e38, "maximum": 3.4e38}, [1.5, -2], []),
    "rounded bounds": ({"type": "integer", "minimum": 2**53, "maximum": 2**53 + 3}, [2**53 + 2], [2**53 + 4]),
    # texts
    "a leading look-ahead": (
        {"type": "string", "pattern": "^(?=.*[0-9])[a-z0-9]{2,4}$"},
        ["a1"],
        ["ab", "a"],
    ),
    "brackets of JavaScript": ({"type": "string", "pattern": "^[[&&]{a}\\/$"}, ["[{a}/", "&{a}/"], ["a{a}/"]),
    "classes": ({"type": "string", "pattern": "^\\p{Lu}\\d\\w$"}, ["Ä1_"], ["ä1_", "Ä1ä"]),
}


@pytest.mark.parametrize("name", ENFORCED)
def test_values_are_allowed_if_they_match(name: str) -> None:
    schema, right, wrong = ENFORCED[name]
    assert [accepts(schema, value) for value in (*right, *wrong)] == [True] * len(right) + [False] * len(
        wrong
    )


# Python's validator does not know these forms.
UNJUDGED = {
    *("draft 4 bounds", "draft 4 without bounds", "tuples as lists", "nullable", "upper case", "classes"),
    "brackets of JavaScript",
}


@pytest.mark.parametrize("name", sorted(ENFORCED.keys() - UNJUDGED))
def test_random_answers_match(name: str) -> None:
    schema = ENFORCED[name][0]
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    grammar = compiled("json_schema", json.dumps(schema))
    for number in range(WALKS):
        validator.validate(json.loads(walk(grammar.matcher([]), random.Random(f"{name} {number}"))))


@pytest.mark.parametrize(
    ("schema", "keyword", "place", "left"),
    [
        (of(v={"type": "array", "uniqueItems": True}), "uniqueItems", "#/properties/v", {"v": [1, 1]}),
        ({"type": "array", "contains": WHOLE}, "contains", "#", []),
        ({"type": "string", "pattern": "^a(?!b)", "maxLength": 3}, "pattern", "#", "ab"),
        ({"type": "string", "pattern": "\\bx"}, "pattern", "#", "a"),
        ({"const": 2**53 + 1}, "const", "#", 1),
        ({"anyOf": [{"$ref": "https://a.example/b"}]}, "$ref", "#/anyOf/0", 1),
        ({"oneOf": [WHOLE, {"type": "number"}]}, "oneOf", "#", 1),
        ({"oneOf": [{"enum": [2.5, ""]}, {"type": "string", "maxLength": 0}]}, "oneOf", "#", ""),
        ({"type": "string", "not": {"pattern": "a"}}, "not", "#", "a"),
        ({"type": "object", "minProperties": 2}, "minProperties", "#", {"a": 1}),
        (
            {"type": "object", "patternProperties": {"^a": WHOLE, "b": TEXT}},
            "patternProperties",
            "#",
            {"ab": 1},
        ),
    ],
)
def test_what_no_grammar_enforces_is_named_and_the_rest_holds(
    schema: Any, keyword: str, place: str, left: Any
) -> None:
    found, unenforced = enforceable(schema)
    assert [(each.keyword, each.pointer) for each in unenforced] == [(keyword, place)]
    assert accepts(found, left)
    with pytest.raises(InvalidValue, match=f"{keyword.replace('$', '.')} at {place}: .*: leave it out"):
        compiled("json_schema", json.dumps(schema))
    again, nothing = enforceable(found)
    assert not nothing and again == found


def test_a_schema_that_is_enforced_stays_the_same() -> None:
    for schema, _, _ in ENFORCED.values():
        found, _ = enforceable(schema, closed=True)
        assert enforceable(found, closed=True)[0] == found


def test_patterns_of_javascript() -> None:
    assert translated("^(?=a)(?=.b)[^]$") == ["^(?:a)", "^(?:.b)", r"^[\s\S]$"]
    assert translated(r"^(?=a)b|c") == [r"^(?=a)b|c"]
    assert translated(r"\cA\ud83d\ude00\<{a{2}") == [r"\x01\u{1f600}<\{a{2}"]
    assert translated(r"^P(?!.*W)\d+D$", "duration") == [r"^P\d+D$"]


def test_patterns_that_take_too_long_are_refused() -> None:
    checker, parts = PatternChecker(0.3), [{"pattern": f".*a.{{{n}}}b"} for n in range(1, 30)]
    assert checker.problem({"pattern": "a"}) is None
    with pytest.raises(InvalidValue, match=r"patterns of the JSON schema take more than 0\.3 s to compile"):
        checker.problem({"allOf": parts})
