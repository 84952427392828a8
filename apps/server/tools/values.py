"""JSON as it arrives, checked, without white space between its tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from mlx_spec.apps.server.tools.source import Arguments, Malformed, Source, Steps, collected

MAX_DEPTH = 64  # of lists and objects in each other
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")  # RFC 8259
ESCAPES = '"\\/bfnrt'


def escaped(text: str) -> str:
    """`text` as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def parsed(text: str) -> Any:
    """The value of a JSON text. Raises Malformed for anything else, and for numbers beyond all use."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise Malformed("no JSON") from error


def written(value: Any) -> str:
    """`value` as JSON that can be encoded: half a surrogate pair stays an escape."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    except RecursionError as error:
        raise Malformed("too many lists and objects in each other") from error
    return text


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


class Values:
    """Reads JSON values from a source and gives their text. A subclass may have other strings and keys."""

    words: ClassVar[Mapping[str, str]] = {"true": "true", "false": "false", "null": "null"}

    def __init__(self, source: Source) -> None:
        self.source = source

    def value(self, depth: int = 0) -> Steps[None]:
        """Any value."""
        if depth > MAX_DEPTH:
            raise Malformed("too many lists and objects in each other")
        first = yield from self.source.peek()
        if first == "{":
            yield from self.object(depth)
        elif first == "[":
            yield from self._array(depth)
        elif first.isalpha():
            yield from self._word()
        elif first and first in "-0123456789":
            yield from self._number()
        else:
            yield from self.string()

    def object(self, depth: int = 0) -> Steps[None]:
        """An object."""
        yield from self.source.expect("{")
        yield from self.members(depth)

    def members(self, depth: int = 0) -> Steps[None]:
        """An object whose opening brace has been read."""
        yield Arguments("{")
        yield from self.source.space()
        if (yield from self.source.found("}")):
            yield Arguments("}")
            return
        while True:
            yield from self.source.space()
            key = yield from self.key()
            yield Arguments(key + ":")
            yield from self.source.space()
            yield from self.value(depth + 1)
            yield from self.source.space()
            if not (yield from self.source.found(",")):
                break
            yield Arguments(",")
        yield from self.source.expect("}")
        yield Arguments("}")

    def key(self) -> Steps[str]:
        """A key and the colon behind it; the key as JSON."""
        found = yield from collected(self.string())
        yield from self.source.space()
        yield from self.source.expect(":")
        return found

    def string(self) -> Steps[None]:
        """A string. Control characters, which JSON forbids and models write, are escaped."""
        yield from self.source.expect('"')
        yield Arguments('"')
        while not (yield from self.source.found('"')):
            if (yield from self.source.found("\\")):
                yield from self._escape()
                continue
            plain = yield from self.source.run(lambda character: character not in '"\\')
            if not plain:
                raise Malformed("a string has no end")
            yield Arguments(escaped(plain))
        yield Arguments('"')

    def _escape(self) -> Steps[None]:
        kind = yield from self.source.peek()
        if not kind or kind not in ESCAPES + "u":
            raise Malformed("a backslash must be followed by one of " + ESCAPES + "u")
        yield from self.source.expect(kind)
        digits = ""
        while kind == "u" and len(digits) < 4:
            digit = yield from self.source.peek()
            if not digit or digit not in "0123456789abcdefABCDEF":
                raise Malformed("\\u must be followed by four hexadecimal digits")
            yield from self.source.expect(digit)
            digits += digit
        yield Arguments("\\" + kind + digits)

    def _array(self, depth: int) -> Steps[None]:
        yield from self.source.expect("[")
        yield Arguments("[")
        yield from self.source.space()
        if (yield from self.source.found("]")):
            yield Arguments("]")
            return
        while True:
            yield from self.source.space()
            yield from self.value(depth + 1)
            yield from self.source.space()
            if not (yield from self.source.found(",")):
                break
            yield Arguments(",")
        yield from self.source.expect("]")
        yield Arguments("]")

    def _word(self) -> Steps[None]:
        found = yield from self.source.all(str.isalnum)
        if found not in self.words:
            raise Malformed(f"{found!r} is no value")
        yield Arguments(self.words[found])

    def _number(self) -> Steps[None]:
        found = yield from self.source.all(lambda character: character.isalnum() or character in "+-.")
        if not NUMBER.fullmatch(found):
            raise Malformed(f"{found!r} is no number")
        yield Arguments(found)
