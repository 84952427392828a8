"""The body of a request to `/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mlx_spec.apps.server import fields
from mlx_spec.apps.server.fields import Fields, Parts

NAME = r"^[a-zA-Z0-9_.-]{1,128}$"  # of a function

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Called(Fields):
    """A function, and its arguments as JSON text."""

    name: str = Field(min_length=1)
    arguments: str


class Call(Fields):
    """A call in an earlier answer."""

    id: str = Field(min_length=1)
    type: str | None = None
    function: Called | None = None


class Message(Fields):
    """A turn of the conversation."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: Parts = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None  # the same by another name, if it is text
    refusal: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    audio: Any = None


class Function(Fields):
    """A function that the client runs."""

    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    """A tool; only functions are supported."""

    type: str
    function: Function | None = None


class Named(Fields):
    """A function by its name."""

    name: str


class ToolChoice(Fields):
    """What may be done with the tools."""

    type: str
    function: Named | None = None


def _as_choice(given: Any) -> Any:
    """A word is short for an object of that type."""
    return {"type": given} if isinstance(given, str) else given


class Body(fields.Body):
    """A request."""

    messages: list[Message]
    tools: list[Tool] | None = None
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(_as_choice)] = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # Refused, but for the values that mean what is done in any case.
    modalities: list[str] | None = None
    service_tier: str | None = None
    verbosity: str | None = None
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None
    moderation: Any = None
