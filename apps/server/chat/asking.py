"""From the body of a chat request to what the worker is asked."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from mlx_spec.apps.server.ask import Ask, Chat, Tool, ToolUse
from mlx_spec.apps.server.chat.fields import Body, Call, Message
from mlx_spec.apps.server.failures import invalid, unsupported
from mlx_spec.apps.server.fields import (
    check_options,
    choices_of,
    format_of,
    max_tokens_of,
    prediction_of,
    sampling_of,
    stop_of,
    texts,
)
from mlx_spec.apps.server.settings import Limits
from mlx_spec.apps.server.turns import merged

BETWEEN = "\n\n"  # parts of a message, and messages that one role has in a row
REFUSED = {  # field -> why
    "audio": "answers are text",
    "functions": "give `tools` instead",
    "function_call": "give `tool_choice` instead",
    "web_search_options": "nothing is ever fetched here",
    "moderation": "answers are not moderated here",
}
IDLE = {"service_tier": ("auto", "default"), "verbosity": ("medium",)}  # field -> values without effect
OWN_VARIABLES = ("messages", "tools", "add_generation_prompt")  # of a template, set from other fields
WITHOUT_THINKING = ("none", "minimal")


def ask_of(body: Body, model: str, limits: Limits) -> Ask:
    """The request. Raises Failure (400) for what cannot be honoured, by name."""
    check_options(body)
    _check_refused(body)
    return Ask(
        model=model,
        prompt=Chat(tuple(_messages(body)), _tools(body, limits), _thinks(body), _variables(body)),
        sampling=sampling_of(body),
        max_tokens=max_tokens_of(body, 1),
        stop=stop_of(body, limits),
        n=choices_of(body, 1, limits),
        top_logprobs=_logprobs(body),
        format=format_of(body, limits),
        prediction=prediction_of(body),
    )


def _check_refused(body: Body) -> None:
    given = {
        "audio": body.audio,
        "functions": body.functions,
        "function_call": body.function_call,
        "web_search_options": body.web_search_options,
        "moderation": body.moderation,
    }
    for name, why in REFUSED.items():
        if given[name] is not None:
            raise unsupported(f"{name}: is not supported, {why}", name)
    for name, value in (("service_tier", body.service_tier), ("verbosity", body.verbosity)):
        if value is not None and value not in IDLE[name]:
            raise unsupported(
                f"{name}: {value[:32]!r} is not supported, only {' or '.join(IDLE[name])}", name
            )
    if set(body.modalities or []) - {"text"}:
        raise unsupported("modalities: only text is supported", "modalities")


def _thinks(body: Body) -> bool:
    wanted = (body.chat_template_kwargs or {}).get("enable_thinking")
    if wanted is None:
        return body.reasoning_effort not in (None, *WITHOUT_THINKING)
    if not isinstance(wanted, bool):
        where = "chat_template_kwargs.enable_thinking"
        raise invalid(f"{where}: give true or false", where)
    return wanted


def _variables(body: Body) -> dict[str, Any]:
    found = dict(body.chat_template_kwargs or {})
    found.pop("enable_thinking", None)
    for name in OWN_VARIABLES:
        if name in found:
            raise unsupported(f"chat_template_kwargs.{name}: is set by other fields", "chat_template_kwargs")
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    return effort | found


def _logprobs(body: Body) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise invalid("top_logprobs: only with logprobs true", "top_logprobs")
    return None


def _tools(body: Body, limits: Limits) -> ToolUse | None:
    tools = tuple(_tool_list(body))
    names = [tool.name for tool in tools]
    twice = next((name for name, times in Counter(names).items() if times > 1), None)
    if twice is not None:
        raise invalid(f"tools: two are called {twice!r}: give each a name of its own", "tools")
    if len(tools) > limits.tools:
        raise invalid(f"tools: {len(tools)} of them, {limits.tools} are the most", "tools")
    size = sum(len(json.dumps(dict(tool.parameters))) for tool in tools)
    if size > limits.schema_bytes:
        raise invalid(f"tools: {size} bytes of schemas, {limits.schema_bytes} are the most", "tools")
    kind = body.tool_choice.type if body.tool_choice else "auto"
    named = body.tool_choice.function.name if body.tool_choice and body.tool_choice.function else None
    if kind not in ("none", "auto", "required", "function"):
        raise unsupported(f"tool_choice: {kind[:32]!r} is not supported", "tool_choice")
    if kind == "function" and named not in names:
        raise invalid(f"tool_choice: {named!r:.64} is none of the tools", "tool_choice")
    if not tools:
        if kind == "required":
            raise invalid("tool_choice: 'required' needs tools", "tool_choice")
        return None
    parallel = True if body.parallel_tool_calls is None else body.parallel_tool_calls
    if kind == "function":
        return ToolUse(tools, "required", named, parallel)
    return ToolUse(
        tools, "required" if kind == "required" else "none" if kind == "none" else "auto", None, parallel
    )


def _tool_list(body: Body) -> Iterator[Tool]:
    for i, tool in enumerate(body.tools or []):
        if tool.type != "function":
            raise unsupported(
                f"tools.{i}.type: {tool.type[:32]!r} is not supported: only functions", f"tools.{i}.type"
            )
        if tool.function is None:
            raise invalid(f"tools.{i}.function: is missing", f"tools.{i}.function")
        function = tool.function
        parameters = function.parameters or {}
        if parameters.get("type", "object") != "object":
            where = f"tools.{i}.function.parameters.type"
            raise invalid(f"{where}: arguments are an object", where)
        yield Tool(function.name, function.description, parameters, bool(function.strict))


def _messages(body: Body) -> list[dict[str, Any]]:
    if not body.messages:
        raise invalid("messages: is empty: give at least one", "messages")
    turns = []
    names: dict[str, str] = {}  # of the functions, by the ids of their calls
    for i, message in enumerate(body.messages):
        where = f"messages.{i}"
        if message.role == "function" or message.function_call is not None:
            raise unsupported(f"{where}: function calls of the old kind: give tool calls instead", where)
        if message.audio is not None:
            raise unsupported(f"{where}.audio: only text is read here", f"{where}.audio")
        turns.append(_turn(message, where, names))
    return merged(turns, BETWEEN)


def _turn(message: Message, where: str, names: dict[str, str]) -> dict[str, Any]:
    if message.role == "assistant":
        return _assistant(message, where, names)
    if message.content is None:
        raise invalid(f"{where}.content: is missing", f"{where}.content")
    text = BETWEEN.join(texts(message.content, f"{where}.content"))
    if message.role != "tool":
        role = "user" if message.role == "user" else "system"
        return {"role": role, "content": text}
    called = message.tool_call_id
    if called is None or called not in names:
        place = f"{where}.tool_call_id"
        problem = "is missing" if called is None else f"there is no call {called[:64]!r} before it"
        raise invalid(f"{place}: {problem}", place)
    return {"role": "tool", "tool_call_id": called, "name": names[called], "content": text}


def _assistant(message: Message, where: str, names: dict[str, str]) -> dict[str, Any]:
    calls = [_call(call, f"{where}.tool_calls.{i}") for i, call in enumerate(message.tool_calls or [])]
    names |= {call["id"]: call["function"]["name"] for call in calls}
    content = message.content
    text = message.refusal if content is None else "".join(texts(content, f"{where}.content"))
    if text is None and not calls and message.reasoning_content is None:
        raise invalid(f"{where}.content: is missing, and there are no tool calls", f"{where}.content")
    turn: dict[str, Any] = {"role": "assistant", "content": text}
    thoughts = message.reasoning_content or message.reasoning
    turn |= {"reasoning_content": thoughts} if isinstance(thoughts, str) and thoughts else {}
    return turn | ({"tool_calls": calls} if calls else {})


def _call(call: Call, where: str) -> dict[str, Any]:
    if call.function is None or call.type not in (None, "function"):
        raise unsupported(f"{where}: only calls of functions are supported", where)
    place = f"{where}.function.arguments"
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise invalid(f"{place}: is not JSON", place) from error
    if not isinstance(arguments, dict):
        raise invalid(f"{place}: is not the JSON of an object", place)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
