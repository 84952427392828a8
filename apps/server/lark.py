"""Pieces of Lark grammars for llguidance."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mlx_spec.grammar.sandbox import JSON_FORM

FREE_TEXT = "/(?s:.*)/"


class Rules:
    """The rules of a grammar, by name. `token_id` gives the tokens that they name."""

    def __init__(self, token_id: Callable[[str], int | None]) -> None:
        self._token_id = token_id
        self._rules: dict[str, str] = {}
        # The rules of schemas, by their JSON and a tool: its name where they refer to its parameters, else
        # whether it is strict.
        self.values: dict[tuple[str | bool, str], str] = {}

    def define(self, name: str, expression: str, options: str = "") -> str:
        """Set the rule of `name`, with llguidance's `options`. Return the name."""
        self._rules[name] = f"{name}{options}: {expression}"
        return name

    def add(self, kind: str, expression: str, options: str = "") -> str:
        """Add a rule under a new name. Return the name."""
        return self.define(f"{kind}_{len(self._rules)}", expression, options)

    def token(self, name: str) -> str:
        """Return a token as an expression."""
        found = self._token_id(name)
        return quoted(name) if found is None else f"<[{found}]>"

    def source(self) -> str:
        """Return all rules as text."""
        return "\n".join(self._rules.values()) + "\n"


def quoted(text: str) -> str:
    """Return `text` as a literal."""
    return json.dumps(text, ensure_ascii=False)


def either(expressions: Iterable[str]) -> str:
    """Return one of `expressions`."""
    different = list(dict.fromkeys(expressions))
    return different[0] if len(different) == 1 else "(" + " | ".join(different) + ")"


def json_value(schema: Mapping[str, Any]) -> str:
    """Return a JSON value that `schema` allows, which is as llguidance enforces it."""
    given = dict(schema)
    options = {**JSON_FORM, **given.pop("x-guidance", {})}
    return "%json " + json.dumps({**given, "x-guidance": options})  # as the last key: order matters
