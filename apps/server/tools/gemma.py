"""Gemma 4's calls: call:f{key:<|"|>text<|"|>,n:1,list:[2,3]}."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_spec.tokenizer.thinking import Markers

from ..requests.request import Tool
from .syntax import DECODER, FREE_TEXT, Calls, Rules, Syntax, either, quoted, read_call
from .values import FREE_KEY, SchemaValues, allowed_properties

QUOTE = '<|"|>'
_TOKEN = re.compile(
    r'<\|"\|>(?P<text>.*?)<\|"\|>|(?P<json>"(?:[^"\\]|\\.)*")|(?P<bare>[^{}\[\],:<"]+)|[{}\[\],:]', re.DOTALL
)


def _read(body: str, start: int, tools: Sequence[Tool]) -> tuple[Calls, int]:
    """Read call:f{key:<|"|>text<|"|>,n:1,list:[2,3]}: bare keys, quotes that are tokens, else JSON.

    Ours, because mlx_lm's gemma4 refuses dashes in keys, dots in names and spaces after commas, and drops
    the text around calls.
    """
    name = re.compile(r'call:([^\s{}\[\],<>"]+)\s*(?=\{)').match(body, start)
    if name is None:
        raise ValueError("no name")
    at, depth = name.end(), 0
    written_json: list[str] = []
    while not written_json or depth:
        token = _TOKEN.match(body, at)
        if token is None:
            raise ValueError("the arguments do not end")
        at, written = token.end(), token.group()
        depth += (written in ("{", "[")) - (written in ("}", "]"))
        if token["text"] is not None:
            written = json.dumps(token["text"])
        elif token["bare"] is not None:
            written = written.strip()
            is_key = bool(written) and body[at : at + 1] == ":"
            written = json.dumps(written) if is_key else {"None": "null"}.get(written, written)
        written_json.append(written)
    return [read_call(name[1], DECODER.decode("".join(written_json)))], at


def _write(tool: Tool, rules: Rules) -> str:
    return f"{quoted('call:' + tool.name)} {_Values(tool, rules).value(tool.parameters)}"


class _Values(SchemaValues):
    """Values of Gemma 4: bare keys, strings between quote tokens, everything else as in JSON."""

    no_quote = r'~/(?s:.*)<\|"\|>(?s:.*)/'  # spelled out, the quote token would also end the string

    def any_value(self) -> str:
        scalars = [self.text(FREE_TEXT), self.scalar({"type": "number"}), '"true"', '"false"', '"null"']
        self.rules.define("ANY_KEY", FREE_KEY)
        self.rules.define("any_object", '"{" (ANY_KEY ":" any ("," ANY_KEY ":" any)*)? "}"')
        self.rules.define("any_array", '"[" (any ("," any)*)? "]"')
        return self.rules.define("any", either([*scalars, "any_object", "any_array"]))

    def literal(self, value: Any) -> str:
        if isinstance(value, str):
            if QUOTE in value:
                self.refuse(f"a value with {QUOTE}")
            return f"{QUOTE} {quoted(value)} {QUOTE}" if value else f"{QUOTE} {QUOTE}"
        if isinstance(value, Mapping):
            members = [f"{self._key(key)} {self.literal(value[key])}" for key in sorted(value, key=str.lower)]
            return '"{" ' + ' "," '.join(members) + ' "}"'
        if isinstance(value, list):
            return '"[" ' + ' "," '.join(map(self.literal, value)) + ' "]"'
        return quoted(json.dumps(value))

    def text(self, terminal: str) -> str:
        expression = f"{terminal} & {self.no_quote}"
        is_free = terminal == FREE_TEXT
        name = self.rules.define("TEXT", expression) if is_free else self.rules.add("TEXT", expression)
        return f"{QUOTE} {name} {QUOTE}"

    def container(self, kind: str, schema: Mapping[str, Any]) -> str:
        return self._array(schema) if kind == "array" else self._object(schema)

    def _array(self, schema: Mapping[str, Any]) -> str:
        if "prefixItems" in schema:
            self.refuse("prefixItems")
        item = self.value(True if "prefixItems" in schema else schema.get("items", True))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        more = "" if most is None else most - 1
        written = f'"[" {item} ("," {item}){{{max(least - 1, 0)},{more}}} "]"'
        return written if least > 0 else either(['"[]"', written])

    def _object(self, schema: Mapping[str, Any]) -> str:
        """Return an object with its keys in the order of the template, which the model has learnt."""
        required = schema.get("required") or ()
        properties = allowed_properties(schema, required)
        if not properties:
            return self._map(schema)
        members = []
        for key in sorted(properties, key=str.lower):
            member = self.rules.add("member", f"{self._key(key)} {self.value(properties[key])}")
            members.append((member, key in required))
        return f'"{{" {self._members(members)} "}}"'

    def _members(self, members: Sequence[tuple[str, bool]]) -> str:
        """Return members in their order, with commas between; optional ones may be missing."""
        rest = ""
        starts: list[str] = []
        for i, (name, required) in reversed(list(enumerate(members))):
            starts = [f"{name}{rest}"] if required else [f"{name}{rest}", *starts]
            following = f'"," {name}' if required else f'("," {name})?'
            rest = " " + self.rules.add("rest", f"{following}{rest}") if i else ""
        written = either(starts)
        return written if any(required for _, required in members) else f"({written})?"

    def _map(self, schema: Mapping[str, Any]) -> str:
        """Return an object whose keys the model chooses."""
        more = schema.get("additionalProperties", "properties" not in schema)
        if more is False:
            return '"{}"'
        self.rules.define("ANY_KEY", FREE_KEY)
        member = self.rules.add("member", f'ANY_KEY ":" {self.value(more)}')
        return f'"{{" ({member} ("," {member})*)? "}}"'

    def _key(self, key: str) -> str:
        """Return a key and its colon: bare if possible, else quoted."""
        if not key or key != key.strip() or any(character in '{}[],:<"' for character in key):
            return f"{self.literal(key)} " + '":"'
        return quoted(key + ":")


GEMMA = Syntax("gemma4", Markers("<|tool_call>", "<tool_call|>"), _read, _write, is_json=False)
