"""Calls whose arguments are JSON: Hermes, lists of calls, and forms with text around the arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from mlx_spec.tokenizer.thinking import Markers

from ..requests.request import Tool
from .syntax import (
    DECODER,
    SURROGATE,
    Calls,
    Rules,
    Syntax,
    either,
    json_value,
    quoted,
    read_call,
    skip_space,
)

# --- {"name": "f", "arguments": {"n": 1}}


def _read_object(body: str, start: int, tools: Sequence[Tool]) -> tuple[Calls, int]:
    """Read a call with its name.

    Ours, because mlx_lm's json_tools refuses a second call and line breaks in strings, and checks no types.
    """
    call, end = DECODER.raw_decode(body, start)
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or not name or SURROGATE.search(name):
        raise ValueError("a call has no name")
    arguments = call.get("arguments")
    if isinstance(arguments, str):  # JSON inside JSON
        arguments = DECODER.decode(arguments)
    if not isinstance(arguments, dict | None):
        raise ValueError("the arguments are not an object")
    return [read_call(name, arguments or {})], end


def _write_object(tool: Tool, rules: Rules) -> str:
    """Return JSON with the spaces that templates write. llguidance enforces the schema itself."""
    arguments = rules.add("arguments", json_value(tool.parameters))
    head = '{"name": ' + json.dumps(tool.name, ensure_ascii=False) + ', "arguments": '
    return f'{quoted(head)} {arguments} "}}"'


def _write_line(tool: Tool, rules: Rules) -> str:
    return f'"\\n" {_write_object(tool, rules)} "\\n"'


HERMES = Syntax("hermes", Markers("<tool_call>", "</tool_call>"), _read_object, _write_line, "\n")
# The answer is a call: for models whose template has no calls, if a request forces one.
ANSWER = Syntax("answer", Markers("", ""), _read_object, _write_object)


# --- lists: [{"name": "f", "arguments": {"n": 1}}], [{"f": {"n": 1}}], or with Cohere's keys


def _read_list(body: str, start: int, tools: Sequence[Tool]) -> tuple[Calls, int]:
    written, end = DECODER.raw_decode(body, start)
    calls: Calls = []
    for call in written if isinstance(written, list) else ():
        pair = next(iter(call.items())) if isinstance(call, dict) and len(call) == 1 else (None, None)
        for name_key, arguments_key in (("name", "arguments"), ("tool_name", "parameters")):
            if isinstance(call, dict) and name_key in call:
                pair = call[name_key], call.get(arguments_key, {})
        name, arguments = pair
        if not isinstance(name, str) or not name or not isinstance(arguments, dict) or SURROGATE.search(name):
            raise ValueError("no call")
        calls.append(read_call(name, arguments))
    if not calls:
        raise ValueError("no list of calls")
    return calls, end


LISTS = (
    Syntax("mistral-list", Markers("[TOOL_CALLS]", ""), _read_list),
    Syntax("nemotron", Markers("<TOOLCALL>", "</TOOLCALL>"), _read_list),
    Syntax("cohere", Markers("<|START_ACTION|>", "<|END_ACTION|>"), _read_list),
    Syntax("apertus", Markers("<|tools_prefix|>", "<|tools_suffix|>"), _read_list),
)


# --- forms


def form(
    name: str,
    markers: Markers,
    ways: Sequence[str],
    head: str,
    tail: str = "",
    separator: str = "",
    *,
    together: bool = False,
) -> Syntax:
    """Return the syntax of calls with a text around their arguments.

    `ways` are texts with {name}, {index} and {arguments} that a grammar allows, the usual one first. `head`
    is a pattern of the text before the arguments, with the groups `name` and perhaps `id`; `tail` is one of
    the text after them.
    """
    before, after = re.compile(head), re.compile(r"\s*" + tail if tail else "")

    def read(body: str, start: int, tools: Sequence[Tool]) -> tuple[Calls, int]:
        opening = before.match(body, start)
        if opening is None:
            raise ValueError("no name")
        arguments, end = DECODER.raw_decode(body, skip_space(body, opening.end()))
        closing = after.match(body, end)
        if closing is None or not isinstance(arguments, dict):
            raise ValueError("the call does not end, or its arguments are not an object")
        return [read_call(opening["name"], arguments, opening.groupdict().get("id"))], closing.end()

    def write(tool: Tool, rules: Rules) -> str:
        arguments = rules.add("arguments", json_value(tool.parameters))
        written = [_expression(way, tool.name, arguments, rules) for way in ways]
        return either([f"({way})" for way in written] if len(written) > 1 else written)

    return Syntax(name, markers, read, write, separator, together)


def _expression(way: str, name: str, arguments: str, rules: Rules) -> str:
    fields = {"{name}": quoted(name), "{index}": "/[0-9]+/", "{arguments}": arguments}
    parts: list[str] = []
    tokens = r"(<[|｜][^<>]+[|｜]>|\[[A-Z_]+\])"  # special tokens within a way
    for field in filter(None, re.split(r"(\{(?:name|index|arguments)\})", way)):
        texts: Sequence[str] = [] if field in fields else list(filter(None, re.split(tokens, field)))
        parts += [fields[field]] if field in fields else []
        parts += [rules.token(text) if re.fullmatch(tokens, text) else quoted(text) for text in texts]
    return " ".join(parts)


FORMS = (
    form(  # gpt-oss: the call is a message
        "harmony",
        Markers("<|start|>", "<|call|>"),
        (
            "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}",
            " to=functions.{name}<|channel|>commentary json<|message|>{arguments}",
        ),
        r"(?:[^<]|<\|(?:start|channel)\|>)*?to=functions\.(?P<name>[^\s<]+)"
        r"(?:[^<]|<\|(?:channel|constrain)\|>)*<\|message\|>",
    ),
    form(
        "kimi-k2",
        Markers("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        (
            "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}"
            "<|tool_call_end|>",
        ),
        r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s<]+?):\d+)\s*<\|tool_call_argument_begin\|>",
        r"<\|tool_call_end\|>",
        together=True,
    ),
    form(
        "deepseek-v3.1",
        Markers("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",),
        r"<｜tool▁call▁begin｜>(?P<name>[^\s<]+)<｜tool▁sep｜>",
        r"<｜tool▁call▁end｜>",
        together=True,
    ),
    form(
        "deepseek-r1",
        Markers("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",),
        r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\s<]+)\s*```json\s*",
        r"```\s*<｜tool▁call▁end｜>",
        "\n",
        together=True,
    ),
    form(  # from version 11 of the tokenizer on
        "mistral",
        Markers("[TOOL_CALLS]", ""),
        ("{name}[ARGS]{arguments}",),
        r"(?P<name>[^\s\[\]{}]+)(?:\[CALL_ID\](?P<id>[^\s\[\]]*))?\[ARGS\]",
    ),
)
