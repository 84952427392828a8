"""Other forms of a conversation, for chat templates that refuse a form or leave out a part of it.

A form changes messages and keeps their meaning. System messages stay in their places as long as a template
allows that: text that moves to the front changes the prompt from its beginning, and no cache can be reused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from itertools import chain, filterfalse, takewhile
from typing import Any

from mlx_spec.tokenizer.chat_template import REASONING_KEYS
from mlx_spec.tokenizer.thinking import thinking_end

PARAGRAPH = "\n\n"  # joins texts that were written apart
BREAK = "\U0002a6d6"  # a rare ideograph in a tag: no template knows such a tag
TAG = re.compile(r"<[^<>\n]{1,80}>|\[/?[A-Z_]{3,}\]")

Messages = list[dict[str, Any]]
Form = Callable[[Messages], Messages]


# --- the texts of a message


def map_texts(message: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Return a message with its texts changed: content, called functions and their arguments.

    Reasoning is not changed, even at the beginning of an answer's content: the template may drop it.
    """
    changed, content = dict(message), message.get("content")
    if isinstance(content, str):
        end = thinking_end(content) if message.get("role") == "assistant" else 0
        changed["content"] = content[:end] + change(content[end:])
    elif isinstance(content, list):
        changed["content"] = [_map_keys(part, ("text",), change) for part in content]
    if isinstance(calls := message.get("tool_calls"), list):
        changed["tool_calls"] = [_map_call(call, change) for call in calls]
    if isinstance(results := message.get("tool_responses"), list):
        changed["tool_responses"] = [_map_keys(result, ("response",), change) for result in results]
    return changed


def _map_call(call: Any, change: Callable[[str], str]) -> Any:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = _map_keys(call["function"], ("name", "arguments"), change)
    changed, name = {**call, "function": function}, call["function"].get("name")
    if isinstance(name, str) and str(call.get("id")).startswith(f"functions.{name}:"):
        changed["id"] = changed["id"].replace(name, function["name"], 1)  # Kimi K2 shows no other name
    return changed


def _map_keys(value: Any, keys: tuple[str, ...], change: Callable[[str], str]) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _map_leaves(item, change) if key in keys else item for key, item in value.items()}


def _map_leaves(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_leaves(item, change) for key, item in value.items()}
    return [_map_leaves(item, change) for item in value] if isinstance(value, list) else value


# --- forms


def _one_call_each(messages: Messages) -> Messages:
    """Put each tool call in a separate message, before its result."""
    separate: Messages = []
    results: Messages = []  # tool messages after the calls before, which are already placed
    for i, message in enumerate(messages):
        calls = message.get("tool_calls") or []
        if message.get("role") == "tool" and results:
            continue
        results = []
        if len(calls) < 2:
            separate.append(message)
            continue
        results = list(takewhile(lambda m: m.get("role") == "tool", messages[i + 1 :]))
        other_results = results
        for k, call in enumerate(calls):
            separate.append({**(message if k == 0 else {"role": message["role"]}), "tool_calls": [call]})
            its_results = [m for m in other_results if m.get("tool_call_id") in (None, call.get("id"))][:1]
            separate += its_results
            other_results = [m for m in other_results if m not in its_results]
        separate += other_results
    return separate


def _text_apart(messages: Messages) -> Messages:
    """Put text beside tool calls in a separate message."""
    separate: Messages = []
    for message in messages:
        if message.get("tool_calls") and message.get("content"):
            separate.append({key: value for key, value in message.items() if key != "tool_calls"})
            message = {"role": message["role"], "tool_calls": message["tool_calls"]}
        separate.append(message)
    return separate


def _arguments_as_text(messages: Messages) -> Messages:
    return _with_arguments(messages, lambda value: value if isinstance(value, str) else _json(value))


def _arguments_as_object(messages: Messages) -> Messages:
    return _with_arguments(messages, lambda value: _object(value) if isinstance(value, str) else value)


def _named_system(messages: Messages) -> Messages:
    return [{**m, "role": "system"} if m.get("role") == "developer" else m for m in messages]


def _led(messages: Messages) -> Messages:
    """Join the system messages at the beginning."""
    lead = list(takewhile(_is_system, messages))
    return [*_joined(_named_system(lead)), *messages[len(lead) :]]


def _in_place(messages: Messages) -> Messages:
    """Turn system messages after the first ones into paragraphs of the user."""
    lead = list(takewhile(_is_system, messages))
    return [*_led(lead), *_told_by_user(messages[len(lead) :])]


def _in_front(messages: Messages) -> Messages:
    """Join all system messages into the first message."""
    return [*_led(list(filter(_is_system, messages))), *filterfalse(_is_system, messages)]


def _told_by_user(messages: Messages) -> Messages:
    """Turn all system messages into paragraphs of the user."""
    moved: Messages = []
    is_moved = False  # the last message was a system message
    for message in messages:
        was_moved, is_moved = is_moved, _is_system(message)
        message = {**message, "role": "user"} if is_moved else message
        is_near = bool(moved) and moved[-1].get("role") == message.get("role") == "user"
        if is_near and (is_moved or was_moved):
            moved[-1] = _one_of(moved[-1], message)
            is_moved = True
        else:
            moved.append(message)
    return moved


def _joined(messages: Messages) -> Messages:
    """Join consecutive messages of one role, except tool calls and their results."""
    joined: Messages = []
    for message in messages:
        before = joined[-1] if joined else {}
        apart = before.get("tool_calls") or message.get("tool_calls") or message.get("role") == "tool"
        if not apart and before.get("role") == message.get("role"):
            joined[-1] = _one_of(before, message)
        else:
            joined.append(message)
    return joined


def filled(messages: Messages) -> Messages:
    """Add an empty content to messages without one."""
    return [{**m, "content": ""} if m.get("content") is None else m for m in messages]


def _reasoning_as_part(messages: Messages) -> Messages:
    """Write the reasoning of a message without content as a part of its content."""
    changed = []
    for message in messages:
        reasoning = next((message[key] for key in REASONING_KEYS if message.get(key)), None)
        if reasoning and not message.get("content") and not message.get("tool_calls"):
            kept = {key: value for key, value in message.items() if key not in REASONING_KEYS}
            message = {**kept, "content": [{"type": "thinking", "thinking": reasoning}]}
        changed.append(message)
    return changed


def _as_text(messages: Messages) -> Messages:
    """Join the parts of each content to one text, if all are text."""
    return [{**m, "content": _paragraphs(m.get("content"))} for m in messages]


def _as_parts(messages: Messages) -> Messages:
    return [m if m.get("content") is None else {**m, "content": _parts(m["content"])} for m in messages]


def untagged(messages: Messages) -> Messages:
    """Break the tags in texts, so that they are read as text. The prompt loses the breaks afterwards."""
    return [
        map_texts(m, lambda text: TAG.sub(lambda tag: f"{tag[0][0]}{BREAK}{tag[0][1:]}", text))
        for m in messages
    ]


# Groups of forms, in the order in which they are tried. At most one form of each group is used.
FORM_GROUPS: tuple[tuple[Form, ...], ...] = (
    (filled, _reasoning_as_part),
    (_joined,),
    (_named_system, _led, _in_place, _in_front, _told_by_user),
    (_arguments_as_text, _arguments_as_object),
    (_text_apart,),
    (_one_call_each,),
    (_as_text, _as_parts),
)
# The order in which forms are applied: a message that one form adds gets its content by a later one.
ORDER: tuple[Form, ...] = (*chain.from_iterable(reversed(FORM_GROUPS[:-1])), *FORM_GROUPS[-1], untagged)


def _with_arguments(messages: Messages, change: Callable[[Any], Any]) -> Messages:
    def changed(call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or "arguments" not in function:
            return call
        return {**call, "function": {**function, "arguments": change(function["arguments"])}}

    return [
        {**m, "tool_calls": [changed(call) for call in m["tool_calls"]]} if m.get("tool_calls") else m
        for m in messages
    ]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _is_system(message: Mapping[str, Any]) -> bool:
    return message.get("role") in ("system", "developer")


def _one_of(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    joined = {**first, **second}
    for key in ("content", *REASONING_KEYS):
        both = [message[key] for message in (first, second) if message.get(key)]
        if len(both) == 2:
            a, b = both
            are_texts = isinstance(a, str) and isinstance(b, str)
            joined[key] = PARAGRAPH.join([a, b]) if are_texts else [*_parts(a), *_parts(b)]
        elif both:
            joined[key] = both[0]
    return joined


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _paragraphs(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return PARAGRAPH.join(texts) if len(texts) == len(content) else content
