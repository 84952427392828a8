"""One request, whatever protocol it came by, and the events that answer it.

The routes turn JSON into an `Ask` and events into JSON; the worker knows neither HTTP nor JSON bodies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mlx_spec.apps.server.failures import Failure
from mlx_spec.sampling import Sampling
from mlx_spec.session import Statistics
from mlx_spec.types import TokenLogprob

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)  # JSON schema of an object
    strict: bool = False  # calls of it always match the schema


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request and what may be done with them."""

    tools: tuple[Tool, ...]
    choice: Literal["auto", "none", "required"] = "auto"
    named: str | None = None  # the one that must be called; `choice` is then "required"
    parallel: bool = True  # more than one call in an answer


@dataclass(frozen=True)
class Chat:
    """A conversation to be answered.

    `messages` are those of a chat template: dicts with "role" (system, user, assistant or tool), "content" (a
    string, or None beside calls), and perhaps "reasoning_content", "name", "tool_call_id" and "tool_calls",
    whose "arguments" are parsed JSON (an object).
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: ToolUse | None = None
    thinking: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)  # more for the template


@dataclass(frozen=True)
class Raw:
    """Texts or tokens to be continued, each by `Ask.n` choices; choice i belongs to prompt i // n."""

    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool = False  # each choice begins with its prompt, and its logprobs: nan for the first token


@dataclass(frozen=True)
class Format:
    """What an answer must look like."""

    kind: Literal["json_object", "json_schema", "regex", "lark"]
    text: str = ""  # the JSON schema as JSON, the regular expression or the Lark grammar
    param: str = "response_format"  # the field of the request, for messages


@dataclass(frozen=True)
class Ask:
    """One request."""

    model: str  # resolved: the name of a model or alias that the server has
    prompt: Chat | Raw
    sampling: Sampling
    max_tokens: int | None = None  # of a choice; None: up to the end of the context
    stop: tuple[str, ...] = ()
    n: int = 1
    top_logprobs: int | None = None  # alternatives of each token; None: no logprobs
    format: Format | None = None
    prediction: str | None = None  # what much of the answer is expected to be


# --- events, in the order in which they come; a step of the engine ends with one that is no text and no call


@dataclass(frozen=True)
class Opened:
    """The prompt has been read. Once for each prompt."""

    prompt_tokens: int
    cached_tokens: int  # of those, found in a cache


@dataclass(frozen=True)
class Span:
    """A piece of text that one or a few tokens made, and where they came from."""

    text: str
    source: str | None  # the drafter by name, "grammar", "prediction"; None: the target itself
    position: int  # place in its draft, from 1; 0: not drafted


@dataclass(frozen=True)
class Piece:
    """More text of a choice."""

    index: int
    kind: Literal["answer", "thinking"]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()  # of the tokens that end in this piece, if asked for
    spans: tuple[Span, ...] = ()  # their texts make up `text`


@dataclass(frozen=True)
class CallOpened:
    """A tool call begins."""

    index: int
    call: int  # 0, 1, ... within the choice
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the JSON text of its arguments."""

    index: int
    call: int
    text: str


@dataclass(frozen=True)
class CallDropped:
    """The call that was opened last turned out to be malformed, or was cut off: it is none.

    What the model wrote follows as pieces of the answer. A stream has shown the call already; an answer
    that is sent as a whole leaves it out.
    """

    index: int
    call: int


@dataclass(frozen=True)
class RoundDone:
    """A verify round of a choice: for those who show figures as they come."""

    index: int
    statistics: Statistics  # of the choice so far


@dataclass(frozen=True)
class Ended:
    """A choice is complete."""

    index: int
    reason: FinishReason
    stop: str | None = None  # the stop string that ended it


@dataclass(frozen=True)
class Usage:
    """Tokens of the whole request."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int  # up to and with the token that completes a stop string
    reasoning_tokens: int
    accepted_prediction_tokens: int = 0  # of the client's prediction, in the answer
    rejected_prediction_tokens: int = 0  # of the client's prediction, not in the answer


@dataclass(frozen=True)
class Timings:
    """How the request went; the figures of several choices are added up."""

    statistics: Statistics
    draft_kind: str | None  # names of the drafters that drafted, joined by "+"; None: none did
    queued_seconds: float
    first_token_seconds: float  # from admission


@dataclass(frozen=True)
class Closed:
    """The request is answered. The last event."""

    usage: Usage
    timings: Timings


@dataclass(frozen=True)
class Failed:
    """The request failed. The last event."""

    failure: Failure


Event = Opened | Piece | CallOpened | CallArguments | CallDropped | RoundDone | Ended | Closed | Failed
