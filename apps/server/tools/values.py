"""Write values that match a schema, for syntaxes whose arguments are not JSON.

Only the common keywords of JSON Schema are enforced in them. A strict tool with another keyword is refused
by the name of the keyword; otherwise the keyword is left out.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_spec.grammar.schema import OF_TYPE, Definitions, fits, type_list, values_of

from ..errors import unsupported
from ..requests.request import Tool
from .syntax import FREE_TEXT, Rules, either, json_value

FREE_KEY = r"/[A-Za-z0-9_$@.\/-]+/"  # keys that the model may choose itself
REFUSED = ("pattern", "patternProperties", "minProperties", "maxProperties")
SUPPORTED = {"type", "enum", "const", "$ref", "anyOf", "allOf"} | OF_TYPE.keys() - {*REFUSED, "format"}


def allowed_properties(schema: Mapping[str, Any], required: Sequence[str]) -> dict[str, Any]:
    """Return the allowed properties with their schemas; required ones may not be listed in the schema."""
    listed = schema.get("properties") or {}
    allowed = {name: value for name, value in listed.items() if value is not False or name in required}
    return allowed | {name: True for name in required if name not in listed}


class SchemaValues(ABC):
    """Grammar expressions for the values of one tool's parameters, which `enforceable` has rewritten.

    Objects have only the properties that their schema lists, also if the schema would allow more.
    """

    def __init__(self, tool: Tool, rules: Rules) -> None:
        self.tool, self.rules = tool, rules
        self._definitions = Definitions(tool.parameters.get("$defs", {}))

    @abstractmethod
    def any_value(self) -> str: ...

    @abstractmethod
    def literal(self, value: Any) -> str: ...

    @abstractmethod
    def text(self, terminal: str) -> str: ...

    @abstractmethod
    def container(self, kind: str, schema: Mapping[str, Any]) -> str: ...

    def scalar(self, schema: Mapping[str, Any]) -> str:
        """Return an expression for a number, true, false or null."""
        return json_value(schema)

    def refuse(self, keyword: str) -> None:
        """Raise Failure 400 if the tool is strict."""
        if self.tool.strict:
            raise unsupported(
                f"tool {self.tool.name!r} is strict, and {keyword} cannot be enforced in the calls of this "
                "model: leave it out of the parameters, or strict out of the tool",
                "tools",
            )

    def value(self, schema: Any) -> str:
        """Return an expression for a value that `schema` allows."""
        known, most = self.rules.values, 5000  # rules: one for each different subschema of all tools
        if schema is False or len(known) > most:
            self.refuse("a schema that is false" if schema is False else f"more than {most} schemas")
        elif isinstance(schema, Mapping):
            for keyword in REFUSED:
                if schema.get(keyword, False) is not False:
                    self.refuse(keyword)
            limits = {key: value for key, value in schema.items() if key in SUPPORTED}
            written = json.dumps(limits)
            key = (self.tool.name if '"$ref"' in written else self.tool.strict, written)
            if key not in known:  # its rule is named first, because a schema may contain itself
                known[key] = self.rules.add("value", "")
                self.rules.define(known[key], self._limited(limits))
            return known[key]
        return self.any_value()

    def _limited(self, schema: dict[str, Any]) -> str:
        if "$ref" in schema:
            referred = self._definitions.of(schema.pop("$ref"))
            return self.value(self._merge(schema, referred))
        for keyword in ("anyOf", "allOf"):
            options = [option for option in schema.pop(keyword, []) if option is not False]
            if keyword == "allOf" and len(options) > 1:
                self.refuse("allOf")
                return self._typed({key: schema[key] for key in ("type",) if key in schema})
            if options:
                return either([self.value(self._merge(schema, option)) for option in options])
        if "const" in schema or "enum" in schema:
            return self._enumerated(schema)
        return self._typed(schema)

    def _merge(self, rest: Mapping[str, Any], option: Any) -> Any:
        """Return a schema with the keywords of both. Keywords that both have must agree."""
        if not isinstance(option, Mapping):
            return {**rest} if option is True else option
        for key in rest.keys() & option.keys() & SUPPORTED:
            if rest[key] != option[key]:
                self.refuse(key)
        return {**rest, **option}

    def _enumerated(self, schema: Mapping[str, Any]) -> str:
        for keyword in schema.keys() - {"const", "enum", "type"}:
            self.refuse(keyword)
        fitting = [value for value in values_of(schema) or () if fits(value, type_list(schema))]
        if not fitting:
            self.refuse("enum")
            return self.any_value()
        return either(map(self.literal, fitting))

    def _typed(self, schema: Mapping[str, Any]) -> str:
        restricted = {OF_TYPE[keyword] for keyword in schema if keyword in OF_TYPE}
        implied = [kind for kind in ("object", "array", "string", "number") if kind in restricted]
        kinds: list[str] = sorted(type_list(schema)) if "type" in schema else [*implied[:1]]
        if "number" in kinds and "integer" in kinds:
            kinds.remove("integer")
        return either([self._of_type(kind, schema) for kind in kinds]) if kinds else self.any_value()

    def _of_type(self, kind: str, schema: Mapping[str, Any]) -> str:
        restricted = "number" if kind == "integer" else kind
        keywords = {key: value for key, value in schema.items() if OF_TYPE.get(key) == restricted}
        if kind == "string":
            least, most = keywords.get("minLength", 0), keywords.get("maxLength", "")
            return self.text(f"/(?s:.{{{least},{most}}})/" if keywords else FREE_TEXT)
        if kind in ("object", "array"):
            return self.container(kind, keywords)
        return self.scalar({"type": kind, **keywords})
