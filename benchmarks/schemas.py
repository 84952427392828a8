"""A hundred JSON schemas with short answers: objects, numbers, texts, choices, lists, unions, references.

Nothing in them is without end: a small model writes digits and letters for as long as it may.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]

TEXT: Schema = {"type": "string", "maxLength": 8}
NAME: Schema = {"type": "string", "pattern": "^[A-Z][a-z]{1,6}$"}
WHOLE: Schema = {"type": "integer", "minimum": 0, "maximum": 99}
YES: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}


def record(**properties: Schema) -> Schema:
    """An object with all of these properties and no other."""
    return optional(list(properties), **properties)


def optional(required: Sequence[str], **properties: Schema) -> Schema:
    """An object of which some properties may be left out."""
    shape = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**shape, "required": list(required)}


def several(items: Schema, least: int, most: int) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def one_of(*values: object) -> Schema:
    return {"enum": list(values)}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def text(pattern: str) -> Schema:
    return {"type": "string", "pattern": pattern}


def ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def defined(schema: Schema, **definitions: Schema) -> Schema:
    return {**schema, "$defs": definitions}


INTEGERS = [
    {"type": "integer", "minimum": low, "maximum": high}
    for low, high in [(0, 9), (-5, 5), (10, 12), (100, 2000), (-900, -30), (7, 7), (0, 1), (999, 1001)]
]
BOUNDED = [
    {"type": "integer", "exclusiveMinimum": 0, "maximum": 12},
    {"type": "integer", "minimum": 5, "exclusiveMaximum": 8},
    {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
    {"type": "number", "minimum": -2.5, "maximum": 2.5, "multipleOf": 0.5},
    {"type": "integer", "minimum": 0, "maximum": 60, "multipleOf": 5},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5, "multipleOf": 0.125},
]
PATTERNS = [
    text(pattern)
    for pattern in (
        "^[a-z]{3}$",
        "^[A-Z]{2}-[0-9]{4}$",
        "^(yes|no|maybe)$",
        "^#[0-9a-f]{6}$",
        "^[0-9]{3}-[0-9]{2}$",
        "^v[0-9]{1,2}\\.[0-9]{1,3}$",
        "^a{1,4}b{2}c?$",
        "^[^x]{1,4}$",
    )
]
FORMATS = [
    {"type": "string", "format": kind, "maxLength": most}
    for kind, most in (
        ("date", 10),
        ("time", 9),
        ("date-time", 20),
        ("uuid", 36),
        ("ipv4", 15),
        ("email", 12),
    )
]
LENGTHS = [
    {"type": "string", "minLength": low, "maxLength": high} for low, high in [(0, 3), (1, 1), (4, 6), (2, 9)]
]
CHOICES = [
    one_of("red", "green", "blue"),
    one_of("a", "ab", "abc"),
    one_of(1, 2, 3, 30),
    one_of("1", 1, None, True),
    one_of("north east", "north west", "south"),
    {"const": "fixed text"},
    {"const": {"version": 2, "kind": ["a", "b"]}},
    {"type": "string", "enum": ['say "hi"', "back\\slash", "tab\t"]},
]
SCALARS = [YES, NULL, WHOLE, TEXT, NAME, {"type": ["string", "null"], "maxLength": 5}]
OBJECTS = [
    record(name=NAME),
    record(name=NAME, age=WHOLE),
    record(name=NAME, age=WHOLE, admin=YES),
    record(x=WHOLE, y=WHOLE, z=WHOLE),
    record(id=WHOLE, tag=one_of("new", "old"), note=TEXT),
    record(first_name=NAME, last_name=NAME, email=text("^[a-z]{2,5}@[a-z]{2,5}\\.com$")),
    record(temperature=BOUNDED[3], unit=one_of("celsius", "fahrenheit")),
    record(ok=YES, error=either(NULL, TEXT)),
    optional(["a"], a=WHOLE, b=WHOLE),
    optional([], a=YES, b=YES, c=YES),
    optional(["last"], first=TEXT, last=TEXT),
    {"type": "object", "additionalProperties": WHOLE, "maxProperties": 2},
    record(**{"with space": YES, 'quo"te': NULL, "ünï": one_of(1)}),
    record(function_name=one_of("search", "open"), function_arguments=record(query=TEXT)),
]
NESTED = [
    record(user=record(name=NAME, born=record(year=INTEGERS[3]))),
    record(a=record(b=record(c=record(d=YES)))),
    record(point=record(x=WHOLE, y=WHOLE), color=CHOICES[0]),
    record(from_=record(city=NAME), to=record(city=NAME), seats=INTEGERS[0]),
    record(items=several(record(sku=PATTERNS[1], count=INTEGERS[0]), 1, 2)),
    record(matrix=several(several(INTEGERS[0], 2, 2), 2, 2)),
    record(meta=record(tags=several(CHOICES[0], 1, 2), draft=YES), title=TEXT),
    several(record(k=one_of("x", "y"), v=YES), 1, 2),
]
LISTS = [
    several(WHOLE, 1, 3),
    several(WHOLE, 3, 3),
    several(CHOICES[0], 2, 4),
    several(YES, 0, 2),
    several(NAME, 1, 2),
    several(TEXT, 2, 2),
    several(either(WHOLE, NULL), 2, 3),
    {"type": "array", "prefixItems": [WHOLE, YES], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [CHOICES[0]], "items": WHOLE, "minItems": 2, "maxItems": 3},
    several({"const": 0}, 4, 4),
]
UNIONS = [
    either(WHOLE, NAME),
    either(NULL, record(value=WHOLE)),
    either(record(kind={"const": "circle"}, radius=WHOLE), record(kind={"const": "box"}, side=WHOLE)),
    either(several(WHOLE, 1, 2), YES),
    record(result=either(WHOLE, TEXT, NULL)),
    record(shape=either(record(r=WHOLE), record(w=WHOLE, h=WHOLE))),
    either({"const": "a"}, {"const": "b"}, INTEGERS[0]),
    {"type": ["integer", "boolean", "null"], "minimum": 0, "maximum": 20},
    {"allOf": [record(a=WHOLE), {"required": ["a"]}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 6}]},
]
REFERENCES = [
    defined(record(a=ref("n"), b=ref("n")), n=WHOLE),
    defined(record(point=ref("point")), point=record(x=WHOLE, y=WHOLE)),
    defined(several(ref("color"), 1, 2), color=CHOICES[0]),
    defined(ref("person"), person=record(name=NAME, friend=either(NULL, NAME))),
    defined(either(ref("a"), ref("b")), a=record(a=YES), b=record(b=YES)),
    defined(record(outer=ref("outer")), outer=record(inner=ref("inner")), inner=record(n=WHOLE)),
    {"definitions": {"n": WHOLE}, **record(n={"$ref": "#/definitions/n"})},
    {**record(a=WHOLE, b={"$ref": "#/properties/a"})},
]
SCHEMAS: list[Schema] = [
    *INTEGERS,
    *BOUNDED,
    *PATTERNS,
    *FORMATS,
    *LENGTHS,
    *CHOICES,
    *SCALARS,
    *OBJECTS,
    *NESTED,
    *LISTS,
    *UNIONS,
    *REFERENCES,
    record(empty={"type": "object", "properties": {}, "additionalProperties": False}),
    {
        "type": "object",
        "patternProperties": {"^x[0-9]$": YES},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Titled", **record(a=WHOLE)},
    record(description={"type": "string", "description": "what it does", "maxLength": 12}),
]
