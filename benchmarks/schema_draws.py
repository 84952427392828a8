"""Random JSON schemas: nested objects and lists, choices, numbers, patterns, unions, references.

Texts, lists and numbers have bounds: an answer ends, however a small model goes on.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from schemas import Schema, defined, either, one_of, optional, record, ref, several, text

WORDS = "name kind size color unit count city user note tag value state level from to".split()
PATTERNS = [
    "^[a-z]{2,6}$",
    "^[A-Z]{2}-[0-9]{3}$",
    "^(north|south)(east|west)?$",
    "^[0-9]{4}-(0[1-9]|1[0-2])$",
    "^#[0-9a-f]{6}$",
    "^[a-z]{1,4}(\\.[a-z]{1,4}){0,2}$",
    "^\\+?[0-9]{3,7}$",
    '^[^"\\\\]{0,5}!$',
]
DEEPEST = 3


class Draws:
    """Schemas by a seed."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(f"schemas {seed}")
        self._defined: list[str] = []  # names that a reference may name

    def schemas(self, count: int) -> list[Schema]:
        """So many, the kinds in turn."""
        kinds = [self._nested, self._choice, self._number, self._pattern, self._union, self._reference]
        return [kinds[i % len(kinds)]() for i in range(count)]

    def _nested(self) -> Schema:
        """An object of objects or lists."""
        inner = self._object(1) if self._chance.random() < 0.6 else self._list(1)
        return record(**{self._word(): inner, "more": self._any(2)})

    def _choice(self) -> Schema:
        """A few values of any type, by themselves or in an object."""
        values = [*self._words(2), self._chance.randint(-99, 999), None, True, 1.5, 'say "hi"', ["a", 2]]
        found = one_of(*self._chance.sample(values, self._chance.randint(2, 5)))
        return self._chance.choice([found, record(**{self._word(): found}), several(found, 1, 3)])

    def _number(self) -> Schema:
        """Numbers within bounds, by themselves or several."""
        found = {word: self._bounded() for word in self._words(3)}
        return self._chance.choice([self._bounded(), record(**found), several(self._bounded(), 1, 4)])

    def _pattern(self) -> Schema:
        """A text by a pattern, in a list or an object, or alone."""
        found = text(self._chance.choice(PATTERNS))
        return self._chance.choice([found, several(found, 1, 2), record(**{self._word(): found})])

    def _union(self) -> Schema:
        """One of several schemas."""
        found = either(*(self._any(1) for _ in range(self._chance.randint(2, 4))))
        return self._chance.choice([found, record(**{self._word(): found}), several(found, 1, 2)])

    def _reference(self) -> Schema:
        """A schema that names another one twice or more, which may name a third."""
        inner = self._any(2)
        self._defined = ["inner"]
        outer = record(**{word: self._any(2) for word in self._words(2)}, it=ref("inner"))
        self._defined = ["inner", "outer"]
        found = record(one=ref("outer"), other=either(ref("inner"), self._any(2)))
        self._defined = []
        return defined(found, inner=inner, outer=outer)

    def _any(self, depth: int) -> Schema:
        """Any schema; `depth` levels are around it."""
        flat: list[Callable[[], Schema]] = [self._leaf] * 3
        if self._defined:
            flat.append(lambda: ref(self._chance.choice(self._defined)))
        if depth >= DEEPEST:
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
                text(chance.choice(PATTERNS)),
                one_of(*self._words(3)),
                {"const": chance.choice(["fixed", 7, None, False])},
                self._bounded(),
            ]
        )

    def _bounded(self) -> Schema:
        """An integer, or a multiple of a power of two: its digits have an end."""
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
