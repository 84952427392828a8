"""Find the syntax of a model's tool calls, and read calls from answers.

A model has the syntax whose parser reads the probe call that its chat template writes. A call is parsed when
its closing marker comes. Other text between the markers becomes text of the answer, without markup.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import product, zip_longest
from typing import Any
from weakref import WeakKeyDictionary

from mlx_spec.errors import InvalidValue
from mlx_spec.tokenizer import Tokenizer
from mlx_spec.tokenizer.stream import TextPart, TokenText
from mlx_spec.tokenizer.thinking import Markers, MessageMarks

from ..requests.request import Tool, ToolUse
from .answers import Event, TextDelta, ToolCall
from .tool_syntaxes import (
    DECODER,
    JSON_SYNTAXES,
    SURROGATE,
    ParsedCall,
    ReadCalls,
    Syntax,
    to_json,
)

PROBE_ARGUMENTS = {"place": "Bahía", "text": "two words"}
PROBE = Tool(
    "probe_of_calls",
    "A probe.",
    {"type": "object", "properties": {k: {"type": "string"} for k in PROBE_ARGUMENTS}},
)

Message = Mapping[str, Any]


@dataclass(frozen=True)
class ToolFormat:
    """The syntax of one model, with the ids of its tokens."""

    syntax: Syntax
    open: int | None  # token before calls; None if headers of messages mark them, or the answer is a call
    close: int | None  # token after calls; None if a call ends with the answer or the next call
    results_in_calls: bool  # the template reads results from the message with the calls ("tool_responses")
    token: Callable[[str], int | None]  # id of a token by its name
    short_ids: bool = False  # the template takes ids of nine letters only

    @property
    def in_headers(self) -> bool:
        """Return True if headers of messages mark calls."""
        return self.open is None and not self.is_answer

    @property
    def is_answer(self) -> bool:
        """Return True if the whole answer is a call."""
        return self.syntax is ANSWER_SYNTAX

    def new_id(self) -> str:
        """Return an id for a call to which the model gives none."""
        return secrets.token_hex(5)[:9] if self.short_ids else f"call_{secrets.token_hex(12)}"


class ToolCallReader:
    """Reads the tool calls of one choice: parts of the kinds in `kinds` in, events out.

    Text that is not a call, or a call that was cut off, becomes text of the answer, without markup that would
    puzzle a user. A cut does not change the finish reason: it stays "length".
    """

    def __init__(self, index: int, format: ToolFormat, tools: Sequence[Tool], *, one: bool = False) -> None:
        self._index, self._format, self._syntax, self._tools = index, format, format.syntax, tools
        self._parts: list[TextPart] = []  # since the opening marker
        self._one = one  # True if the answer ends with its first call
        self.kinds = ("answer",) if format.is_answer else ("call",)  # of the text to read
        self.complete = 0  # calls so far

    def is_last(self, body: str) -> bool:
        """Return True if the answer ends with this body of a call."""
        return self._one and bool(self._syntax.parse(body, self._tools)[0])

    def read(self, part: TextPart) -> list[Event]:
        """Return the events that a part completes."""
        self._parts.append(part)
        return self._take(closed=True) if part.closed else []

    def end(self) -> list[Event]:
        """Return the events of a body that the end of the answer cut off."""
        return self._take(closed=False) if self._parts else []

    def _take(self, *, closed: bool) -> list[Event]:
        body = "".join(part.text for part in self._parts)
        logprobs = tuple(token for part in self._parts for token in part.logprobs)
        self._parts = []
        calls, rest = self._syntax.parse(body, self._tools, closed=closed)
        if self._one and calls:
            calls, rest = calls[:1], ""
        form, events = self._syntax.form, list[Event]()
        heads = () if form is None else re.finditer(form.head, body)
        own_ids = [found.groupdict().get("id") for found in heads]
        for (name, arguments), own in zip_longest(calls, own_ids[: len(calls)]):
            call_id = own or self._format.new_id()
            events.append(ToolCall(self._index, self.complete, call_id, name, arguments))
            self.complete += 1
        if (text := without_markup(rest, self._syntax.marks)) or (logprobs and not calls):
            spans = (TokenText(text, None, 0),)
            events.append(TextDelta(self._index, "answer", text, () if calls else logprobs, spans))
        return events


# Special tokens such as <|tool_call>, and the tags of calls, also a tag that the end of the answer cut off.
_MARKUP = re.compile(
    r"\A[^<]*(?:<\|(?:start|channel|constrain)\|>[^<]*)*<\|message\|>"  # the header of a message
    r"|<[|｜]tool[^<>|｜]*[|｜]>|\[(?:ARGS|CALL_ID)\]|<\|[^<>|]+\|?>|<\w+\|>"
    r"|</?(?:atem:)?(?:function|parameter|invoke|(?:longcat_)?arg_(?:key|value)|escape)\b[^<>]*(?:>|$)"
)


def without_markup(body: str, markers: Markers) -> str:
    """Return the text of a body that is not a call, as a user may see it."""
    body = body.replace(markers.open, "")
    return _MARKUP.sub(lambda found: '"' if found[0] == '<|"|>' else "", body)


# --- the format of a model, and its prompt

_known: WeakKeyDictionary[Tokenizer, ToolFormat | None] = WeakKeyDictionary()
_lock = threading.Lock()


def find_tool_format(tokenizer: Tokenizer) -> ToolFormat | None:
    """Return the tool format of a model; None if its template writes no calls, or in an unknown syntax."""
    with _lock:
        if tokenizer not in _known:
            _known[tokenizer] = _find_format(tokenizer)
        return _known[tokenizer]


def format_of(use: ToolUse, tokenizer: Tokenizer) -> ToolFormat | None:
    """Return the format of the calls in an answer; None if they have no format that is known.

    If the template writes no calls, a grammar can still force one: the answer is its JSON.
    """
    found = find_tool_format(tokenizer)
    if found is None and use.choice == "required":
        return ToolFormat(ANSWER_SYNTAX, None, None, False, tokenizer.token_id)
    return found


def definition(tool: Tool) -> dict[str, Any]:
    """Return a tool as chat templates take it, always with a description, because templates print it."""
    function = {"name": tool.name, "description": tool.description or "", "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def _find_format(tokenizer: Tokenizer) -> ToolFormat | None:
    if not tokenizer.chats:
        return None
    question = {"role": "user", "content": "?"}
    function = {"name": PROBE.name, "arguments": PROBE_ARGUMENTS}
    # Kimi K2's template writes the name only as a part of the id. Mistral's templates want nine letters.
    probe_ids = ("call_0", f"functions.{PROBE.name}:0", "abcdefghi")
    for content, call_id in product((None, ""), probe_ids):  # some templates refuse one or the other
        call = {"id": call_id, "type": "function", "function": function}
        calling = {"role": "assistant", "content": content, "tool_calls": [call]}
        written = _render(tokenizer, [question, calling])
        if PROBE.name not in written:
            continue
        for syntax in _syntaxes():
            open, close = tokenizer.token_id(syntax.marks.open), tokenizer.token_id(syntax.marks.close)
            has_marks = open is not None and (close is not None or not syntax.marks.close)
            if has_marks and _reads_probe(syntax, written):
                result = "result of the probe"
                answered = {**calling, "tool_responses": [{"name": PROBE.name, "response": result}]}
                folds = result in _render(tokenizer, [question, answered])
                in_headers = isinstance(tokenizer.marks, MessageMarks) and tokenizer.marks.marks_calls
                return ToolFormat(
                    syntax,
                    None if in_headers else open,
                    None if in_headers else close,
                    folds,
                    tokenizer.token_id,
                )
    return None


def _render(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> str:
    try:
        return tokenizer.decode_raw(tokenizer.prompt(messages, tools=[definition(PROBE)]))
    except InvalidValue:
        return ""


def _reads_probe(syntax: Syntax, written: str) -> bool:
    """Return True if a part of `written` is the probe call. Other parts may explain the syntax."""
    bodies = [_before(part, syntax.marks.close) for part in written.split(syntax.marks.open)[1:]]
    expected = [(PROBE.name, to_json(PROBE_ARGUMENTS))]
    read = [syntax.parse(body, [PROBE]) for body in bodies]
    return any(calls == expected and (not rest or not syntax.marks.close) for calls, rest in read)


def _before(text: str, mark: str) -> str:
    return text.split(mark)[0] if mark else text


def _syntaxes() -> list[Syntax]:
    """Return all syntaxes, mlx-lm's last: some of its parsers read a call in nearly any text."""
    seed = Syntax("seed", Markers("<seed:tool_call>", "</seed:tool_call>"), _read_coder, "\n")
    found = [*SYNTAXES, seed, *JSON_SYNTAXES]
    # Modules of mlx_lm.tool_parsers whose markers are tokens. The others are left out: minicpm5 and kimi_k3
    # have other markers, mistral and kimi_k2 are in CALL_FORMS of `tool_syntaxes.py`, laguna is glm47;
    # json_tools, gemma4 and qwen3_coder lose text that `_read_hermes`, `_read_gemma` and `_read_coder` keep.
    library_parsers = ("glm47", "longcat", "minimax_m2", "function_gemma", "pythonic", "muse_spark")
    for name in library_parsers:
        module = import_module(f"mlx_lm.tool_parsers.{name}")  # imports MLX
        marks = Markers(module.tool_call_start, module.tool_call_end)
        found.append(Syntax(name, marks, _library_reader(module.parse_tool_call), needs_close=True))
    return found


# --- syntaxes


def _library_reader(parse: Callable[[str, list[dict[str, Any]]], Any]) -> ReadCalls:
    """Return a reader that calls a parser of mlx-lm: it takes a whole body and may return several calls."""

    def read(body: str, start: int, tools: Sequence[Tool]) -> tuple[list[ParsedCall], int]:
        try:
            found = parse(body.strip(), [definition(tool) for tool in tools])
            found = found if isinstance(found, list) else [found]
            calls = [(call["name"], call["arguments"]) for call in found]
        except Exception as error:  # on other text the parsers raise anything
            raise ValueError("no call") from error
        names = {tool.name for tool in tools}  # without this check the first word of any text may be a call
        if any(name not in names or not isinstance(arguments, dict) for name, arguments in calls):
            raise ValueError("no call of a tool")
        return calls, len(body)

    return read


def _read_hermes(body: str, start: int, tools: Sequence[Tool]) -> tuple[list[ParsedCall], int]:
    """Read {"name": "f", "arguments": {"n": 1}}.

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
    return [(name, arguments or {})], end


_GEMMA_NAME = re.compile(r'call:([^\s{}\[\],<>"]+)\s*(?=\{)')
_GEMMA_TOKEN = re.compile(
    r'<\|"\|>(?P<text>.*?)<\|"\|>|(?P<json>"(?:[^"\\]|\\.)*")|(?P<bare>[^{}\[\],:<"]+)|[{}\[\],:]', re.DOTALL
)


def _read_gemma(body: str, start: int, tools: Sequence[Tool]) -> tuple[list[ParsedCall], int]:
    """Read call:f{key:<|"|>text<|"|>,n:1,list:[2,3]}: bare keys, quotes that are tokens, else JSON.

    Ours, because mlx_lm's gemma4 refuses dashes in keys, dots in names and spaces after commas, and drops
    the text around calls.
    """
    name = _GEMMA_NAME.match(body, start)
    if name is None:
        raise ValueError("no name")
    at, depth = name.end(), 0
    found: list[str] = []
    while not found or depth:
        token = _GEMMA_TOKEN.match(body, at)
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
        found.append(written)
    arguments = DECODER.decode("".join(found))
    return [(name[1], arguments)], at


_CODER_NAME = re.compile(r"<function=([^<>]+)>\s*")
_CODER_PARAMETER = re.compile(r"<parameter=([^<>]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_CODER_END = "</function>"


def _read_coder(body: str, start: int, tools: Sequence[Tool]) -> tuple[list[ParsedCall], int]:
    """Read <function=f><parameter=n>1</parameter></function>. The schema tells which values are not strings.

    Ours, because mlx_lm's qwen3_coder reads numbers of a union as strings, and the string "null" as null.
    """
    head = _CODER_NAME.match(body, start)
    name = head[1].strip() if head else ""
    if head is None or not name:
        raise ValueError("no name")
    schema = next((tool.parameters for tool in tools if tool.name == name), {})
    at = head.end()
    arguments: dict[str, Any] = {}
    while not body.startswith(_CODER_END, at):
        parameter = _CODER_PARAMETER.match(body, at)
        key = parameter[1].strip() if parameter else ""
        if parameter is None or not key or key in arguments:
            raise ValueError("no parameter, or one that comes twice")
        arguments[key] = _typed(parameter[2], _parameter_types(schema, key))
        at = parameter.end()
    return [(name, arguments)], at + len(_CODER_END)


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
    found = "number" if type_of(value) == "integer" else type_of(value)
    known = {"number" if each == "integer" else each for each in types}
    return value if found in known and found != "string" else text


def _parameter_types(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """Return the types of a parameter: without a type object, array or string; if it is unknown, string."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or key not in properties:
        return frozenset({"string"})
    return schema_types(properties[key], schema) or frozenset({"object", "array", "string"})


# The answer is a call: for models whose template has no calls, if a request forces one.
ANSWER_SYNTAX = Syntax("answer", Markers("", ""), _read_hermes)
SYNTAXES = (
    Syntax("gemma4", Markers("<|tool_call>", "<tool_call|>"), _read_gemma),
    Syntax("hermes", Markers("<tool_call>", "</tool_call>"), _read_hermes, "\n"),
    Syntax("qwen3-coder", Markers("<tool_call>", "</tool_call>"), _read_coder, "\n"),
)


# --- JSON and its schemas


_TYPE_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}


def resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the schema that a reference such as "#/$defs/Point" stands for. Raises KeyError."""
    found: Any = root if reference == "#" or reference.startswith("#/") else None
    for part in reference.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping):
            raise KeyError(reference)
        found = found[key]
    if found is None:
        raise KeyError(reference)
    return found


def schema_types(schema: Any, root: Mapping[str, Any], seen: set[str] | None = None) -> frozenset[str]:
    """Return the types that a schema names by `type`, values, references or alternatives; empty for any type.

    `seen` are the references that were followed. Each is followed once, at most 32 in all.
    """
    seen = set() if seen is None else seen
    if not isinstance(schema, Mapping) or len(seen) > 32:
        return frozenset()
    named = schema.get("type")
    found = {each for each in (named if isinstance(named, list) else [named]) if isinstance(each, str)}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and not found:
        found = {type_of(value) for value in values}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        seen.add(reference)
        try:
            found |= schema_types(resolve(reference, root), root, seen)
        except KeyError:
            return frozenset()
    for keyword in ("anyOf", "oneOf", "allOf"):
        for option in _as_list(schema.get(keyword)):
            found |= schema_types(option, root, seen)
    return frozenset(found | ({"null"} if schema.get("nullable") is True else set()))


def _as_list(given: Any) -> list[Any]:
    return given if isinstance(given, list) else []


def type_of(value: Any) -> str:
    """Return the JSON type of `value`."""
    return "null" if value is None else _TYPE_NAMES.get(type(value), "string")
