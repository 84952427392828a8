"""Calls as Qwen3-Coder writes them: tags for the function and for each parameter, values as bare text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_spec.apps.server.request import Tool
from mlx_spec.apps.server.tools.schema import type_of, types
from mlx_spec.apps.server.tools.source import Arguments, Malformed, Named, Parser, Source, Steps
from mlx_spec.apps.server.tools.values import NUMBER, escaped, parsed, written
from mlx_spec.reading import Marks

MARKS = Marks("<tool_call>", "</tool_call>")
WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}  # "True" is what templates write
TYPES = {"true": "boolean", "false": "boolean", "null": "null", "none": "null"}
CLOSE = "</parameter>"


def parser(tools: Sequence[Tool]) -> Parser:
    """A parser of what stands between the marks; the schemas of `tools` say which values are no strings."""
    source = Source()
    return Parser(source, _Coder(source, {tool.name: tool.parameters for tool in tools}).call)


class _Coder:
    def __init__(self, source: Source, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self.source, self._schemas = source, schemas

    def call(self) -> Steps[None]:
        """One call."""
        yield from self.source.expect("<function=")
        name = yield from self._name()
        schema = self._schemas.get(name, {})
        yield Named(name)
        yield Arguments("{")
        yield from self.source.space()
        keys: list[str] = []
        while not (yield from self.source.found("</function>")):
            yield from self.source.expect("<parameter=")
            key = yield from self._name()
            if key in keys:
                raise Malformed(f"{key!r} comes twice")
            yield Arguments(("," if keys else "") + f'"{escaped(key)}":')
            keys.append(key)
            yield from self._value(_allowed(schema, key))
            yield from self.source.space()
        yield Arguments("}")

    def _name(self) -> Steps[str]:
        found = yield from self.source.all(lambda character: character not in "<>")
        yield from self.source.expect(">")
        if not found.strip():
            raise Malformed("a name is empty")
        return found.strip()

    def _value(self, allowed: frozenset[str]) -> Steps[None]:
        """A string is given as it comes; what may be something else is judged when it is complete."""
        if allowed == {"string"}:
            yield Arguments('"')
            yield from self._text(lambda part: Arguments(escaped(part)))
            yield Arguments('"')
            return
        parts: list[str] = []
        yield from self._text(lambda part: parts.append(part))
        yield Arguments(typed("".join(parts), allowed))

    def _text(self, give: Callable[[str], Arguments | None]) -> Steps[None]:
        """The text of a parameter, without the line break that follows the tag and the one that ends it."""
        yield from self.source.found("\n")
        while True:
            if (yield from self.source.found("\n" + CLOSE)) or (yield from self.source.found(CLOSE)):
                return
            plain = yield from self.source.run(lambda character: character not in "\n<")
            for tag in ("\n", "<"):
                if not plain and (yield from self.source.found(tag)):
                    plain = tag
            if not plain:
                raise Malformed("a parameter has no end")
            if (delta := give(plain)) is not None:
                yield delta


def typed(text: str, allowed: frozenset[str]) -> str:
    """`text` as JSON of one of the `allowed` types; as a string where it is of none of them."""
    word = text.strip().lower()
    if TYPES.get(word) in allowed:
        return WORDS[word]
    if allowed & {"number", "integer"} and NUMBER.fullmatch(text.strip()):
        return text.strip()
    try:
        value = parsed(text) if text.lstrip()[:1] in ("{", "[") else None
        fits = value is not None and type_of(value) in allowed
        return written(value) if fits else f'"{escaped(text)}"'
    except Malformed:
        return f'"{escaped(text)}"'


def _allowed(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """A parameter without a type may be an object, a list or else a string; an unknown one is a string."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or key not in properties:
        return frozenset({"string"})
    return types(properties[key], schema) or frozenset({"object", "array", "string"})
