"""Describe a syntax of tool calls, and build pieces of the Lark grammars that force calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlx_spec.grammar.sandbox import JSON_FORM
from mlx_spec.tokenizer.thinking import Markers

from ..requests.request import Tool


class WrittenCall(NamedTuple):
    """A call as an answer has it."""

    name: str
    arguments: str  # JSON text of an object
    id: str | None = None  # as the model wrote it


def read_call(name: str, arguments: Mapping[str, Any], id: str | None = None) -> WrittenCall:
    """Return a call. Raises ValueError for arguments that JSON cannot hold."""
    return WrittenCall(name, to_json(arguments), id)


Calls = list[WrittenCall]
ReadCalls = Callable[[str, int, Sequence[Tool]], tuple[Calls, int]]  # body, start -> calls, end


@dataclass(frozen=True)
class Syntax:
    """The syntax of calls between two markers. `read` raises ValueError or RecursionError for other text."""

    name: str
    markers: Markers
    read: ReadCalls
    # Returns a grammar expression of a call without its markers. If it is None, no call can be forced.
    write: Callable[[Tool, Rules], str] | None = None
    separator: str = ""  # between two calls: of one body, or each in its markers
    together: bool = False  # one pair of markers is around all calls
    is_json: bool = True  # the arguments are JSON, in which a grammar can enforce several schemas for a value
    needs_close: bool = False  # a body without its closing marker may be half a call that `read` accepts

    def parse(self, body: str, tools: Sequence[Tool], *, closed: bool = True) -> tuple[Calls, str]:
        """Return the calls of a body, and the text after the last one."""
        calls: Calls = []
        end = 0
        while (start := self._next(body, end)) < len(body) and (closed or not self.needs_close):
            try:
                more, end_of_more = self.read(body, start, tools)
            except (ValueError, RecursionError):
                return calls, body[end:]
            calls, end = calls + more, end_of_more
        return calls, "" if start == len(body) else body[end:]

    def _next(self, body: str, end: int) -> int:
        """Return where the next call begins after one that ends at `end`; 0 is the end of none."""
        start, separator = skip_space(body, end), self.separator.strip()
        if end and separator and body.startswith(separator, start):
            start = skip_space(body, start + len(separator))
        return start


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse)  # models write line breaks into strings


def to_json(value: Any) -> str:
    """Return `value` as JSON that can be encoded: half a surrogate pair stays an escape.

    Raises ValueError for infinite numbers.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return json.dumps(value, separators=(",", ":")) if SURROGATE.search(text) else text


SURROGATE = re.compile("[\ud800-\udfff]")


def skip_space(text: str, start: int) -> int:
    """Return where the text after space begins."""
    return len(text) - len(text[start:].lstrip(" \t\r\n"))


# --- pieces of Lark

FREE_TEXT = "/(?s:.*)/"


class Rules:
    """The rules of a Lark grammar, by name. `token_id` returns the id of a special token."""

    def __init__(self, token_id: Callable[[str], int | None]) -> None:
        self._token_id = token_id
        self._rules: dict[str, str] = {}
        # Rule names by owner and a schema's JSON. The owner is the tool's name if the schema refers to its
        # definitions, else whether the tool is strict.
        self.values: dict[tuple[str | bool, str], str] = {}

    def define(self, name: str, expression: str, options: str = "") -> str:
        """Define a rule, with llguidance's `options`. Return its name."""
        self._rules[name] = f"{name}{options}: {expression}"
        return name

    def add(self, kind: str, expression: str, options: str = "") -> str:
        """Add a rule under a new name. Return the name."""
        return self.define(f"{kind}_{len(self._rules)}", expression, options)

    def token(self, name: str) -> str:
        token = self._token_id(name)
        return quoted(name) if token is None else f"<[{token}]>"

    def source(self) -> str:
        return "\n".join(self._rules.values()) + "\n"


def quoted(text: str) -> str:
    """Return `text` as a literal. Lark takes no delete character in one."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def either(expressions: Iterable[str]) -> str:
    """Return an expression that matches one of `expressions`."""
    different = list(dict.fromkeys(expressions))
    return different[0] if len(different) == 1 else "(" + " | ".join(different) + ")"


def json_value(schema: Mapping[str, Any]) -> str:
    """Return an expression for a JSON value. `schema` has only keywords that llguidance enforces."""
    keywords = dict(schema)
    options = {**JSON_FORM, **keywords.pop("x-guidance", {})}
    return "%json " + json.dumps({**keywords, "x-guidance": options})  # as the last key: order matters
