"""Schemas to test grammars with: a hundred fixed ones, and random ones by a seed.

All texts, lists and numbers have bounds, because a small model writes digits without end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]
TEXT: Schema = {"type": "string", "maxLength": 8}
NAME: Schema = {"type": "string", "pattern": "^[A-Z][a-z]{1,6}$"}
WHOLE: Schema = {"type": "integer", "minimum": 0, "maximum": 99}
YES: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}


def record(**properties: Schema) -> Schema:
    """Return an object with all of these properties and no other."""
    return optional(list(properties), **properties)


def optional(required: Sequence[str], **properties: Schema) -> Schema:
    """Return an object of which some properties may be left out."""
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
WORDS = "name kind size color unit count city user note tag value state level from to".split()
DRAWN_PATTERNS = [
    "^[a-z]{2,6}$",
    "^[A-Z]{2}-[0-9]{3}$",
    "^(north|south)(east|west)?$",
    "^[0-9]{4}-(0[1-9]|1[0-2])$",
    "^#[0-9a-f]{6}$",
    "^[a-z]{1,4}(\\.[a-z]{1,4}){0,2}$",
    "^\\+?[0-9]{3,7}$",
    '^[^"\\\\]{0,5}!$',
]
MAX_DEPTH = 3


class Draws:
    """Random schemas: nested objects and lists, choices, numbers, patterns, unions, references."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(f"schemas {seed}")
        self._defined: list[str] = []  # names that a reference may name

    def schemas(self, count: int) -> list[Schema]:
        """Return `count` schemas, the kinds in turn."""
        kinds = [self._nested, self._choice, self._number, self._pattern, self._union, self._reference]
        return [kinds[i % len(kinds)]() for i in range(count)]

    def _nested(self) -> Schema:
        """Return an object of objects or lists."""
        inner = self._object(1) if self._chance.random() < 0.6 else self._list(1)
        return record(**{self._word(): inner, "more": self._any(2)})

    def _choice(self) -> Schema:
        """Return a choice of a few values of any type."""
        values = [*self._words(2), self._chance.randint(-99, 999), None, True, 1.5, 'say "hi"', ["a", 2]]
        found = one_of(*self._chance.sample(values, self._chance.randint(2, 5)))
        return self._chance.choice([found, record(**{self._word(): found}), several(found, 1, 3)])

    def _number(self) -> Schema:
        """Return one number within bounds, or several."""
        found = {word: self._bounded() for word in self._words(3)}
        return self._chance.choice([self._bounded(), record(**found), several(self._bounded(), 1, 4)])

    def _pattern(self) -> Schema:
        """Return a text by a pattern, alone, in a list or in an object."""
        found = text(self._chance.choice(DRAWN_PATTERNS))
        return self._chance.choice([found, several(found, 1, 2), record(**{self._word(): found})])

    def _union(self) -> Schema:
        """Return a union of a few schemas."""
        found = either(*(self._any(1) for _ in range(self._chance.randint(2, 4))))
        return self._chance.choice([found, record(**{self._word(): found}), several(found, 1, 2)])

    def _reference(self) -> Schema:
        """Return a schema that refers to another one more than once, which may refer to a third."""
        inner = self._any(2)
        self._defined = ["inner"]
        outer = record(**{word: self._any(2) for word in self._words(2)}, it=ref("inner"))
        self._defined = ["inner", "outer"]
        found = record(one=ref("outer"), other=either(ref("inner"), self._any(2)))
        self._defined = []
        return defined(found, inner=inner, outer=outer)

    def _any(self, depth: int) -> Schema:
        """Return any schema that may stand inside `depth` others."""
        flat: list[Callable[[], Schema]] = [self._leaf] * 3
        if self._defined:
            flat.append(lambda: ref(self._chance.choice(self._defined)))
        if depth >= MAX_DEPTH:
            return self._chance.choice(flat)()
        return self._chance.choice([*flat, lambda: self._object(depth + 1), lambda: self._list(depth + 1)])()

    def _object(self, depth: int) -> Schema:
        found = {word: self._any(depth) for word in self._words(self._chance.randint(1, 3))}
        required = [name for name in found if self._chance.random() < 0.7]
        return optional(required, **found)

    def _list(self, depth: int) -> Schema:
        least = self._chance.randint(0, 2)
        return several(self._any(depth), least, least + self._chance.randint(0, 2))

    def _leaf(self) -> Schema:
        chance = self._chance
        return chance.choice(
            [
                {"type": "boolean"},
                {"type": "null"},
                {"type": "string", "maxLength": chance.randint(1, 10)},
                {"type": ["string", "null"], "minLength": 1, "maxLength": 6},
                text(chance.choice(DRAWN_PATTERNS)),
                one_of(*self._words(3)),
                {"const": chance.choice(["fixed", 7, None, False])},
                self._bounded(),
            ]
        )

    def _bounded(self) -> Schema:
        """Return an integer, or a multiple of a quarter: its digits have an end."""
        low = self._chance.randint(-200, 200)
        high = low + self._chance.choice([0, 3, 40, 5000])
        whole: Schema = {"type": "integer", "minimum": low, "maximum": high}
        open_: Schema = {"type": "integer", "exclusiveMinimum": low - 1, "exclusiveMaximum": high + 1}
        tens: Schema = {"type": "integer", "minimum": 10 * low, "maximum": 10 * high, "multipleOf": 10}
        parts: Schema = {"type": "number", "minimum": 0, "maximum": 4, "multipleOf": 0.25}
        return self._chance.choice([whole, open_, tens, parts])

    def _word(self) -> str:
        return self._chance.choice(WORDS)

    def _words(self, count: int) -> list[str]:
        return self._chance.sample(WORDS, count)
