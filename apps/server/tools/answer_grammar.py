"""Write a Lark grammar for llguidance that makes an answer match the tools and format of its request.

Only syntaxes with `write` can be enforced; with other models a request that needs it is refused. A strict
tool or format with a keyword that no grammar enforces is refused by the name of the keyword. Otherwise the
keyword is left out, with a line in the log.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from mlx_spec.errors import InvalidValue
from mlx_spec.grammar import Grammar, GrammarKind
from mlx_spec.grammar.json_schema import enforceable, enforced

from ..errors import LOG, Failure, invalid, invalid_field, unsupported
from ..requests.parameters import warn_once
from ..requests.request import OutputFormat, Tool, ToolUse
from .formats import ToolFormat
from .syntax import FREE_TEXT, Rules, either, json_value, quoted

CompileGrammar = Callable[[GrammarKind, str], Grammar]  # kind and source -> grammar


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
    return invalid_field(param, f"the schemas cannot be enforced: {reason}")


def _answer_grammar(format: ToolFormat, use: ToolUse, answer: OutputFormat | None) -> str:
    tools = [tool for tool in use.tools if use.named in (None, tool.name)]
    syntax = format.syntax
    if syntax.write is None:
        raise unsupported(
            f"the calls of this model ({syntax.name}) cannot be enforced: leave out tool_choice, "
            "strict and the response format, or ask another model",
            "tools",
        )
    rules, optional = Rules(format.token), is_optional(use, answer)
    enforced_tools = [_enforceable(tool, optional=optional, combine=syntax.is_json) for tool in tools]
    bodies = [syntax.write(tool, rules) for tool in enforced_tools]
    if format.is_answer:
        return f"start: {either(bodies)}\n{rules.source()}"
    if format.in_headers:
        return _messages(use, answer, bodies, rules)
    opening, closing = (f"<[{i}]>" if i is not None else "" for i in (format.open, format.close))
    separator = quoted(syntax.separator) + " " if syntax.separator else ""
    if syntax.together and use.parallel:
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
    rewritten, unenforced = enforced(schema, closed=True)
    if unenforced and strict:
        strict_fields = ("response_format", "text.format")  # fields that may have `strict`
        way = ", or give strict false" if param.startswith(strict_fields) else ""
        raise InvalidValue(f"the JSON schema cannot be enforced: {unenforced[0]}: leave it out{way}")
    for left in unenforced:
        warn_once(f"{param}: not enforced: {left}")
    return rewritten


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
        types = {key: value for key, value in json.loads(source).items() if key == "type"}
        return compile(format.kind, json.dumps(types))


def _enforceable(tool: Tool, *, optional: bool, combine: bool) -> Tool:
    """Return a tool with its parameters in the form that is enforced.

    Raises Failure (400) for what cannot be enforced. If that is `optional`, any object is allowed instead.
    """
    nothing = {} if tool.parameters else {"properties": {}, "additionalProperties": False}
    root = {"type": "object", **nothing, **tool.parameters, "nullable": False}
    try:
        rewritten, unenforced = enforceable(root, closed=True, combine=combine)
    except InvalidValue as error:
        message = f"tools: the parameters of {tool.name!r} cannot be enforced: {error}"
        if not optional:
            raise invalid(message, "tools") from error
        warn_once(message)
        return replace(tool, parameters={"type": "object"})
    for left in unenforced:
        if tool.strict:
            raise unsupported(
                f"tool {tool.name!r} is strict, and {left.keyword} cannot be enforced: {left}: leave it "
                "out of the parameters, or strict out of the tool",
                "tools",
            )
        warn_once(f"tool {tool.name!r}: not enforced: {left}")
    return replace(tool, parameters=rewritten if isinstance(rewritten, dict) else {})


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
