"""The body of a request to `/v1/responses`: the fields that are read, and those that are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from mlx_spec.apps.server.fields import Fields

NAME = r"^[a-zA-Z0-9_.-]{1,128}$"  # of a function
TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


class Part(Fields):
    """A part of a message or of a function's output; only text is read."""

    type: str
    text: str | None = None
    refusal: str | None = None


def _as_parts(content: Any) -> Any:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


Parts = Annotated[list[Part], BeforeValidator(_as_parts)]


class Message(Fields):
    """A turn of the conversation."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts


class FunctionCall(Fields):
    """A call in an earlier answer."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    arguments: str


class FunctionCallOutput(Fields):
    """What a function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: Parts


class Reasoning(Fields):
    """Thoughts of an earlier answer."""

    type: Literal["reasoning"]
    summary: list[Part] | None = None
    content: list[Part] | None = None
    encrypted_content: str | None = None


class Other(Fields):
    """An item that is known by its type only."""

    type: str


def _kind(item: Any) -> str:
    if not isinstance(item, dict):
        return "other"
    kind = item.get("type")
    if kind is None and "role" in item:
        return "message"
    return kind if kind in ("message", "function_call", "function_call_output", "reasoning") else "other"


Item = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[Reasoning, Tag("reasoning")]
    | Annotated[Other, Tag("other")],
    Discriminator(_kind),
]


def _as_items(given: Any) -> Any:
    """A string is short for one message of the user."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class Tool(Fields):
    """A function that the client runs; another `type` names a tool of OpenAI's servers."""

    type: str
    name: str | None = Field(default=None, pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Named(Fields):
    """A tool by its name."""

    type: str
    name: str | None = None


class ToolChoice(Fields):
    """What may be done with the tools."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[Named] | None = None


def _as_choice(given: Any) -> Any:
    """The words none, auto and required as objects, too."""
    return {"type": given} if isinstance(given, str) else given


class TextFormat(Fields):
    """What the answer must look like."""

    type: str
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Fields):
    """How the answer is written."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(Fields):
    """Whether to think. Thoughts are given as they are; a summary of them is not made."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class StreamOptions(Fields):
    """How a stream is sent."""

    include_obfuscation: bool | None = None


class Body(Fields):
    """A request. What is optional may be null; what is only given back is at the end."""

    model: str | None = None
    input: Annotated[list[Item], BeforeValidator(_as_items), Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    include: list[str] | None = None
    tools: list[Tool] | None = None
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(_as_choice)] = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncation: str | None = None

    background: Any = None
    context_management: Any = None
    conversation: Any = None
    moderation: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    store: Any = None

    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
