"""From the body of a request to what the worker is asked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mlx_spec.apps.server.ask import Ask, Chat, Format, Tool, ToolUse
from mlx_spec.apps.server.failures import invalid, unsupported
from mlx_spec.apps.server.messages import fields
from mlx_spec.apps.server.turns import merged
from mlx_spec.errors import InvalidValue
from mlx_spec.sampling import Sampling

BETWEEN = "\n\n"  # blocks of text that were written apart
THINKING = {"enabled": True, "adaptive": True, "disabled": False}


def ask_of(body: fields.Body, model: str) -> Ask:
    """The request. Raises Failure (400) for what cannot be honoured, by name."""
    for name, given in (("container", body.container), ("mcp_servers", body.mcp_servers)):
        if given:
            raise unsupported(f"{name}: nothing but the model runs here", name)
    if body.speed not in (None, "standard"):
        raise unsupported(f"speed: {body.speed!r} is not known here, only 'standard'", "speed")
    budget = body.thinking.budget_tokens if body.thinking else None
    if budget is not None and not 0 < budget < body.max_tokens:
        where, most = "thinking.budget_tokens", body.max_tokens - 1
        raise invalid(f"{where} is {budget}, it must be 1 to {most}: max_tokens is {body.max_tokens}", where)
    return Ask(
        model=model,
        prompt=chat_of(body),
        sampling=_sampling(body),
        max_tokens=body.max_tokens,
        stop=tuple(dict.fromkeys(body.stop_sequences or ())),
        format=_format(body.output_config),
    )


def chat_of(body: fields.Prompt) -> Chat:
    """The conversation. Raises Failure (400)."""
    thinking = body.thinking.type if body.thinking else "disabled"
    if thinking not in THINKING:
        known = ", ".join(map(repr, THINKING))
        raise unsupported(f"thinking.type: {thinking!r} is not supported, only {known}", "thinking.type")
    effort = body.output_config.effort if body.output_config else None
    return Chat(
        messages=tuple(_messages(body)),
        tools=_tools(body.tools or [], body.tool_choice),
        thinking=THINKING[thinking],
        variables={} if effort is None else {"reasoning_effort": effort},
    )


def _sampling(body: fields.Body) -> Sampling:
    """1 is the protocol's own temperature."""
    try:
        return Sampling(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=body.top_k or 0,
        )
    except InvalidValue as error:
        raise invalid(str(error)) from error


def _format(config: fields.OutputConfig | None) -> Format | None:
    if config is None or config.format is None:
        return None
    where, given = "output_config.format", config.format
    if given.type != "json_schema":
        raise unsupported(f"{where}.type: {given.type!r} is not supported, only 'json_schema'", where)
    if given.schema_ is None:
        raise invalid(f"{where}.schema: Field required", where)
    return Format("json_schema", json.dumps(given.schema_), param=where)


def _tools(tools: Sequence[fields.Tool], choice: fields.ToolChoice | None) -> ToolUse | None:
    for i, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            message = f"tools.{i}: {tool.type!r} runs on Anthropic's servers: only custom tools work here"
            raise unsupported(message, f"tools.{i}")
        if tool.input_schema is None:
            raise invalid(f"tools.{i}.input_schema: Field required", f"tools.{i}.input_schema")
    choice = choice or fields.ToolChoice(type="auto")
    named = choice.name if choice.type == "tool" else None
    if choice.type == "tool" and named not in [tool.name for tool in tools]:
        raise invalid(f"tool_choice.name: {named!r} is none of the tools", "tool_choice.name")
    if choice.type == "any" and not tools:
        raise invalid("tool_choice: 'any' needs tools", "tool_choice")
    if not tools:
        return None
    return ToolUse(
        tools=tuple(
            Tool(tool.name, tool.description, tool.input_schema or {}, bool(tool.strict)) for tool in tools
        ),
        choice="required" if choice.type in ("any", "tool") else "none" if choice.type == "none" else "auto",
        named=named,
        parallel=not choice.disable_parallel_tool_use,
    )


def _messages(body: fields.Prompt) -> list[dict[str, Any]]:
    if body.messages[-1].role == "assistant":
        message = "the conversation must not end with the assistant: an answer cannot be prefilled here"
        raise unsupported(message, f"messages.{len(body.messages) - 1}")
    turns = [{"role": "system", "content": _joined(body.system, "system")}] if body.system else []
    names: dict[str, str] = {}  # of the tools, by the ids of their calls
    for i, turn in enumerate(body.messages):
        where = f"messages.{i}.content"
        if turn.role == "assistant":
            turns.append(_assistant(turn.content, where))
            names |= {block.id: block.name for block in turn.content if isinstance(block, fields.ToolUse)}
        elif turn.role == "system":
            turns.append({"role": "system", "content": _joined(turn.content, where)})
        else:
            turns += _user(turn.content, where, names)
    return merged(turns, BETWEEN)


def _assistant(content: Sequence[fields.Block], where: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(content):
        match block:
            case fields.Text(text=text):
                texts.append(text)
            case fields.Thinking(thinking=thought):
                thoughts.append(thought)
            case fields.ToolUse(id=id, name=name, input=arguments):
                function = {"name": name, "arguments": arguments}
                calls.append({"id": id, "type": "function", "function": function})
            case fields.Other(type="redacted_thinking"):  # only who encrypted it can read it
                pass
            case _:
                raise _refused(block.type, f"{where}.{i}")
    turn: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    turn |= {"reasoning_content": "".join(thoughts)} if any(thoughts) else {}
    return turn | ({"tool_calls": calls} if calls else {})


def _user(content: Sequence[fields.Block], where: str, names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    if not content:
        yield {"role": "user", "content": ""}
    for i, block in enumerate(content):
        match block:
            case fields.Text(text=text):
                yield {"role": "user", "content": text}
            case fields.ToolResult(tool_use_id=id):
                if id not in names:
                    place = f"{where}.{i}.tool_use_id"
                    raise invalid(f"{place}: there is no tool_use {id!r} before it", place)
                text = _joined(block.content, f"{where}.{i}.content")
                text = f"Error: {text}" if block.is_error else text
                yield {"role": "tool", "tool_call_id": id, "name": names[id], "content": text}
            case _:
                raise _refused(block.type, f"{where}.{i}")


def _joined(content: Iterable[fields.Block], where: str) -> str:
    """Blocks that must be text, as one."""
    texts = []
    for i, block in enumerate(content):
        if not isinstance(block, fields.Text):
            raise _refused(block.type, f"{where}.{i}")
        texts.append(block.text)
    return BETWEEN.join(texts)


def _refused(kind: str, where: str) -> Exception:
    return unsupported(f"{where}: a block of type {kind!r} is not supported here", where)
