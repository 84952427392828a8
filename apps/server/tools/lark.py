"""Pieces of Lark as llguidance reads it: rules with names, literals, JSON schemas inside."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from mlx_spec.apps.server.tools.unions import widened

# one way to write the white space: what it forces is drafted for nothing
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

KEY = r"/[A-Za-z0-9_$@.\/-]+/"  # names that a model may choose


class Rules:
    """The rules of a grammar."""

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}

    def reserve(self, kind: str) -> str:
        """A new name; its rule may come later."""
        name = f"{kind}_{len(self._rules)}"
        self._rules[name] = ""
        return name

    def define(self, name: str, expression: str, options: str = "") -> str:
        """The rule of `name`, with llguidance's `options`."""
        self._rules[name] = f"{name}{options}: {expression}"
        return name

    def add(self, kind: str, expression: str, options: str = "") -> str:
        """A rule under a new name."""
        return self.define(self.reserve(kind), expression, options)

    def source(self) -> str:
        """All of them."""
        return "\n".join(self._rules.values()) + "\n"


def quoted(text: str) -> str:
    """`text` as a literal."""
    return json.dumps(text, ensure_ascii=False)


def regex(pattern: str) -> str:
    """`pattern` as a terminal."""
    return "/" + pattern.replace("\\/", "/").replace("/", "\\/").replace("\n", "\\n") + "/"


def either(expressions: Iterable[str]) -> str:
    """One of `expressions`."""
    different = list(dict.fromkeys(expressions))
    return different[0] if len(different) == 1 else "(" + " | ".join(different) + ")"


def json_value(schema: Any, *, lenient: bool = False) -> str:
    """A JSON value that `schema` allows; `lenient` leaves out what llguidance cannot enforce."""
    given = dict(widened(schema)) if isinstance(schema, Mapping) else {"anyOf": [schema]}
    options = {**SPACING, **({"lenient": True} if lenient else {})}
    return "%json " + json.dumps({"x-guidance": options, **given})
