"""Calls as Gemma 4 writes them: <|tool_call>call:name{key:<|"|>text<|"|>,n:1,list:[2,3]}<tool_call|>."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from mlx_spec.apps.server.request import Tool
from mlx_spec.apps.server.tools.source import Arguments, Malformed, Named, Parser, Source, Steps
from mlx_spec.apps.server.tools.values import Values, escaped
from mlx_spec.reading import Marks

MARKS = Marks("<|tool_call>", "<tool_call|>")
QUOTE = '<|"|>'
STRUCTURE = '{}[],:<"'  # no part of a bare key


def parser(tools: Sequence[Tool] = ()) -> Parser:
    """A parser of what stands between the marks; the format types its values itself."""
    source = Source()
    return Parser(source, _Gemma(source).call)


class _Gemma(Values):
    """Keys stand bare, strings between special tokens and without escapes, everything else is JSON."""

    words: ClassVar[Mapping[str, str]] = {**Values.words, "None": "null"}  # as templates write a null

    def call(self) -> Steps[None]:
        """One call."""
        yield from self.source.expect("call:")
        name = yield from self.source.all(lambda c: not c.isspace() and c not in '{}[],<>"')
        yield from self.source.space()
        yield from self.source.expect("{")
        if not name:
            raise Malformed("a call has no name")
        yield Named(name)
        yield from self.members()

    def key(self) -> Steps[str]:
        """Bare, or a string."""
        first = yield from self.source.peek()
        if first and first in '<"':
            return (yield from super().key())
        found = (yield from self.source.all(lambda character: character not in STRUCTURE)).strip()
        yield from self.source.expect(":")
        if not found:
            raise Malformed("a key is empty")
        return f'"{escaped(found)}"'

    def string(self) -> Steps[None]:
        """Between the special tokens; JSON's strings are understood as well."""
        if (yield from self.source.peek()) != "<":
            yield from super().string()
            return
        yield from self.source.expect(QUOTE)
        yield Arguments('"')
        while not (yield from self.source.found(QUOTE)):
            if (yield from self.source.found("<")):
                yield Arguments("<")
                continue
            plain = yield from self.source.run(lambda character: character != "<")
            if not plain:
                raise Malformed("a string has no end")
            yield Arguments(escaped(plain))
        yield Arguments('"')
