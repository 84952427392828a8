"""The body of a request to `/v1/messages`: the fields that are read, and those that are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from mlx_spec.apps.server.fields import Fields

NAME = r"^[a-zA-Z0-9_.-]{1,128}$"  # of a tool


class Text(Fields):
    """A block of text."""

    type: Literal["text"]
    text: str


class Thinking(Fields):
    """Thoughts of an earlier answer; they are not signed here."""

    type: Literal["thinking"]
    thinking: str


class ToolUse(Fields):
    """A call in an earlier answer."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: dict[str, Any]


class Other(Fields):
    """A block that is known by its type only."""

    type: str


def _as_blocks(content: Any) -> Any:
    """A string is short for one block of text; null for none."""
    if content is None:
        return []
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _as_content(content: Any) -> Any:
    """As above, but a turn has content."""
    return content if content is None else _as_blocks(content)


def _kind(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    return kind if kind in ("text", "thinking", "tool_use", "tool_result") else "other"


Result = Annotated[
    Annotated[Text, Tag("text")] | Annotated[Other, Tag("other")],
    Discriminator(lambda block: kind if (kind := _kind(block)) == "text" else "other"),
]


class ToolResult(Fields):
    """What a call returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[list[Result], BeforeValidator(_as_blocks)] = Field(default_factory=list)
    is_error: bool | None = None


Block = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[Thinking, Tag("thinking")]
    | Annotated[ToolUse, Tag("tool_use")]
    | Annotated[ToolResult, Tag("tool_result")]
    | Annotated[Other, Tag("other")],
    Discriminator(_kind),
]


class Message(Fields):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[Block], BeforeValidator(lambda content: content if content is None else _as_blocks(content))
    ]


class Tool(Fields):
    """A tool that the client runs; `type` names one that Anthropic's servers would run."""

    type: str | None = None
    name: str = Field(pattern=NAME)
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(Fields):
    """What may be done with the tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Fields):
    """Whether to think. A budget is not enforced: `max_tokens` bounds thoughts and answer together."""

    type: str
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Fields):
    """What the answer must look like."""

    type: str
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class OutputConfig(Fields):
    """The form of the answer, and how hard to think about it."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Prompt(Fields):
    """What makes up the prompt: all that counting its tokens needs."""

    model: str
    messages: list[Message] = Field(min_length=1)
    system: Annotated[list[Result], BeforeValidator(_as_blocks)] = Field(default_factory=list)
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None


class Body(Prompt):
    """A request. What is optional may be null; `metadata`, `service_tier` and `cache_control` are idle."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    stream: bool | None = None
    container: Any = None
    mcp_servers: list[Any] | None = None
    speed: str | None = None
