"""Calls as Hermes and Qwen write them: <tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>."""

from __future__ import annotations

import json
from collections.abc import Sequence

from mlx_spec.apps.server.request import Tool
from mlx_spec.apps.server.tools.lark import Rules, json_value, quoted
from mlx_spec.apps.server.tools.source import Arguments, Malformed, Named, Parser, Source, Steps, collected
from mlx_spec.apps.server.tools.values import Values, parsed, written
from mlx_spec.reading import Marks

MARKS = Marks("<tool_call>", "</tool_call>")


def parser(tools: Sequence[Tool] = ()) -> Parser:
    """A parser of what stands between the marks; the format types its values itself."""
    source = Source()
    return Parser(source, _Hermes(source).call)


class _Hermes(Values):
    """One JSON object a call. Arguments that come before the name are kept back until it is known."""

    def call(self) -> Steps[None]:
        """One call."""
        name: str | None = None
        arguments: str | None = None  # kept back, or "" once given
        yield from self.source.expect("{")
        while True:
            yield from self.source.space()
            key = parsed((yield from self.key()))
            yield from self.source.space()
            if key == "name" and name is None:
                name = _name((yield from collected(self.value())))
                yield Named(name)
                yield Arguments(arguments or "")
            elif key == "arguments" and arguments is None:
                arguments = yield from self._arguments(name)
            elif key in ("name", "arguments"):
                raise Malformed(f"{key!r} comes twice")
            else:
                yield from collected(self.value())
            yield from self.source.space()
            if not (yield from self.source.found(",")):
                break
        if name is None:
            raise Malformed("a call has no name")
        yield from self.source.expect("}")
        if arguments is None:
            yield Arguments("{}")

    def _arguments(self, name: str | None) -> Steps[str]:
        """Gives them as they come where the name is known, and returns what is kept back."""
        if name is not None and (yield from self.source.peek()) == "{":
            yield from self.object()
            return ""
        found = _object((yield from collected(self.value())))
        if name is None:
            return found
        yield Arguments(found)
        return ""


def _name(text: str) -> str:
    name = parsed(text)
    if not isinstance(name, str) or not name or not _is_text(name):
        raise Malformed("a name is no string")
    return name


def _is_text(name: str) -> bool:
    """Whether it holds no half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _object(text: str) -> str:
    """Arguments as an object, perhaps written into a string once more, or null."""
    value = parsed(text)
    value = parsed(value) if isinstance(value, str) else value
    if not isinstance(value, dict | None):
        raise Malformed("the arguments are no object")
    return text if text.startswith("{") else written(value or {})


def grammar(tool: Tool, rules: Rules) -> str:
    """What stands between the marks of a call of `tool`, with the spaces that the template writes."""
    nothing = {} if tool.parameters else {"properties": {}, "additionalProperties": False}
    schema = {"type": "object", **nothing, **tool.parameters}
    arguments = rules.add("arguments", json_value(schema, lenient=not tool.strict))
    head = '\n{"name": ' + json.dumps(tool.name, ensure_ascii=False) + ', "arguments": '
    return f'{quoted(head)} {arguments} "}}\\n"'
