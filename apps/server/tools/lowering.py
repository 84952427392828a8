"""From the JSON schema of a tool's parameters to grammar rules, for formats whose values are not JSON."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from mlx_spec.apps.server.errors import Failure, unsupported
from mlx_spec.apps.server.request import Tool
from mlx_spec.apps.server.tools.lark import Rules, either, json_value, quoted
from mlx_spec.apps.server.tools.patterns import FORMATS, Unanchored, terminal
from mlx_spec.apps.server.tools.schema import CHOICES, Unresolved, resolve, type_of, types
from mlx_spec.apps.server.tools.unions import Exclusion

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
OF_TYPE = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": BOUNDS,
    "integer": BOUNDS,
    "boolean": (),
    "null": (),
}
CONSTRAINTS = {"type", "enum", "const", "$ref", "nullable", *CHOICES}.union(*OF_TYPE.values())
UNSUPPORTED = """not if then else patternProperties propertyNames minProperties maxProperties dependencies
dependentRequired dependentSchemas contains minContains maxContains uniqueItems prefixItems additionalItems
unevaluatedItems unevaluatedProperties $dynamicRef $recursiveRef""".split()
MAX_DEPTH = 24


class Lowering(ABC):
    """Grammar expressions for the parameters of one tool.

    A strict tool is enforced whole, or refused: Failure 400 that names the keyword. Of any other one what
    cannot be enforced is left out. Objects have the properties that their schema lists and no more, which
    is within what it allows.
    """

    def __init__(self, tool: Tool, rules: Rules) -> None:
        self.tool, self.rules = tool, rules
        self.root = tool.parameters
        self._references: dict[str, str] = {}

    @abstractmethod
    def any_value(self) -> str:
        """A value of any type."""

    @abstractmethod
    def literal(self, value: Any) -> str:
        """That very value."""

    @abstractmethod
    def text(self, terminal: str) -> str:
        """A string that `terminal` matches; "" for any."""

    @abstractmethod
    def container(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        """An object or an array."""

    def number(self, schema: Mapping[str, Any]) -> str:
        """A number within bounds."""
        return json_value(schema, lenient=not self.tool.strict)

    def value(self, schema: Any, depth: int = 0) -> str:
        """A value that `schema` allows."""
        if depth > MAX_DEPTH:
            return self._unfit("a nesting of more than 24 levels")
        if schema is False:
            return self._unfit("a schema that is false")
        if not isinstance(schema, Mapping):
            return self.any_value()
        for keyword in UNSUPPORTED:
            if schema.get(keyword, False) is not False:
                self.refuse(keyword)
        constraints = {key: each for key, each in schema.items() if key in CONSTRAINTS}
        if constraints.pop("nullable", False) is True:
            return either([self.value(constraints, depth + 1), self.value({"type": "null"}, depth)])
        if "$ref" in constraints:
            return self._reference(constraints, depth)
        for keyword in CHOICES:
            if isinstance(options := constraints.get(keyword), list) and options:
                rest = {key: each for key, each in constraints.items() if key != keyword}
                return self._choice(keyword, options, rest, depth)
        if "const" in constraints or isinstance(constraints.get("enum"), list):
            return self._enumerated(constraints)
        return self._typed(constraints, depth)

    def refuse(self, keyword: str) -> None:
        """Raise Failure 400 if the tool is strict."""
        if self.tool.strict:
            raise unfit(self.tool, keyword)

    def _unfit(self, keyword: str) -> str:
        self.refuse(keyword)
        return self.any_value()

    def _reference(self, schema: Mapping[str, Any], depth: int) -> str:
        reference = str(schema["$ref"])
        try:
            found = resolve(reference, self.root)
        except Unresolved as error:
            raise Failure(400, f"tool {self.tool.name!r}: {error}", param="tools") from error
        rest = {key: each for key, each in schema.items() if key != "$ref"}
        if rest:
            return self.value(self._merged(rest, found), depth + 1)
        if reference not in self._references:  # named before it is read: it may contain itself
            self._references[reference] = self.rules.reserve("ref")
            self.rules.define(self._references[reference], self.value(found, depth + 1))
        return self._references[reference]

    def _choice(self, keyword: str, options: list[Any], rest: Mapping[str, Any], depth: int) -> str:
        if keyword == "allOf" and len(options) > 1:
            return self._unfit("allOf")
        if keyword == "oneOf" and not Exclusion(self.root).holds(options):
            self.refuse("oneOf")
        return either([self.value(self._merged(rest, option), depth + 1) for option in options])

    def _merged(self, rest: Mapping[str, Any], option: Any) -> Any:
        """Both at once. What they say about the same thing must agree."""
        if not isinstance(option, Mapping):
            return {**rest} if option is True else option
        for key in rest.keys() & option.keys() & CONSTRAINTS:
            if rest[key] != option[key]:
                self.refuse(key)
        return {**rest, **option}

    def _enumerated(self, schema: Mapping[str, Any]) -> str:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        allowed = types({"type": schema["type"]}, self.root) if "type" in schema else frozenset()
        for keyword in schema.keys() - {"const", "enum", "type"}:
            self.refuse(keyword)
        fitting = [value for value in values if not allowed or _is(value, allowed)]
        return either(map(self.literal, fitting)) if fitting else self._unfit("enum")

    def _typed(self, schema: Mapping[str, Any], depth: int) -> str:
        named = sorted(types({"type": schema.get("type")}, self.root) & OF_TYPE.keys())
        implied = [kind for kind in OF_TYPE if schema.keys() & set(OF_TYPE[kind])]
        kinds = named or implied[:1]
        if not kinds:
            return self.any_value()
        if "number" in kinds and "integer" in kinds:
            kinds.remove("integer")
        return either([self._of_type(kind, schema, depth) for kind in kinds])

    def _of_type(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        own = {key: schema[key] for key in OF_TYPE[kind] if key in schema}
        if kind == "string":
            return self._string(own)
        if kind in ("number", "integer"):
            return self.number({"type": kind, **own})
        if kind == "boolean":
            return either([self.literal(True), self.literal(False)])
        return self.literal(None) if kind == "null" else self.container(kind, own, depth)

    def _string(self, schema: Mapping[str, Any]) -> str:
        parts = []
        if (name := schema.get("format")) is not None:
            if name in FORMATS:
                parts.append(f"/{FORMATS[name]}/")
            else:
                self.refuse(f"format {json.dumps(name)}")
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if least or most != "":
            parts.append(f"/(?s:.{{{least},{most}}})/")
        if (pattern := schema.get("pattern")) is not None:
            try:
                parts.append(terminal(str(pattern)))
            except Unanchored:
                self.refuse(f"pattern {quoted(str(pattern))}")
        return self.text(" & ".join(parts))


def unfit(tool: Tool, keyword: str) -> Failure:
    """400: a strict tool with a schema that cannot be enforced."""
    return unsupported(
        f"tool {tool.name!r} is strict, and {keyword} cannot be enforced in the calls of this model: "
        "leave it out of the parameters, or strict out of the tool",
        "tools",
    )


def _is(value: Any, allowed: frozenset[str]) -> bool:
    kind = type_of(value)
    return kind in allowed or (kind == "integer" and "number" in allowed)
