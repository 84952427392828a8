"""Grammar of calls as Gemma 4 writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_spec.apps.server.request import Tool
from mlx_spec.apps.server.tools.gemma import QUOTE, STRUCTURE
from mlx_spec.apps.server.tools.lark import KEY, Rules, either, quoted
from mlx_spec.apps.server.tools.lowering import Lowering

NO_QUOTE = r'~/(?s:.*)<\|"\|>(?s:.*)/'  # written in letters it would end the string, too
ANYTHING = "/(?s:.*)/"


def call(tool: Tool, rules: Rules) -> str:
    """What stands between the marks of a call of `tool`."""
    lowering = _Gemma(tool, rules)
    root = tool.parameters if "type" in tool.parameters else {**tool.parameters, "type": "object"}
    arguments = lowering.value(root if tool.parameters else {"type": "object", "properties": {}})
    arguments = "any_object" if arguments == "any" else arguments
    return f"{quoted('call:' + tool.name)} {arguments}"


class _Gemma(Lowering):
    def any_value(self) -> str:
        text, numbers = self.text(""), self.number({"type": "number"})
        self.rules.define(
            "any", either([text, numbers, '"true"', '"false"', '"null"', "any_object", "any_array"])
        )
        self.rules.define("any_member", 'ANY_KEY ":" any')
        self.rules.define("any_object", '"{" (any_member ("," any_member)*)? "}"')
        self.rules.define("any_array", '"[" (any ("," any)*)? "]"')
        self.rules.define("ANY_KEY", KEY)
        return "any"

    def literal(self, value: Any) -> str:
        if isinstance(value, str):
            if QUOTE in value:
                self.refuse(f"a value with {QUOTE}")
            return f"{QUOTE} {quoted(value)} {QUOTE}" if value else f"{QUOTE} {QUOTE}"
        if isinstance(value, Mapping):
            members = [f"{_key(k)} {self.literal(value[k])}" for k in _sorted(value)]
            return '"{" ' + ' "," '.join(members) + ' "}"'
        if isinstance(value, list):
            return '"[" ' + ' "," '.join(map(self.literal, value)) + ' "]"'
        return quoted(json.dumps(value))

    def text(self, terminal: str) -> str:
        name = self.rules.define("TEXT", f"{ANYTHING} & {NO_QUOTE}")
        if terminal:
            name = self.rules.add("TEXT", f"{terminal} & {NO_QUOTE}")
        return f"{QUOTE} {name} {QUOTE}"

    def container(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        return self._array(schema, depth) if kind == "array" else self._object(schema, depth)

    def _array(self, schema: Mapping[str, Any], depth: int) -> str:
        items = schema.get("items", True)
        if isinstance(items, list):
            self.refuse("a list of items")
            items = True
        item = self.rules.add("item", self.value(items, depth + 1))
        least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
        if most is not None and int(most) < 1:
            return '"[]"'
        more = "" if most is None else int(most) - 1
        found = f'"[" {item} ("," {item}){{{max(least - 1, 0)},{more}}} "]"'
        return found if least > 0 else either(['"[]"', found])

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        properties = dict(schema.get("properties") or {})
        required = [key for key in schema.get("required") or () if isinstance(key, str)]
        properties |= {key: True for key in required if key not in properties}
        if not properties:
            return self._map(schema, depth)
        members = []
        for key in _sorted(properties):
            value = self.value(properties[key], depth + 1)
            members.append((self.rules.add("member", f"{_key(key)} {value}"), key in required))
        return f'"{{" {self._members(members)} "}}"'

    def _members(self, members: Sequence[tuple[str, bool]]) -> str:
        """In order, with commas between those that are there."""
        rest = ""
        starts: list[str] = []
        for i, (name, required) in reversed(list(enumerate(members))):
            starts = [f"{name}{rest}"] if required else [f"{name}{rest}", *starts]
            following = f'"," {name}' if required else f'("," {name})?'
            rest = " " + self.rules.add("rest", f"{following}{rest}") if i else ""
        found = either(starts)
        return found if any(required for _, required in members) else f"({found})?"

    def _map(self, schema: Mapping[str, Any], depth: int) -> str:
        """An object with keys of the model's choice."""
        more = schema.get("additionalProperties", "properties" not in schema)
        if more is False:
            return '"{}"'
        self.rules.define("ANY_KEY", KEY)
        member = self.rules.add("member", f'ANY_KEY ":" {self.value(more, depth + 1)}')
        return f'"{{" ({member} ("," {member})*)? "}}"'


def _sorted(keys: Mapping[str, Any]) -> list[str]:
    """As the template sorts them, in declarations and in calls: that is what the model has learnt."""
    return sorted(keys, key=str.lower)


def _key(key: str) -> str:
    """Bare where it can be."""
    if not key or key != key.strip() or any(character in STRUCTURE for character in key):
        return f'{QUOTE} {quoted(key)} {QUOTE} ":"' if key else f'{QUOTE} {QUOTE} ":"'
    return quoted(key + ":")
