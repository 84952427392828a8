"""Write tools, their calls and results into a prompt, as the chat template takes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mlx_spec.errors import InvalidValue, NoVision
from mlx_spec.grammar.schema_reader import read_schema
from mlx_spec.prompt import Prompt
from mlx_spec.tokenizer import Tokenizer
from mlx_spec.tokenizer.history import LostText
from mlx_spec.vision.conversation import NO_VISION, conversation_prompt
from mlx_spec.vision.vision import Vision

from ..errors import Failure, invalid, invalid_field, unsupported_field
from ..requests.request import Chat, Tool, ToolUse
from .formats import Message, definition, format_of


def chat_prompt(
    chat: Chat,
    tokenizer: Tokenizer,
    model: str,
    param: str = "messages",
    vision: Vision | NoVision = NO_VISION,
    scope: str = "",
    most: int | None = None,
) -> Prompt:
    """Return the prompt of a conversation, whose pictures are ready for the tower.

    `scope` is the API key. With the choice "none" the prompt does not list the tools. Raises PromptTooLong
    for more than `most` tokens, Failure (400) for tools without a known format or schema. It also raises if
    the template refuses the messages or leaves out a text; `param` is their field.
    """
    use = chat.tools or ToolUse((), "none")
    tools = () if use.choice == "none" else use.tools
    calls = [i for i, message in enumerate(chat.messages) if message.get("tool_calls")]
    format = format_of(use, tokenizer) if tools or calls else None
    if format is None and tools:
        raise _no_calls(model, "tools")
    if format is not None and format.is_answer:
        shown = [{"role": "system", "content": _instructions(tools)}, *calls_as_text(chat.messages)]
        chat = replace(chat, messages=tuple(shown), tools=None, params=("tools", *chat.params))
        return chat_prompt(chat, tokenizer, model, param, vision, scope, most)
    folds = format is not None and format.results_in_calls
    messages = results_in_calls(chat.messages) if folds else chat.messages
    if format is not None and format.syntax.name == "kimi-k2":
        messages = numbered(messages)
    shown = [definition(tool) for tool in tools]
    try:
        options = {"thinking": chat.thinking, "tools": shown, "variables": chat.variables, "scope": scope}
        return conversation_prompt(messages, tokenizer, vision, most=most, begun=chat.begun, **options)
    except LostText as error:
        if error.index in calls and format is None:
            chat = replace(chat, messages=tuple(calls_as_text(chat.messages)))
            return chat_prompt(chat, tokenizer, model, param, vision, scope, most)
        lost = None if error.index is None else messages[error.index]
        fields = (field for field, m in zip(chat.params, chat.messages, strict=False) if m is lost)
        field = "tools" if lost is None else next(fields, param)
        raise invalid_field(field, error) from error
    except InvalidValue as error:
        _check_schemas(tools)  # a template cannot write what is not a schema
        raise invalid(str(error), param) from error


def _check_schemas(tools: Sequence[Tool]) -> None:
    """Raise Failure (400) if the parameters of a tool are not a JSON schema."""
    for tool in tools:
        try:
            read_schema(tool.parameters)
        except InvalidValue as error:
            problem = f"the parameters of {tool.name!r} are not a JSON schema: {error}"
            raise invalid_field("tools", problem) from error


def _no_calls(model: str, param: str) -> Failure:
    return unsupported_field(
        param,
        f"the chat template of model {model!r} has no tool calls, or in a format that is not known "
        "here: leave out the tools, force a call by tool_choice, or ask a model that has them",
    )


def _instructions(tools: Sequence[Tool]) -> str:
    """Return the text that shows the tools to a model whose template shows none."""
    listed = "\n".join(json.dumps(definition(tool)["function"], ensure_ascii=False) for tool in tools)
    return (
        f"You can call these functions, described as JSON:\n{listed}\n\n"
        'Answer with one call and nothing else, as JSON: {"name": "...", "arguments": {...}}'
    )


def calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """Return `messages` with calls as JSON in the answers, and their results as messages of the user."""
    shown: list[Message] = []
    for message in messages:
        if message.get("role") == "tool":
            result = f"Result of {message.get('name') or 'the call'}: {message.get('content')}"
            shown.append({"role": "user", "content": result})
            continue
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls") or ()]
        texts = [*filter(None, [message.get("content") if calls else None]), *calls]
        others = {key: value for key, value in message.items() if key != "tool_calls"}
        shown.append({**others, "content": "\n".join(texts)} if calls else message)
    return shown


def results_in_calls(messages: Sequence[Message]) -> list[Message]:
    """Return `messages` with the results of calls moved into the message that made the calls."""
    shown: list[Message] = []
    for message in messages:
        before = shown[-1] if shown else {}
        if message.get("role") != "tool" or not before.get("tool_calls"):
            shown.append(message)
            continue
        result = {"name": message.get("name"), "response": message.get("content")}
        shown[-1] = {**before, "tool_responses": [*before.get("tool_responses", ()), result]}
    return shown


def numbered(messages: Sequence[Message]) -> list[Message]:
    """Return `messages` with the ids that Kimi K2 gives its calls: functions.NAME:NUMBER."""
    shown: list[Message] = []
    ids: dict[Any, str] = {}
    count = 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            ids[call.get("id")] = f"functions.{call['function']['name']}:{count}"
            calls.append({**call, "id": ids[call.get("id")]})
            count += 1
        call_id = message.get("tool_call_id")
        answered = {"tool_call_id": ids[call_id]} if call_id in ids else {}
        shown.append({**message, **answered, **({"tool_calls": calls} if calls else {})})
    return shown
