"""Describe syntaxes of tool calls, list those with JSON arguments, and build pieces of Lark grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_spec.grammar.sandbox import JSON_FORM
from mlx_spec.tokenizer.thinking import Markers

from ..requests.request import Tool

WrittenCalls = list[tuple[str, str]]  # names, and arguments as JSON
ParsedCall = tuple[str, dict[str, Any]]  # name, arguments
ReadCalls = Callable[[str, int, Sequence[Tool]], tuple[list[ParsedCall], int]]  # body, start -> calls, end


@dataclass(frozen=True)
class CallForm:
    """How a model writes a call whose arguments are JSON."""

    marks: Markers
    ways: tuple[str, ...]  # texts with {name}, {index} and {arguments} that a grammar allows, the usual first
    head: str  # pattern of the text before the arguments
    tail: str = ""  # pattern of the text after the arguments
    separator: str = ""  # between two calls
    together: bool = False  # one pair of markers is around all calls


@dataclass(frozen=True)
class Syntax:
    """The syntax of calls between two markers. `read` raises ValueError or RecursionError for other text."""

    name: str
    marks: Markers
    read: ReadCalls
    separator: str = ""  # between two calls
    needs_close: bool = False  # a body without its closing marker may be half a call that `read` accepts
    form: CallForm | None = None  # if the arguments are JSON

    def parse(self, body: str, tools: Sequence[Tool], *, closed: bool = True) -> tuple[WrittenCalls, str]:
        """Return the calls of a body, each with its arguments as JSON, and the text after the last one."""
        calls: WrittenCalls = []
        end = 0
        while (start := skip_space(body, end)) < len(body) and (closed or not self.needs_close):
            try:
                found, read_to = self.read(body, start, tools)
                calls += [(name, to_json(arguments)) for name, arguments in found]
            except (ValueError, RecursionError):
                return calls, body[end:]
            end = read_to
        return calls, "" if start == len(body) else body[end:]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse)  # models write line breaks into strings


def to_json(value: Any) -> str:
    """Return `value` as JSON that can be encoded: half a surrogate pair stays an escape.

    Raises ValueError for infinite numbers.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return json.dumps(value, separators=(",", ":")) if SURROGATE.search(text) else text


SURROGATE = re.compile("[\ud800-\udfff]")


def skip_space(text: str, start: int) -> int:
    """Return where the text after space begins."""
    return len(text) - len(text[start:].lstrip(" \t\r\n"))


# --- pieces of Lark

FREE_TEXT = "/(?s:.*)/"


class Rules:
    """The rules of a Lark grammar, by name. `token_id` returns the id of a special token."""

    def __init__(self, token_id: Callable[[str], int | None]) -> None:
        self._token_id = token_id
        self._rules: dict[str, str] = {}
        # Rule names by a schema's JSON and a tool: the tool's name if the schema refers to its parameters,
        # else whether the tool is strict.
        self.values: dict[tuple[str | bool, str], str] = {}

    def define(self, name: str, expression: str, options: str = "") -> str:
        """Define a rule, with llguidance's `options`. Return its name."""
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
    """Return an expression that matches one of `expressions`."""
    different = list(dict.fromkeys(expressions))
    return different[0] if len(different) == 1 else "(" + " | ".join(different) + ")"


def json_value(schema: Mapping[str, Any]) -> str:
    """Return an expression for a JSON value. `schema` has only keywords that llguidance enforces."""
    given = dict(schema)
    options = {**JSON_FORM, **given.pop("x-guidance", {})}
    return "%json " + json.dumps({**given, "x-guidance": options})  # as the last key: order matters


# --- arguments as JSON

CALL_FORMS = {
    "harmony": CallForm(  # gpt-oss: the call is a message
        Markers("<|start|>", "<|call|>"),
        (
            "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}",
            " to=functions.{name}<|channel|>commentary json<|message|>{arguments}",
        ),
        r"(?:[^<]|<\|(?:start|channel)\|>)*?to=functions\.(?P<name>[^\s<]+)"
        r"(?:[^<]|<\|(?:channel|constrain)\|>)*<\|message\|>",
    ),
    "kimi-k2": CallForm(
        Markers("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        (
            "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}"
            "<|tool_call_end|>",
        ),
        r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s<]+?):\d+)\s*<\|tool_call_argument_begin\|>",
        r"<\|tool_call_end\|>",
        together=True,
    ),
    "deepseek-v3.1": CallForm(
        Markers("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",),
        r"<｜tool▁call▁begin｜>(?P<name>[^\s<]+)<｜tool▁sep｜>",
        r"<｜tool▁call▁end｜>",
        together=True,
    ),
    "deepseek-r1": CallForm(
        Markers("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",),
        r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\s<]+)\s*```json\s*",
        r"```\s*<｜tool▁call▁end｜>",
        "\n",
        together=True,
    ),
    "mistral": CallForm(  # from version 11 of the tokenizer on
        Markers("[TOOL_CALLS]", ""),
        ("{name}[ARGS]{arguments}",),
        r"(?P<name>[^\s\[\]{}]+)(?:\[CALL_ID\](?P<id>[^\s\[\]]*))?\[ARGS\]",
    ),
}


def _form_syntax(name: str, form: CallForm) -> Syntax:
    head, tail = re.compile(form.head), re.compile(r"\s*" + form.tail if form.tail else "")

    def read(body: str, start: int, tools: Sequence[Tool]) -> tuple[list[ParsedCall], int]:
        before = head.match(body, start)
        if before is None:
            raise ValueError("no name")
        arguments, end = DECODER.raw_decode(body, skip_space(body, before.end()))
        after = tail.match(body, end)
        if after is None or not isinstance(arguments, dict):
            raise ValueError("the call does not end, or its arguments are not an object")
        return [(before["name"], arguments)], after.end()

    return Syntax(name, form.marks, read, form.separator, form=form)


def _read_list(body: str, start: int, tools: Sequence[Tool]) -> tuple[list[ParsedCall], int]:
    """Read a list: [{"name": "f", "arguments": {"n": 1}}], [{"f": {"n": 1}}], or with Cohere's keys."""
    given, end = DECODER.raw_decode(body, start)
    calls: list[ParsedCall] = []
    for call in given if isinstance(given, list) else ():
        pair = next(iter(call.items())) if isinstance(call, dict) and len(call) == 1 else (None, None)
        for name_key, arguments_key in (("name", "arguments"), ("tool_name", "parameters")):
            if isinstance(call, dict) and name_key in call:
                pair = call[name_key], call.get(arguments_key, {})
        name, arguments = pair
        if not isinstance(name, str) or not name or not isinstance(arguments, dict) or SURROGATE.search(name):
            raise ValueError("no call")
        calls.append((name, arguments))
    if not calls:
        raise ValueError("no list of calls")
    return calls, end


def _expression(way: str, name: str, arguments: str, rules: Rules) -> str:
    """Return one of the `ways` of a form as an expression."""
    fields = {"{name}": quoted(name), "{index}": "/[0-9]+/", "{arguments}": arguments}
    parts: list[str] = []
    tokens = r"(<[|｜][^<>]+[|｜]>|\[[A-Z_]+\])"  # special tokens within a way
    for field in filter(None, re.split(r"(\{(?:name|index|arguments)\})", way)):
        texts: Sequence[str] = [] if field in fields else list(filter(None, re.split(tokens, field)))
        parts += [fields[field]] if field in fields else []
        parts += [rules.token(text) if re.fullmatch(tokens, text) else quoted(text) for text in texts]
    return " ".join(parts)


def form_call(form: CallForm) -> Callable[[Tool, Rules], str]:
    """Return a function: tool and rules -> expression of a call, without the markers around it."""

    def write(tool: Tool, rules: Rules) -> str:
        arguments = rules.add("arguments", json_value(tool.parameters))
        ways = [_expression(way, tool.name, arguments, rules) for way in form.ways]
        return either([f"({way})" for way in ways] if len(ways) > 1 else ways)

    return write


JSON_SYNTAXES = (
    Syntax("mistral-list", Markers("[TOOL_CALLS]", ""), _read_list),
    Syntax("nemotron", Markers("<TOOLCALL>", "</TOOLCALL>"), _read_list),
    Syntax("cohere", Markers("<|START_ACTION|>", "<|END_ACTION|>"), _read_list),
    Syntax("apertus", Markers("<|tools_prefix|>", "<|tools_suffix|>"), _read_list),
    *(_form_syntax(name, form) for name, form in CALL_FORMS.items()),
)
