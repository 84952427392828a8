"""Qwen3-Coder's calls: <function=f><parameter=n>1</parameter></function>."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_spec.errors import InvalidValue
from mlx_spec.grammar.schema import Definitions, escaped, fits
from mlx_spec.grammar.schema_reader import read_schema
from mlx_spec.tokenizer.thinking import Markers

from ..requests.request import Tool
from .json_calls import HERMES
from .syntax import DECODER, FREE_TEXT, Calls, Rules, Syntax, quoted, read_call
from .values import FREE_KEY, SchemaValues, allowed_properties


def _read(body: str, start: int, tools: Sequence[Tool]) -> tuple[Calls, int]:
    """Read a call. The schema tells which values are not strings.

    Ours, because mlx_lm's qwen3_coder reads numbers of a union as strings, and the string "null" as null.
    """
    head = re.compile(r"<function=([^<>]+)>\s*").match(body, start)
    name = head[1].strip() if head else ""
    if head is None or not name:
        raise ValueError("no name")
    schema = next((tool.parameters for tool in tools if tool.name == name), {})
    member = re.compile(r"<parameter=([^<>]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
    at, end = head.end(), "</function>"
    arguments: dict[str, Any] = {}
    while not body.startswith(end, at):
        parameter = member.match(body, at)
        key = parameter[1].strip() if parameter else ""
        if parameter is None or not key or key in arguments:
            raise ValueError("no parameter, or one that comes twice")
        arguments[key] = _typed(parameter[2], _parameter_types(schema, key))
        at = parameter.end()
    return [read_call(name, arguments)], at + len(end)


def _typed(text: str, types: frozenset[str]) -> Any:
    """Return `text` as a value of one of `types`, or as the string that it is."""
    if types == {"string"}:
        return text
    word = text.strip()
    constants = {"true": "true", "false": "false", "null": "null", "none": "null"}  # templates write "True"
    try:
        value = DECODER.decode(constants.get(word.lower(), word))
    except (ValueError, RecursionError):
        return text
    types |= {"number"} if "integer" in types else set()
    return value if not isinstance(value, str) and fits(value, types) else text


def _parameter_types(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """Return the types of a parameter: without a type object, array or string; if it is unknown, string."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or key not in properties:
        return frozenset({"string"})
    anything = frozenset({"object", "array", "string"})
    try:
        parameter = read_schema(schema, pointer=f"#/properties/{escaped(key)}")
    except InvalidValue:
        return anything
    types = Definitions(parameter.definitions).types(parameter.root)
    return anything if types == Definitions({}).types(True) else types


def _write(tool: Tool, rules: Rules) -> str:
    """Return a call with its parameters in the order of the schema, which must list them."""
    values, schema = _Values(tool, rules), tool.parameters
    for keyword in schema.keys() & {"anyOf", "allOf", "$ref", "patternProperties"}:
        values.refuse(keyword)
    required = schema.get("required") or ()
    properties = allowed_properties(schema, required)
    call = quoted(f"\n<function={tool.name}>\n")
    for key, parameter in properties.items():
        if not key.strip() or any(character in "<>" for character in key):
            values.refuse(f"the parameter name {key!r}")
            continue
        member = f"{quoted(f'<parameter={key}>' + chr(10))} {values.value(parameter)}"
        call += f" {member}" if key in required else f" ({member})?"
    if schema and not properties and schema.get("additionalProperties", "properties" not in schema):
        rules.define("ANY_KEY", FREE_KEY)
        call += f' ("<parameter=" ANY_KEY ">\\n" {values.any_value()})*'
    return call + ' "</function>\\n"'


class _Values(SchemaValues):
    """A string is all text before the closing tag; all other values are JSON."""

    CLOSE = "</parameter>"
    end = quoted(f"\n{CLOSE}\n")

    def any_value(self) -> str:
        return self.text(FREE_TEXT)

    def literal(self, value: Any) -> str:
        if isinstance(value, str) and self.CLOSE in value:
            self.refuse(f"a value with {self.CLOSE}")
        written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return f"{quoted(written)} {self.end}" if written else self.end

    def scalar(self, schema: Mapping[str, Any]) -> str:
        return f"{super().scalar(schema)} {self.end}"

    def text(self, terminal: str) -> str:
        return self.rules.add("text", terminal, f"[suffix={self.end}]")

    def container(self, kind: str, schema: Mapping[str, Any]) -> str:
        refers = '"$ref"' in json.dumps(schema)
        definitions = {"$defs": self.tool.parameters["$defs"]} if refers else {}
        return self.scalar({"type": kind, **schema, **definitions})


CODER = Syntax("qwen3-coder", HERMES.markers, _read, _write, "\n", is_json=False)
SEED = Syntax("seed", Markers("<seed:tool_call>", "</seed:tool_call>"), _read, separator="\n")
