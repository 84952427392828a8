"""What a request's tools ask of the answer, as a Lark grammar for llguidance."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from mlx_spec.apps.server.errors import invalid, unsupported
from mlx_spec.apps.server.request import OutputFormat, ToolUse
from mlx_spec.apps.server.tools.dialect import Dialect
from mlx_spec.apps.server.tools.lark import Rules, either, json_value, quoted, regex
from mlx_spec.apps.server.tools.schema import misshapen

INF = float("inf")


def banned(dialect: Dialect, use: ToolUse) -> dict[int, float]:
    """A logit bias that keeps calls from being opened where the choice is "none"; else an empty one."""
    return {dialect.open: -INF} if use.choice == "none" else {}


def lark(dialect: Dialect, use: ToolUse, answer: OutputFormat | None = None) -> str | None:
    """A grammar of the whole answer, behind the thoughts; None where the tools ask for nothing.

    required and named: calls and nothing else, one of them unless `parallel`. auto, where a tool is strict,
    calls are not parallel or there is an `answer`: any text, or what `answer` asks for, and calls, each of a
    tool and as its schema says. none: None, see `banned`. Schemas of tools that are not strict are enforced
    as far as they can be. Raises Failure 400 that names what cannot.
    """
    tools = [tool for tool in use.tools if use.named in (None, tool.name)]
    if not tools:
        raise invalid(f"tool_choice: {use.named!r} is none of the tools", "tool_choice")
    free = use.parallel and answer is None and not any(tool.strict for tool in tools)
    if use.choice == "none" or (use.choice == "auto" and free):
        return None
    for tool in tools:
        if (problem := misshapen(tool.parameters)) is not None:
            raise invalid(f"tools: the parameters of {tool.name!r} are no JSON schema: {problem}", "tools")
    rules = Rules()
    each = [rules.add("call", _call(dialect, dialect.format.grammar(tool, rules))) for tool in tools]
    call = rules.define("any_call", either(each))
    if use.choice == "required":
        start = _several(dialect, call) if use.parallel else call
    elif answer is not None:
        start = f"{_answer(answer)} | {_several(dialect, call) if use.parallel else call}"
    else:
        others = f"<[^{_ranges({dialect.open, dialect.close} | dialect.ends)}]>"  # any token but these
        start = f"({others} | {call})*" if use.parallel else f"({others})* ({call})?"
    return f"start: {start}\n{rules.source()}"


def _call(dialect: Dialect, body: str) -> str:
    return f"<[{dialect.open}]> {body} <[{dialect.close}]>"


def _several(dialect: Dialect, call: str) -> str:
    between = quoted(dialect.format.between) + " " if dialect.format.between else ""
    return f"{call} ({between}{call})*"


def _ranges(tokens: Iterable[int]) -> str:
    return ",".join(map(str, sorted(tokens)))


def _answer(format: OutputFormat) -> str:
    if format.kind == "json_object":
        return json_value({"type": "object"})
    if format.kind == "json_schema":
        return json_value(_schema(format))
    if format.kind == "regex":
        return regex(format.text)
    raise unsupported("a Lark grammar of the answer goes with no tools: leave one of them out", format.param)


def _schema(format: OutputFormat) -> Mapping[str, Any]:
    schema = json.loads(format.text)
    if not isinstance(schema, dict):
        raise invalid("the JSON schema must be a JSON object", format.param)
    return schema
