"""Write a Lark grammar for llguidance that makes an answer match the tools and format of its request.

Only the syntaxes in CALLS can be enforced; with other models a request that needs it is refused. In values
that are not JSON (Gemma, Qwen3-Coder) only the common keywords of JSON Schema are enforced. A strict tool or
format with another keyword is refused by the name of the keyword. Otherwise the keyword is left out, with a
line in the log.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlx_spec.errors import InvalidValue
from mlx_spec.grammar import Grammar
from mlx_spec.grammar.json_schema import enforceable, enforced

from ..errors import LOG, Failure, invalid, unsupported
from ..requests.parameters import warn_once
from ..requests.request import OutputFormat, Tool, ToolUse
from .models import CompileGrammar
from .tool_formats import ToolFormat, resolve, schema_types, type_of
from .tool_syntaxes import (
    CALL_FORMS,
    FREE_TEXT,
    Rules,
    either,
    form_call,
    json_value,
    quoted,
)

UNIONS = ("anyOf", "allOf")
OF_TYPE: Mapping[str, tuple[str, ...]] = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength"),
    **dict.fromkeys(
        ("number", "integer"),
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    ),
    "boolean": (),
    "null": (),
}
SUPPORTED = {"type", "enum", "const", "$ref", *UNIONS}.union(*OF_TYPE.values())
FREE_KEY = r"/[A-Za-z0-9_$@.\/-]+/"  # keys that the model may choose itself
GEMMA_QUOTE = '<|"|>'


def answer_grammar(format: ToolFormat, use: ToolUse, answer: OutputFormat | None = None) -> str | None:
    """Return a grammar of the whole answer after the thinking; None if the answer is free.

    With `required` or a named tool the answer is calls only, a single one unless `parallel`. With `auto` it
    is calls or what `answer` demands; without `answer`, calls within free text. Each call matches the schema
    of its tool. Raises Failure (400) that names what cannot be enforced, unless that is optional.
    """
    if use.choice == "none" or (format.open is None and is_optional(use, answer)):
        return None  # without an opening token a grammar would have to read every token of the thinking
    try:
        return _answer_grammar(format, use, answer)
    except Failure:
        if is_optional(use, answer):
            return None
        raise


def is_optional(use: ToolUse, answer: OutputFormat | None) -> bool:
    """Return True if a request does not demand that its calls match their schemas."""
    is_strict = any(tool.strict for tool in use.tools)
    return use.choice == "auto" and answer is None and not is_strict


def compile_failure(error: InvalidValue, param: str) -> Failure:
    """Return the failure for a grammar of calls that does not compile, without the text of the grammar."""
    around = r"^.*failed to compile JSON schema: (Unsatisfiable schema: )?| 1 \| start: .*$"
    reason = re.sub(around, "", str(error))
    return invalid(f"{param}: the schemas cannot be enforced: {reason}", param)


def _answer_grammar(format: ToolFormat, use: ToolUse, answer: OutputFormat | None) -> str:
    tools = [tool for tool in use.tools if use.named in (None, tool.name)]
    if format.syntax.name not in CALLS:
        raise unsupported(
            f"the calls of this model ({format.syntax.name}) cannot be enforced: leave out tool_choice, "
            "strict and the response format, or ask another model",
            "tools",
        )
    rules, form, write = Rules(format.token), format.syntax.form, CALLS[format.syntax.name]
    optional = is_optional(use, answer)
    combine = form is not None or write in (_hermes_call, _json_call)  # the arguments are JSON
    bodies = [write(_enforceable(tool, optional=optional, combine=combine), rules) for tool in tools]
    if format.is_answer:
        return f"start: {either(bodies)}\n{rules.source()}"
    if format.in_headers:
        return _messages(use, answer, bodies, rules)
    opening, closing = (f"<[{i}]>" if i is not None else "" for i in (format.open, format.close))
    separator = quoted(format.syntax.separator) + " " if format.syntax.separator else ""
    if form is not None and form.together and use.parallel:
        body = rules.define("body", either(bodies))
        bodies, separator = [f"{body} ({separator}{body})*"], ""
    calls = [rules.add("call", f"{opening} {body} {closing}") for body in bodies]
    call = rules.define("any_call", either(calls))
    several = f"{call} ({separator}{call})*" if use.parallel else call
    if use.choice == "required":
        start = several
    elif answer is not None:
        start = f"{_answer(answer)} | {several}"
    else:  # the text around calls is not parsed
        start = f"({call})*" if use.parallel else f"({call})?"
    return f"start: {start}\n{rules.source()}"


def _messages(use: ToolUse, answer: OutputFormat | None, calls: Sequence[str], rules: Rules) -> str:
    """Return the grammar of gpt-oss's messages after the first <|start|>assistant: at most one call."""
    start, channel, body, end = map(rules.token, ("<|start|>", "<|channel|>", "<|message|>", "<|end|>"))
    is_free = answer is None and use.choice == "auto"  # there may be a preamble
    names = ['"analysis"', '"commentary"'] if is_free else ['"analysis"']
    before = rules.define("message", f'{channel} {either(names)} {body} FREE_TEXT {end} {start} "assistant"')
    rules.define("FREE_TEXT", FREE_TEXT)
    written = "FREE_TEXT" if answer is None else rules.define("answer", _answer(answer))
    final = f'{channel} "final" (" " {rules.token("<|constrain|>")}? "json")? {body} {written}'
    ways = [*calls] if use.choice == "required" else [*calls, final]
    return f"start: {before}* {either(ways)}\n{rules.source()}"


def answer_schema(schema: str, *, strict: bool = True, param: str = "response_format") -> str:
    """Return a JSON schema, as JSON, in the form that is enforced: objects are closed.

    Leaves out what no grammar enforces, and logs it with `param`, the field of the body. Raises InvalidValue
    instead if the schema is `strict`, and for a text that is not a schema.
    """
    found, unenforced = enforced(schema, closed=True)
    if unenforced and strict:
        strict_fields = ("response_format", "text.format")  # fields that may have `strict`
        way = ", or give strict false" if param.startswith(strict_fields) else ""
        raise InvalidValue(f"the JSON schema cannot be enforced: {unenforced[0]}: leave it out{way}")
    for each in unenforced:
        warn_once(f"{param}: not enforced: {each}")
    return found


def compile_format(format: OutputFormat, compile: CompileGrammar) -> Grammar:
    """Return the grammar of a format. Raises InvalidValue.

    If a schema that is not strict does not compile, such as a very large one, only its type is enforced.
    """
    if format.kind != "json_schema":
        return compile(format.kind, format.text)
    source = answer_schema(format.text, strict=format.strict, param=format.param)
    try:
        return compile(format.kind, source)
    except InvalidValue as error:
        if format.strict or "Unsatisfiable" in str(error):
            raise
        LOG.warning("%s: only the type of the answer is enforced: %s", format.param, error)
        types = {key: each for key, each in json.loads(source).items() if key == "type"}
        return compile(format.kind, json.dumps(types))


def _enforceable(tool: Tool, *, optional: bool, combine: bool) -> Tool:
    """Return a tool with its parameters in the form that is enforced.

    Raises Failure (400) for what cannot be enforced. If that is `optional`, any object is allowed instead.
    """
    nothing = {} if tool.parameters else {"properties": {}, "additionalProperties": False}
    root = {"type": "object", **nothing, **tool.parameters, "nullable": False}
    try:
        found, unenforced = enforceable(root, closed=True, combine=combine)
    except InvalidValue as error:
        message = f"tools: the parameters of {tool.name!r} cannot be enforced: {error}"
        if not optional:
            raise invalid(message, "tools") from error
        warn_once(message)
        return replace(tool, parameters={"type": "object"})
    for each in unenforced:
        if tool.strict:
            raise unsupported(
                f"tool {tool.name!r} is strict, and {each.keyword} cannot be enforced: {each}: leave it out "
                "of the parameters, or strict out of the tool",
                "tools",
            )
        warn_once(f"tool {tool.name!r}: not enforced: {each}")
    return replace(tool, parameters=found if isinstance(found, dict) else {})


def _answer(format: OutputFormat) -> str:
    if format.kind == "json_object":
        return json_value({"type": "object"})
    if format.kind == "json_schema":
        try:
            source = answer_schema(format.text, strict=format.strict, param=format.param)
        except InvalidValue as error:
            raise invalid(str(error), format.param) from error
        return json_value(json.loads(source))
    if format.kind == "regex":
        return "/" + format.text.replace("\\/", "/").replace("/", "\\/").replace("\n", "\\n") + "/"
    raise unsupported("a Lark grammar of the answer goes with no tools: leave one of them out", format.param)


# --- calls of one tool, between the markers


def _json_call(tool: Tool, rules: Rules) -> str:
    """Return JSON with the spaces that templates write. llguidance enforces the schema itself."""
    arguments = rules.add("arguments", json_value(tool.parameters))
    head = '{"name": ' + json.dumps(tool.name, ensure_ascii=False) + ', "arguments": '
    return f'{quoted(head)} {arguments} "}}"'


def _hermes_call(tool: Tool, rules: Rules) -> str:
    return f'"\\n" {_json_call(tool, rules)} "\\n"'


def _gemma_call(tool: Tool, rules: Rules) -> str:
    return f"{quoted('call:' + tool.name)} {_GemmaValues(tool, rules).value(tool.parameters)}"


def _coder_call(tool: Tool, rules: Rules) -> str:
    """Return a call with its parameters in the order of the schema, which must list them."""
    values, schema = _CoderValues(tool, rules), tool.parameters
    for keyword in schema.keys() & {*UNIONS, "$ref", "patternProperties"}:
        values.refuse(keyword)
    required = schema.get("required") or ()
    properties = _allowed(schema, required)
    found = quoted(f"\n<function={tool.name}>\n")
    for key, each in properties.items():
        if not key.strip() or any(character in "<>" for character in key):
            values.refuse(f"the parameter name {key!r}")
            continue
        member = f"{quoted(f'<parameter={key}>' + chr(10))} {values.value(each)}"
        found += f" {member}" if key in required else f" ({member})?"
    if schema and not properties and schema.get("additionalProperties", "properties" not in schema):
        rules.define("ANY_KEY", FREE_KEY)
        found += f' ("<parameter=" ANY_KEY ">\\n" {values.any_value()})*'
    return found + ' "</function>\\n"'


def _allowed(schema: Mapping[str, Any], required: Sequence[str]) -> dict[str, Any]:
    """Return the allowed properties with their schemas; required ones may not be listed in the schema."""
    listed = schema.get("properties") or {}
    allowed = {key: each for key, each in listed.items() if each is not False or key in required}
    return allowed | {key: True for key in required if key not in listed}


CALLS: Mapping[str, Callable[[Tool, Rules], str]] = {
    "answer": _json_call,
    "gemma4": _gemma_call,
    "hermes": _hermes_call,
    "qwen3-coder": _coder_call,
    **{name: form_call(form) for name, form in CALL_FORMS.items()},
}


class _SchemaValues(ABC):
    """Grammar expressions for the values of one tool's parameters.

    Objects have only the properties that their schema lists, also if the schema would allow more.
    """

    def __init__(self, tool: Tool, rules: Rules) -> None:
        self.tool, self.rules = tool, rules

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
            unsupported = ("pattern", "patternProperties", "minProperties", "maxProperties")
            for keyword in unsupported:
                if schema.get(keyword, False) is not False:
                    self.refuse(keyword)
            limits = {key: each for key, each in schema.items() if key in SUPPORTED}
            written = json.dumps(limits)
            key = (self.tool.name if '"$ref"' in written else self.tool.strict, written)
            if key not in known:  # its rule is named first, because a schema may contain itself
                known[key] = self.rules.add("value", "")
                self.rules.define(known[key], self._limited(limits))
            return known[key]
        return self.any_value()

    def _limited(self, schema: dict[str, Any]) -> str:
        if "$ref" in schema:
            reference = schema.pop("$ref")
            try:
                found = resolve(reference, self.tool.parameters)
            except KeyError as error:
                message = f"tool {self.tool.name!r}: $ref {reference!r} is not within this schema"
                raise invalid(message, "tools") from error
            return self.value(self._merge(schema, found))
        for keyword in UNIONS:
            options = [each for each in schema.pop(keyword, []) if each is not False]
            if keyword == "allOf" and len(options) > 1:
                self.refuse("allOf")
                return self._typed({"type": schema.get("type")})
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
        values = [schema["const"]] if "const" in schema else schema["enum"]
        allowed = schema_types({"type": schema.get("type")}, {})
        allowed |= {"integer"} if "number" in allowed else set()
        fitting = [value for value in values if not allowed or type_of(value) in allowed]
        if not fitting:
            self.refuse("enum")
            return self.any_value()
        return either(map(self.literal, fitting))

    def _typed(self, schema: Mapping[str, Any]) -> str:
        named = sorted(schema_types({"type": schema.get("type")}, {}) & OF_TYPE.keys())
        implied = [kind for kind in OF_TYPE if schema.keys() & set(OF_TYPE[kind])]
        kinds = named or implied[:1]
        if "number" in kinds and "integer" in kinds:
            kinds.remove("integer")
        return either([self._of_type(kind, schema) for kind in kinds]) if kinds else self.any_value()

    def _of_type(self, kind: str, schema: Mapping[str, Any]) -> str:
        own = {key: schema[key] for key in OF_TYPE[kind] if key in schema}
        if kind == "string":
            least, most = own.get("minLength", 0), own.get("maxLength", "")
            return self.text(f"/(?s:.{{{least},{most}}})/" if own else FREE_TEXT)
        if kind in ("object", "array"):
            return self.container(kind, own)
        return self.scalar({"type": kind, **own})


class _CoderValues(_SchemaValues):
    """Values of Qwen3-Coder: a string is all text before the closing tag."""

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
        whole = {"type": kind, **schema}
        if '"$ref"' in json.dumps(schema):
            whole["$defs"] = {"parameters": self.tool.parameters}
        # References start at the parameters. Quotes within strings are escaped, so none looks like a key.
        moved = json.dumps(whole).replace('"$ref": "#', '"$ref": "#/$defs/parameters')
        return self.scalar(json.loads(moved))


class _GemmaValues(_SchemaValues):
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
            if GEMMA_QUOTE in value:
                self.refuse(f"a value with {GEMMA_QUOTE}")
            return f"{GEMMA_QUOTE} {quoted(value)} {GEMMA_QUOTE}" if value else f"{GEMMA_QUOTE} {GEMMA_QUOTE}"
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
        return f"{GEMMA_QUOTE} {name} {GEMMA_QUOTE}"

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
        found = f'"[" {item} ("," {item}){{{max(least - 1, 0)},{more}}} "]"'
        return found if least > 0 else either(['"[]"', found])

    def _object(self, schema: Mapping[str, Any]) -> str:
        """Return an object with its keys in the order of the template, which the model has learnt."""
        required = schema.get("required") or ()
        properties = _allowed(schema, required)
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
        found = either(starts)
        return found if any(required for _, required in members) else f"({found})?"

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
