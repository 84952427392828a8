"""Write the demands of a request's tools on the answer as a Lark grammar for llguidance.

Calls match their schemas in the syntaxes of CALLS; in others what demands that is refused. Values that are
not JSON (Gemma, Qwen3-Coder) are limited by the common keywords of JSON Schema; a strict tool with another
one is refused by its name, and for any other tool what cannot be enforced is left out. `oneOf` counts as
`anyOf`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mlx_spec.apps.server.errors import Failure, invalid, unsupported
from mlx_spec.apps.server.request import OutputFormat, Tool, ToolUse
from mlx_spec.apps.server.tool_formats import ToolFormat, close_objects, resolve, schema_types, type_of
from mlx_spec.grammar.sandbox import JSON_FORM

# One way to write white space: what follows from it is drafted for nothing.
JSON_OPTIONS = {**JSON_FORM, "coerce_one_of": True}
UNIONS = ("anyOf", "oneOf", "allOf")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
OF_TYPE: Mapping[str, tuple[str, ...]] = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "minItems", "maxItems"),
    "string": ("minLength", "maxLength"),
    "number": BOUNDS,
    "integer": BOUNDS,
    "boolean": (),
    "null": (),
}
SUPPORTED = {"type", "enum", "const", "$ref", "nullable", *UNIONS}.union(*OF_TYPE.values())
UNSUPPORTED = """pattern format not if then else patternProperties propertyNames minProperties maxProperties
dependencies dependentRequired dependentSchemas contains minContains maxContains uniqueItems prefixItems
additionalItems unevaluatedItems unevaluatedProperties $dynamicRef $recursiveRef""".split()
MAX_DEPTH = 24  # levels of a schema that are enforced: each level multiplies the rules
FREE_KEY = r"/[A-Za-z0-9_$@.\/-]+/"  # names that a model may choose
FREE_TEXT = "/(?s:.*)/"
GEMMA_QUOTE = '<|"|>'
CODER_CLOSE = "</parameter>"


def answer_grammar(format: ToolFormat, use: ToolUse, answer: OutputFormat | None = None) -> str | None:
    """Return a grammar of the whole answer, after the thinking; None if all of it is free.

    required and named: calls and nothing else, one of them unless `parallel`. auto: any text, or what
    `answer` demands, and calls, each of a tool and as its schema says. Raises Failure 400 that names what
    cannot be enforced, unless that is optional.
    """
    if use.choice == "none":
        return None
    try:
        return _answer_grammar(format, use, answer)
    except Failure:
        if is_optional(use, answer):
            return None
        raise


def is_optional(use: ToolUse, answer: OutputFormat | None) -> bool:
    """Return True if a request does not demand that its calls match their schemas."""
    is_strict = any(tool.strict for tool in use.tools)
    return use.choice == "auto" and use.parallel and answer is None and not is_strict


def _answer_grammar(format: ToolFormat, use: ToolUse, answer: OutputFormat | None) -> str:
    tools = [tool for tool in use.tools if use.named in (None, tool.name)]
    if not tools:
        raise invalid(f"tool_choice: {use.named!r} is none of the tools", "tool_choice")
    if format.syntax.name not in CALLS:
        raise unsupported(
            f"the calls of this model ({format.syntax.name}) cannot be enforced: leave out tool_choice, "
            "strict, parallel_tool_calls and the response format, or ask another model",
            "tools",
        )
    for tool in tools:
        if (problem := _schema_error(tool.parameters)) is not None:
            raise invalid(f"tools: the parameters of {tool.name!r} are no JSON schema: {problem}", "tools")
    rules = Rules()
    bodies = [CALLS[format.syntax.name](tool, rules) for tool in tools]
    calls = [rules.add("call", f"<[{format.open}]> {body} <[{format.close}]>") for body in bodies]
    call = rules.define("any_call", either(calls))
    separator = quoted(format.syntax.separator) + " " if format.syntax.separator else ""
    several = f"{call} ({separator}{call})*" if use.parallel else call
    if use.choice == "required":
        start = several
    elif answer is not None:
        start = f"{_answer(answer)} | {several}"
    else:
        ids = ",".join(map(str, sorted({format.open, format.close} | format.ends)))
        others = f"<[^{ids}]>"  # any token but these
        start = f"({others} | {call})*" if use.parallel else f"({others})* ({call})?"
    return f"start: {start}\n{rules.source()}"


def answer_schema(schema: str) -> str:
    """Return a JSON schema, as JSON, as it is enforced: closed objects, "oneOf" as "anyOf"."""
    options = {"x-guidance": {"coerce_one_of": True}} if '"oneOf"' in schema else {}
    try:
        found = json.loads(schema)
    except (ValueError, RecursionError):
        return schema
    return json.dumps({**options, **close_objects(found)}) if isinstance(found, dict) else schema


def _answer(format: OutputFormat) -> str:
    if format.kind == "json_object":
        return json_value({"type": "object"})
    if format.kind == "json_schema":
        schema = json.loads(format.text)
        if not isinstance(schema, dict):
            raise invalid("the JSON schema must be a JSON object", format.param)
        return json_value(schema)
    if format.kind == "regex":
        return "/" + format.text.replace("\\/", "/").replace("/", "\\/").replace("\n", "\\n") + "/"
    raise unsupported("a Lark grammar of the answer goes with no tools: leave one of them out", format.param)


# --- pieces of Lark


class Rules:
    """The rules of a grammar, by name."""

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}

    def define(self, name: str, expression: str, options: str = "") -> str:
        """Set the rule of `name`, with llguidance's `options`. Return the name."""
        self._rules[name] = f"{name}{options}: {expression}"
        return name

    def add(self, kind: str, expression: str, options: str = "") -> str:
        """Add a rule under a new name. Return the name."""
        return self.define(f"{kind}_{len(self._rules)}", expression, options)

    def source(self) -> str:
        """Return all rules as text."""
        return "\n".join(self._rules.values()) + "\n"


def quoted(text: str) -> str:
    """Return `text` as a literal."""
    return json.dumps(text, ensure_ascii=False)


def either(expressions: Iterable[str]) -> str:
    """Return one of `expressions`."""
    different = list(dict.fromkeys(expressions))
    return different[0] if len(different) == 1 else "(" + " | ".join(different) + ")"


def json_value(schema: Any, *, lenient: bool = False) -> str:
    """Return a JSON value that `schema` allows; `lenient` leaves out what llguidance cannot enforce."""
    given = close_objects(schema) if isinstance(schema, Mapping) else {"anyOf": [schema]}
    options = {**JSON_OPTIONS, **({"lenient": True} if lenient else {})}
    return "%json " + json.dumps({"x-guidance": options, **given})


# --- calls of one tool, between the markers


def _hermes_call(tool: Tool, rules: Rules) -> str:
    """Return JSON with the spaces that the template writes. llguidance enforces the schema itself."""
    nothing = {} if tool.parameters else {"properties": {}, "additionalProperties": False}
    schema = {"type": "object", **nothing, **tool.parameters}
    arguments = rules.add("arguments", json_value(schema, lenient=not tool.strict))
    head = '\n{"name": ' + json.dumps(tool.name, ensure_ascii=False) + ', "arguments": '
    return f'{quoted(head)} {arguments} "}}\\n"'


def _gemma_call(tool: Tool, rules: Rules) -> str:
    root = {"type": "object", **({} if tool.parameters else {"properties": {}}), **tool.parameters}
    arguments = _GemmaValues(tool, rules).value(root)
    return f"{quoted('call:' + tool.name)} {'any_object' if arguments == 'any' else arguments}"


def _coder_call(tool: Tool, rules: Rules) -> str:
    """Return the parameters in the order of the schema, which must list them."""
    values, schema = _CoderValues(tool, rules), tool.parameters
    for keyword in schema.keys() & {*UNIONS, "$ref", "patternProperties"}:
        values.refuse(keyword)
    required = schema.get("required") or ()
    properties = dict(schema.get("properties") or {})
    properties |= {key: True for key in required if key not in properties}
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


CALLS: Mapping[str, Callable[[Tool, Rules], str]] = {
    "gemma4": _gemma_call,
    "hermes": _hermes_call,
    "qwen3-coder": _coder_call,
}


class _SchemaValues(ABC):
    """Grammar expressions for the values of one tool's parameters.

    Objects have the properties that their schema lists and no more, which the schema allows.
    """

    def __init__(self, tool: Tool, rules: Rules) -> None:
        self.tool, self.rules = tool, rules
        self._references: dict[str, str] = {}

    @abstractmethod
    def any_value(self) -> str: ...

    @abstractmethod
    def literal(self, value: Any) -> str: ...

    @abstractmethod
    def text(self, terminal: str) -> str: ...

    @abstractmethod
    def container(self, kind: str, schema: Mapping[str, Any], depth: int) -> str: ...

    def number(self, schema: Mapping[str, Any]) -> str:
        return json_value(schema, lenient=not self.tool.strict)

    def refuse(self, keyword: str) -> None:
        """Raise Failure 400 if the tool is strict."""
        if self.tool.strict:
            raise unsupported(
                f"tool {self.tool.name!r} is strict, and {keyword} cannot be enforced in the calls of this "
                "model: leave it out of the parameters, or strict out of the tool",
                "tools",
            )

    def value(self, schema: Any, depth: int = 0) -> str:
        """Return a value that `schema` allows."""
        if depth > MAX_DEPTH or schema is False:
            self.refuse("a schema that is false" if schema is False else f"more than {MAX_DEPTH} levels")
            return self.any_value()
        if not isinstance(schema, Mapping):
            return self.any_value()
        for keyword in UNSUPPORTED:
            if schema.get(keyword, False) is not False:
                self.refuse(keyword)
        limits = {key: each for key, each in schema.items() if key in SUPPORTED}
        if limits.pop("nullable", False) is True:
            return either([self.value(limits, depth + 1), self.literal(None)])
        if "$ref" in limits:
            return self._reference(limits, depth)
        for keyword in UNIONS:
            if keyword in limits:
                return self._union(keyword, limits, depth)
        if "const" in limits or "enum" in limits:
            return self._enumerated(limits)
        return self._typed(limits, depth)

    def _reference(self, schema: Mapping[str, Any], depth: int) -> str:
        reference = str(schema["$ref"])
        try:
            found = resolve(reference, self.tool.parameters)
        except KeyError as error:
            message = f"tool {self.tool.name!r}: $ref {reference!r} is not within this schema"
            raise Failure(400, message, param="tools") from error
        rest = {key: each for key, each in schema.items() if key != "$ref"}
        if rest:
            return self.value(self._merge(rest, found), depth + 1)
        if reference not in self._references:  # named before it is read: it may contain itself
            self._references[reference] = self.rules.add("ref", "")
            self.rules.define(self._references[reference], self.value(found, depth + 1))
        return self._references[reference]

    def _union(self, keyword: str, schema: Mapping[str, Any], depth: int) -> str:
        options = schema[keyword]
        if keyword == "allOf" and len(options) > 1:
            self.refuse("allOf")
            return self.any_value()
        rest = {key: each for key, each in schema.items() if key != keyword}
        return either([self.value(self._merge(rest, option), depth + 1) for option in options])

    def _merge(self, rest: Mapping[str, Any], option: Any) -> Any:
        """Both at once. What they say about the same thing must agree."""
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

    def _typed(self, schema: Mapping[str, Any], depth: int) -> str:
        named = sorted(schema_types({"type": schema.get("type")}, {}) & OF_TYPE.keys())
        implied = [kind for kind in OF_TYPE if schema.keys() & set(OF_TYPE[kind])]
        kinds = named or implied[:1]
        if "number" in kinds and "integer" in kinds:
            kinds.remove("integer")
        if not kinds:
            return self.any_value()
        return either([self._of_type(kind, schema, depth) for kind in kinds])

    def _of_type(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        own = {key: schema[key] for key in OF_TYPE[kind] if key in schema}
        if kind == "string":
            least, most = own.get("minLength", 0), own.get("maxLength", "")
            return self.text(f"/(?s:.{{{least},{most}}})/" if own else FREE_TEXT)
        if kind in ("number", "integer"):
            return self.number({"type": kind, **own})
        if kind == "boolean":
            return either([self.literal(True), self.literal(False)])
        return self.literal(None) if kind == "null" else self.container(kind, own, depth)


class _CoderValues(_SchemaValues):
    """Values of Qwen3-Coder, which end with their tag: a string is all that comes before it."""

    end = quoted(f"\n{CODER_CLOSE}\n")

    def any_value(self) -> str:
        return self.text(FREE_TEXT)

    def literal(self, value: Any) -> str:
        if isinstance(value, str) and CODER_CLOSE in value:
            self.refuse(f"a value with {CODER_CLOSE}")
        written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return f"{quoted(written)} {self.end}" if written else self.end

    def number(self, schema: Mapping[str, Any]) -> str:
        return f"{super().number(schema)} {self.end}"

    def text(self, terminal: str) -> str:
        return self.rules.add("text", terminal, f"[suffix={self.end}]")

    def container(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        whole = {"type": kind, **_moved(schema), "$defs": {"parameters": _moved(self.tool.parameters)}}
        return f"{json_value(whole, lenient=not self.tool.strict)} {self.end}"


def _moved(schema: Any) -> Any:
    """Return `schema` with references as they must be where its root is a definition of another schema."""
    if isinstance(schema, list):
        return [_moved(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: _moved(each) for key, each in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        found["$ref"] = "#/$defs/parameters" + reference[1:]
    return found


class _GemmaValues(_SchemaValues):
    """Values of Gemma 4: bare keys, strings between tokens, everything else as JSON writes it."""

    no_quote = r'~/(?s:.*)<\|"\|>(?s:.*)/'  # written in letters the quote would end the string, too

    def any_value(self) -> str:
        scalars = [self.text(FREE_TEXT), self.number({"type": "number"}), '"true"', '"false"', '"null"']
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
        """Keys are sorted as the template sorts them: that is what the model has learnt."""
        properties = dict(schema.get("properties") or {})
        required = schema.get("required") or ()
        properties |= {key: True for key in required if key not in properties}
        if not properties:
            return self._map(schema, depth)
        members = []
        for key in sorted(properties, key=str.lower):
            value = self.value(properties[key], depth + 1)
            members.append((self.rules.add("member", f"{self._key(key)} {value}"), key in required))
        return f'"{{" {self._members(members)} "}}"'

    def _members(self, members: Sequence[tuple[str, bool]]) -> str:
        """Members in order, with commas between those that are there."""
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
        self.rules.define("ANY_KEY", FREE_KEY)
        member = self.rules.add("member", f'ANY_KEY ":" {self.value(more, depth + 1)}')
        return f'"{{" ({member} ("," {member})*)? "}}"'

    def _key(self, key: str) -> str:
        """Bare if it can be."""
        if not key or key != key.strip() or any(character in '{}[],:<"' for character in key):
            return f"{self.literal(key)} " + '":"'
        return quoted(key + ":")


# --- schemas that are none

_SHAPES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("type",), lambda v: isinstance(v, str) or (bool(v) and _is_names(v)), "a name or a list of names"),
    (("required",), lambda v: _is_names(v), "a list of names"),
    (("properties", "$defs", "definitions"), lambda v: isinstance(v, Mapping), "an object"),
    (("enum", *UNIONS), lambda v: isinstance(v, list) and bool(v), "a list that is not empty"),
    (("$ref",), lambda v: isinstance(v, str), "a string"),
    (
        ("minItems", "maxItems", "minLength", "maxLength"),
        lambda v: type(v) is int and v >= 0,
        "a whole number",
    ),
)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _schema_error(schema: Any, depth: int = 0) -> str | None:
    """Return a keyword and what it must be; None if the keywords that are read here have a valid form."""
    if not isinstance(schema, Mapping) or depth > 100:
        return None if isinstance(schema, Mapping | bool) else f"{str(schema)[:32]!r} must be a schema"
    for keywords, fits, what in _SHAPES:
        for keyword in keywords:
            if keyword in schema and not fits(schema[keyword]):
                return f"{keyword} must be {what}"
    for least, most in (("minItems", "maxItems"), ("minLength", "maxLength")):
        if schema.get(least, 0) > schema.get(most, schema.get(least, 0)):
            return f"{least} must not be more than {most}"
    inner = [*schema.get("properties", {}).values(), *schema.get("$defs", {}).values()]
    inner += [each for keyword in UNIONS for each in schema.get(keyword, ())]
    inner += [schema[keyword] for keyword in ("items", "additionalProperties") if keyword in schema]
    found = (_schema_error(each, depth + 1) for each in inner if not isinstance(each, list))
    return next((problem for problem in found if problem), None)
