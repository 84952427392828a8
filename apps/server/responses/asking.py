"""From the body of a request to what the worker is asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mlx_spec.apps.server.ask import Ask, Chat, Format, Tool, ToolUse
from mlx_spec.apps.server.failures import Failure, invalid, unsupported
from mlx_spec.apps.server.responses import fields
from mlx_spec.apps.server.responses.sealed import opened
from mlx_spec.apps.server.turns import merged
from mlx_spec.errors import InvalidValue
from mlx_spec.sampling import Sampling

BETWEEN = "\n\n"  # messages and parts that were written apart
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
INCLUDES = (LOGPROBS, ENCRYPTED)
WORDS = ("auto", "none", "required")
WITHOUT_THINKING = ("none", "minimal")


def ask_of(body: fields.Body, model: str) -> Ask:
    """The request. Raises Failure (400) for what cannot be honoured, by name."""
    _check_supported(body)
    effort = body.reasoning.effort if body.reasoning else None
    logprobs = LOGPROBS in (body.include or ()) or body.top_logprobs
    return Ask(
        model=model,
        prompt=Chat(
            messages=tuple(_messages(body)),
            tools=_tools(body),
            thinking=effort not in (None, *WITHOUT_THINKING),
            variables={} if effort is None else {"reasoning_effort": effort},
        ),
        sampling=_sampling(body),
        max_tokens=body.max_output_tokens,
        top_logprobs=body.top_logprobs or 0 if logprobs else None,
        format=_format(body.text),
    )


def _check_supported(body: fields.Body) -> None:
    """Nothing is kept from one request to the next, and nothing but the model runs here."""
    stateful = {
        "background": body.background,
        "context_management": body.context_management,
        "conversation": body.conversation,
        "moderation": body.moderation,
        "previous_response_id": body.previous_response_id,
        "prompt": body.prompt,
        "store": body.store,
    }
    for name, given in stateful.items():
        if given not in (None, False):
            message = f"{name} is not supported: nothing is kept between requests, send all of the input"
            raise unsupported(message, name)
    for i, name in enumerate(body.include or ()):
        if name not in INCLUDES:
            known = " and ".join(map(repr, INCLUDES))
            raise unsupported(f"include.{i}: {name!r} is not supported, only {known}", "include")
    if body.truncation not in (None, "disabled"):
        raise unsupported(f"truncation: {body.truncation!r} is not supported, only 'disabled'", "truncation")
    verbosity = body.text.verbosity if body.text else None
    if verbosity not in (None, "medium"):
        message = f"text.verbosity: {verbosity!r} is not supported, only 'medium'"
        raise unsupported(message, "text.verbosity")
    if body.stream_options and not body.stream:
        raise invalid("stream_options: only for a stream", "stream_options")
    if body.stream_options and body.stream_options.include_obfuscation:
        message = "stream_options.include_obfuscation: true is not supported"
        raise unsupported(message, "stream_options.include_obfuscation")


def _sampling(body: fields.Body) -> Sampling:
    """1 is the protocol's own temperature."""
    try:
        return Sampling(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
        )
    except InvalidValue as error:
        raise invalid(str(error)) from error


def _format(text: fields.TextConfig | None) -> Format | None:
    where, given = "text.format", text.format if text else None
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return Format("json_object", param=where)
    if given.type != "json_schema":
        message = f"{where}.type: {given.type!r} is not supported, only text, json_object and json_schema"
        raise unsupported(message, where)
    for name, value in (("name", given.name), ("schema", given.schema_)):
        if value is None:
            raise _missing(f"{where}.{name}")
    return Format("json_schema", json.dumps(given.schema_), param=where)


def _tools(body: fields.Body) -> ToolUse | None:
    tools = [_tool(tool, f"tools.{i}") for i, tool in enumerate(body.tools or ())]
    choice = body.tool_choice or fields.ToolChoice(type="auto")
    named, mode = None, choice.type
    if choice.type == "allowed_tools":
        allowed = [tool.name for tool in choice.tools or ()]
        _check_known(allowed, tools)
        tools, mode = [tool for tool in tools if tool.name in allowed], choice.mode or "auto"
    elif choice.type == "function":
        _check_known([choice.name], tools)
        named, mode = choice.name, "required"
    elif choice.type not in WORDS:
        raise unsupported(f"tool_choice: {choice.type!r} is not supported here", "tool_choice")
    if mode == "required" and not tools:
        raise invalid("tool_choice: 'required' needs tools", "tool_choice")
    if not tools:
        return None
    return ToolUse(
        tools=tuple(tools),
        choice="required" if mode == "required" else "none" if mode == "none" else "auto",
        named=named,
        parallel=body.parallel_tool_calls is not False,
    )


def _tool(tool: fields.Tool, where: str) -> Tool:
    if tool.type != "function":
        raise unsupported(f"{where}: {tool.type!r} is not supported here, only 'function'", where)
    if tool.name is None:
        raise _missing(f"{where}.name")
    return Tool(tool.name, tool.description, tool.parameters or {}, bool(tool.strict))


def _check_known(names: Sequence[str | None], tools: Sequence[Tool]) -> None:
    known = [tool.name for tool in tools]
    for name in names:
        if name not in known:
            raise invalid(f"tool_choice: {name!r} is none of the tools", "tool_choice")


def _messages(body: fields.Body) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    if body.instructions is not None:
        turns.append({"role": "system", "content": body.instructions})
    names: dict[str, str] = {}  # of the functions, by the ids of their calls
    for i, item in enumerate(body.input):
        if isinstance(item, fields.FunctionCall):
            names[item.call_id] = item.name
        turns.append(_turn(item, f"input.{i}", names))
    return merged(turns, BETWEEN)


def _turn(item: fields.Item, where: str, names: dict[str, str]) -> dict[str, Any]:
    match item:
        case fields.Message(role=role, content=content):
            between = "" if role == "assistant" else BETWEEN
            text = _text(content, f"{where}.content", between)
            return {"role": "system" if role == "developer" else role, "content": text}
        case fields.FunctionCall(call_id=id, name=name):
            function = {"name": name, "arguments": _arguments(item, f"{where}.arguments")}
            call = {"id": id, "type": "function", "function": function}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        case fields.FunctionCallOutput(call_id=id):
            if id not in names:
                place = f"{where}.call_id"
                raise invalid(f"{place}: there is no function_call {id!r} before it", place)
            text = _text(item.output, f"{where}.output", BETWEEN)
            return {"role": "tool", "tool_call_id": id, "name": names[id], "content": text}
        case fields.Reasoning():
            parts = item.content or item.summary or []
            thoughts = _text(parts, where, "") or opened(item.encrypted_content)
            return {"role": "assistant", "content": None, "reasoning_content": thoughts}
        case _:
            raise unsupported(f"{where}: an item of type {item.type!r} is not supported here", where)


def _text(parts: Sequence[fields.Part], where: str, between: str) -> str:
    """Parts that must be text, as one."""
    texts = []
    for i, part in enumerate(parts):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in (*fields.TEXTS, "refusal"):
            place = f"{where}.{i}"
            raise unsupported(f"{place}: a part of type {part.type!r} is not supported here", place)
        if text is None:
            raise _missing(f"{where}.{i}.text")
        texts.append(text)
    return between.join(texts)


def _arguments(call: fields.FunctionCall, where: str) -> dict[str, Any]:
    try:
        found = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise invalid(f"{where}: the arguments of {call.name!r} are no JSON", where) from error
    if not isinstance(found, dict):
        raise invalid(f"{where}: the arguments of {call.name!r} are no JSON object", where)
    return found


def _missing(where: str) -> Failure:
    return invalid(f"{where}: Field required", where, "missing_required_parameter")
