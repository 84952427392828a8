"""Tools of `/v1/responses`: functions, namespaces of them, and hosted tools, which are left out.

A namespace, as agents send it for a server of tools, is opened: the model sees its functions under joined
names, and a call goes back to the client in two parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field

from . import parsing
from .errors import unsupported
from .http import Json
from .parameters import leave_out_tool
from .parsing import Fields
from .request import Tool, ToolUse

HOSTED_TOOLS = re.compile(  # run on OpenAI's servers, or their calls and results have forms of their own
    "apply_patch|code_interpreter|computer|custom|file_search|image_generation|local_shell|mcp|shell"
    "|programmatic_tool_calling|tool_search|(computer_use|web_search)(_preview)?(_[0-9]{4}_[0-9]{2}_[0-9]{2})?"
)


class ToolField(Fields):
    """A function that the client runs, a namespace of functions, or a tool of OpenAI's servers."""

    type: str
    name: str | None = Field(default=None, pattern=parsing.TOOL_NAME)
    description: str | None = None
    parameters: parsing.Schema | None = None
    strict: bool | None = None
    namespace: str | None = Field(default=None, pattern=parsing.TOOL_NAME)  # within a tool choice
    tools: list[ToolField] | None = None  # of a namespace


class ToolChoiceField(Fields):
    """The choice between text and tools."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ToolField] | None = None


def parse_tools(
    given: Sequence[ToolField], choice: ToolChoiceField | None, parallel: bool | None
) -> ToolUse | None:
    """Return how the functions may be used; None without any. Raises Failure (400)."""
    tools = [_parse_tool(tool, field, space) for field, tool, space in functions(given)]
    choice = choice or ToolChoiceField(type="auto")
    named, mode = None, choice.type
    if choice.type == "allowed_tools":
        allowed = [joined_name(tool.namespace, tool.name or "") for tool in choice.tools or ()]
        for name in allowed:  # each must be one of the tools
            parsing.make_tool_use(tools, "required", name, None)
        tools, mode = [tool for tool in tools if tool.name in allowed], choice.mode or "auto"
    elif choice.type == "function":
        named = joined_name(choice.namespace, choice.name or "")
    elif choice.type not in parsing.OPENAI_TOOL_CHOICES:
        raise unsupported(f"tool_choice: {choice.type!r} is not supported here", "tool_choice")
    return parsing.make_tool_use(tools, parsing.OPENAI_TOOL_CHOICES[mode], named, parallel)


def functions(tools: Sequence[ToolField]) -> Iterator[tuple[str, ToolField, ToolField | None]]:
    """Yield each function with its field and namespace. Raises Failure (400) for an unknown type of tool."""
    for i, tool in enumerate(tools):
        field, members = f"tools.{i}", [tool]
        if tool.type == "namespace":
            parsing.required(tool.name, f"{field}.name")
            members = parsing.required(tool.tools, f"{field}.tools")
        for k, member in enumerate(members):
            place = field if member is tool else f"{field}.tools.{k}"
            if member.type == "function":
                yield place, member, None if member is tool else tool
            elif not HOSTED_TOOLS.fullmatch(member.type):
                known = "only 'function' and 'namespace'"
                raise unsupported(f"{place}: {member.type!r} is not supported here, {known}", place)


def _parse_tool(tool: ToolField, field: str, namespace: ToolField | None) -> Tool:
    """Return a function. The first one of a namespace tells what the namespace is for."""
    name, description = parsing.required(tool.name, f"{field}.name"), tool.description
    if namespace is not None:
        name = joined_name(namespace.name, name)
        if namespace.tools and tool is namespace.tools[0]:
            parts = (namespace.description, description)
            description = parsing.PARAGRAPH.join(part for part in parts if part) or None
    return Tool(name, description, tool.parameters or {}, bool(tool.strict))


def joined_name(namespace: str | None, name: str) -> str:
    """Return the name of a function as the model sees it, such as mcp__server__tool."""
    return f"{namespace}__{name}" if namespace else name


def notes_on(tools: Sequence[ToolField]) -> list[str]:
    """Return a note on each type of tool that is left out."""
    kinds = {tool.type for outer in tools for tool in (outer, *(outer.tools or ()))}
    return [leave_out_tool(kind) for kind in sorted(kinds) if HOSTED_TOOLS.fullmatch(kind)]


def tools_json(tools: Sequence[ToolField]) -> list[Json]:
    """Return the functions and namespaces, without the tools that are left out."""
    found: list[Json] = []
    for tool in tools:
        one: Json = {"type": tool.type, "name": tool.name, "description": tool.description}
        if tool.type == "namespace":
            found.append(one | {"tools": tools_json(tool.tools or ())})
        elif tool.type == "function":
            found.append(one | {"parameters": tool.parameters or {}, "strict": bool(tool.strict)})
    return found
