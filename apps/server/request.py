"""One request, whatever protocol it came by, and the events that answer it.

The protocol files turn JSON into a `GenerationRequest` and events into JSON. The engine thread knows neither
HTTP nor JSON bodies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mlx_spec.sampling import Sampling
from mlx_spec.session import Statistics
from mlx_spec.types import TokenLogprob

from .errors import Failure

FinishReason = Literal["stop", "length", "tool_calls"]
ToolChoice = Literal["auto", "none", "required"]


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)  # JSON schema of an object
    strict: bool = False  # its calls always match the schema


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request and how the model may use them."""

    tools: tuple[Tool, ...]
    choice: ToolChoice = "auto"
    named: str | None = None  # the tool that must be called; `choice` is then "required"
    parallel: bool = True  # an answer may hold several calls


@dataclass(frozen=True)
class Chat:
    """A conversation to answer.

    `messages` are those of a chat template: dicts with "role" (system, user, assistant or tool), "content" (a
    string, or None beside tool calls), and optionally "reasoning_content", "name", "tool_call_id" and
    "tool_calls", whose "arguments" are parsed JSON (an object).
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: ToolUse | None = None
    thinking: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)  # further variables of the template


@dataclass(frozen=True)
class RawPrompts:
    """Texts or tokens to continue. Each gets n choices; choice i continues prompt i // n."""

    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool = False  # each choice begins with its prompt and its logprobs: nan for the first token


@dataclass(frozen=True)
class OutputFormat:
    """The form that an answer must have."""

    kind: Literal["json_object", "json_schema", "regex", "lark"]
    text: str = ""  # the JSON schema as JSON, the regular expression or the Lark grammar
    param: str = "response_format"  # the field of the body, for error messages


@dataclass(frozen=True)
class GenerationRequest:
    """One request."""

    model: str  # the resolved name of a model
    prompt: Chat | RawPrompts
    sampling: Sampling
    max_tokens: int | None = None  # of each choice; None: until the context ends
    stop: tuple[str, ...] = ()
    n: int = 1
    top_logprobs: int | None = None  # alternatives of each token; None: no logprobs
    format: OutputFormat | None = None
    prediction: str | None = None  # text that the answer is expected to contain
    prompt_param: str = "messages"  # the field of the body that holds the prompt, for error messages


# --- events, in the order in which they come


@dataclass(frozen=True)
class PromptRead:
    """The prompt has been processed. Sent once for each prompt."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in a cache


@dataclass(frozen=True)
class SourceSpan:
    """A piece of text that one or a few tokens made, and where they came from."""

    text: str
    source: str | None  # name of the drafter, "grammar" or "prediction"; None: the target
    position: int  # place in its draft, from 1; 0: not drafted


@dataclass(frozen=True)
class TextDelta:
    """More text of a choice."""

    index: int
    kind: Literal["answer", "thinking"]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()  # of the tokens that end in this text, if requested
    spans: tuple[SourceSpan, ...] = ()  # their texts make up `text`


@dataclass(frozen=True)
class ToolCallStarted:
    """A tool call begins. The parsers of tool calls send this event, clients get `ToolCall`."""

    index: int
    call: int  # 0, 1, ... within the choice
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallDelta:
    """More of the JSON text of the arguments of the call that was started last."""

    index: int
    call: int
    text: str


@dataclass(frozen=True)
class ToolCallDropped:
    """The call that was started last is malformed or was cut off. Its text follows as part of the answer."""

    index: int
    call: int


@dataclass(frozen=True)
class ToolCall:
    """A complete tool call."""

    index: int
    call: int  # 0, 1, ... within the choice
    id: str
    name: str
    arguments: str  # JSON text of an object; may be empty


@dataclass(frozen=True)
class RoundDone:
    """A choice has completed a round."""

    index: int
    statistics: Statistics  # of the choice so far


@dataclass(frozen=True)
class ChoiceEnded:
    """A choice is complete."""

    index: int
    reason: FinishReason
    stop: str | None = None  # the stop string that ended it


@dataclass(frozen=True)
class Usage:
    """Tokens of the whole request."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int  # including the token that completes a stop string
    reasoning_tokens: int
    accepted_prediction_tokens: int = 0  # of the client's prediction, in the answer
    rejected_prediction_tokens: int = 0  # of the client's prediction, not in the answer


@dataclass(frozen=True)
class Timings:
    """Measurements of a request; those of several choices are added up."""

    statistics: Statistics
    draft_kind: str | None  # names of the drafters that drafted, joined by "+"; None if none did
    queued_seconds: float
    first_token_seconds: float  # since admission


@dataclass(frozen=True)
class Finished:
    """The request is answered. The last event."""

    usage: Usage
    timings: Timings


@dataclass(frozen=True)
class Failed:
    """The request failed. The last event."""

    failure: Failure


Event = (
    PromptRead
    | TextDelta
    | ToolCallStarted
    | ToolCallDelta
    | ToolCallDropped
    | ToolCall
    | RoundDone
    | ChoiceEnded
    | Finished
    | Failed
)
