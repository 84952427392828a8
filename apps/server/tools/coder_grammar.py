"""Grammar of calls as Qwen3-Coder writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlx_spec.apps.server.request import Tool
from mlx_spec.apps.server.tools.coder import CLOSE
from mlx_spec.apps.server.tools.lark import KEY, Rules, json_value, quoted
from mlx_spec.apps.server.tools.lowering import Lowering

END = quoted(f"\n{CLOSE}\n")
ANYTHING = "/(?s:.*)/"


def call(tool: Tool, rules: Rules) -> str:
    """What stands between the marks of a call of `tool`: its parameters in the order of the schema."""
    lowering = _Coder(tool, rules)
    schema = lowering.parameters()
    required = schema.get("required") or ()
    properties = dict(schema.get("properties") or {})
    properties |= {key: True for key in required if key not in properties}
    found = quoted(f"\n<function={tool.name}>\n")
    for key, each in properties.items():
        if not key.strip() or any(character in "<>" for character in key):
            lowering.refuse(f"the parameter name {key!r}")
            continue
        member = f"{quoted(f'<parameter={key}>' + chr(10))} {lowering.value(each)}"
        found += f" {member}" if key in required else f" ({member})?"
    if tool.parameters and not properties and schema.get("additionalProperties", "properties" not in schema):
        rules.define("ANY_KEY", KEY)
        found += f' ("<parameter=" ANY_KEY ">\\n" {lowering.text("")})*'
    return found + ' "</function>\\n"'


class _Coder(Lowering):
    """Values end with their tag: a string is all that comes before it."""

    def parameters(self) -> Mapping[str, Any]:
        """The schema of the parameters, which must list them."""
        for keyword in self.root.keys() & {"anyOf", "oneOf", "allOf", "$ref", "patternProperties"}:
            self.refuse(keyword)
        return self.root

    def any_value(self) -> str:
        return self.text("")

    def literal(self, value: Any) -> str:
        if isinstance(value, str):
            if CLOSE in value:
                self.refuse(f"a value with {CLOSE}")
            return f"{quoted(value)} {END}" if value else END
        return f"{quoted(json.dumps(value, ensure_ascii=False))} {END}"

    def number(self, schema: Mapping[str, Any]) -> str:
        return f"{super().number(schema)} {END}"

    def text(self, terminal: str) -> str:
        if terminal:
            terminal = self.rules.add("TEXT", terminal)
        return self.rules.add("text", terminal or ANYTHING, f"[suffix={END}]")

    def container(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        whole = {"type": kind, **_moved(schema), "$defs": {"parameters": _moved(self.root)}}
        return f"{json_value(whole, lenient=not self.tool.strict)} {END}"


def _moved(schema: Any) -> Any:
    """`schema` with the references that it needs inside another one."""
    if isinstance(schema, list):
        return [_moved(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: _moved(each) for key, each in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        found["$ref"] = "#/$defs/parameters" + reference[1:]
    return found
