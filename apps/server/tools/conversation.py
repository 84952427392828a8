"""A conversation with tools as the model's chat template wants it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlx_spec.apps.server.errors import unsupported
from mlx_spec.apps.server.request import Chat
from mlx_spec.apps.server.tools.dialect import definition, dialect_of
from mlx_spec.text import Text

Message = Mapping[str, Any]


def prompt_of(chat: Chat, text: Text, model: str) -> list[int]:
    """The tokens of a conversation. With the choice "none" the model is not told of the tools.

    Raises Failure 400 where there are tools, or calls in the history, and `model` has no format for them, and
    InvalidValue where its template refuses the messages.
    """
    use = chat.tools if chat.tools is not None and chat.tools.choice != "none" else None
    calls = [i for i, message in enumerate(chat.messages) if message.get("tool_calls")]
    dialect = dialect_of(text) if use is not None or calls else None
    if dialect is None and (use is not None or calls):
        param = "tools" if use is not None else f"messages.{calls[0]}.tool_calls"
        raise unsupported(
            f"{param}: the chat template of model {model!r} has no tool calls, or in a format that is not "
            "known here: leave out the tools, or ask a model that has them",
            param,
        )
    messages = folded(chat.messages) if dialect is not None and dialect.folds else chat.messages
    tools = [] if use is None else [definition(tool) for tool in use.tools]
    return text.prompt(messages, thinking=chat.thinking, tools=tools, variables=chat.variables)


def folded(messages: Sequence[Message]) -> list[Message]:
    """`messages` with the results of calls in the message that made them, in the order of the results."""
    found: list[Message] = []
    for message in messages:
        before = found[-1] if found else {}
        if message.get("role") != "tool" or not before.get("tool_calls"):
            found.append(message)
            continue
        result = {"name": message.get("name"), "response": message.get("content")}
        found[-1] = {**before, "tool_responses": [*before.get("tool_responses", ()), result]}
    return found
