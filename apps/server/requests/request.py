"""The form in which every protocol hands a request to the engine thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mlx_spec.sampling import Sampling
from mlx_spec.tokenizer.fill_in import FillIn

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
    parallel: bool = True  # an answer may contain several calls


@dataclass(frozen=True)
class PictureFile:
    """A picture as a client sent it."""

    data: bytes = field(repr=False)
    param: str = field(compare=False)  # its field in the body


@dataclass(frozen=True)
class Chat:
    """A conversation to answer.

    `messages` have the form that a chat template reads. "role" is system, user, assistant or tool. "content"
    is a string, a list of parts if there are pictures, or None beside tool calls. Optional keys are
    "reasoning_content", "name", "tool_call_id" and "tool_calls", whose "arguments" are a parsed JSON object.
    `params` names the field of the body that each message came from.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: ToolUse | None = None
    thinking: bool | None = None  # None: as the template says
    variables: Mapping[str, Any] = field(default_factory=dict)  # further variables of the template
    params: tuple[str, ...] = field(default=(), compare=False)
    begun: str = ""  # the text after which the answer goes on

    @property
    def pictures(self) -> list[PictureFile]:
        """Return the pictures of all messages in their order."""
        contents = (message.get("content") for message in self.messages)
        parts = (part for content in contents if isinstance(content, list) for part in content)
        return [part["image"] for part in parts if part["type"] == "image"]


RawPrompt = str | tuple[int, ...] | FillIn


@dataclass(frozen=True)
class RawPrompts:
    """Texts or tokens to continue. Each gets n choices; choice i continues prompt i // n."""

    prompts: tuple[RawPrompt, ...]
    echo: bool = False  # each choice begins with its prompt, with logprobs: nan for the first token


@dataclass(frozen=True)
class OutputFormat:
    """The form that an answer must have."""

    kind: Literal["json_object", "json_schema", "regex", "lark"]
    text: str = ""  # the JSON schema as JSON, the regular expression or the Lark grammar
    param: str = "response_format"  # the field of the body, for error messages
    strict: bool = True  # refuse a schema that no grammar enforces fully; else leave keywords out


@dataclass(frozen=True)
class GenerationRequest:
    """A request, ready to be prepared for its model. One without any prompt only loads the model."""

    model: str  # the resolved name of a model
    prompt: Chat | RawPrompts
    sampling: Sampling
    max_tokens: int | None = None  # of each choice; None: until the context ends
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()  # tokens that end a choice and are hidden, like the end of text
    ignore_eos: bool = False  # the model's end-of-text tokens are never drawn
    n: int = 1
    top_logprobs: int | None = None  # alternatives of each token; None: no logprobs
    format: OutputFormat | None = None
    prediction: str | None = None  # text that the answer is expected to contain
    progress: bool = False  # report how much of the prompt has been read
    prompt_param: str = "messages"  # the field of the body that holds the prompt, for error messages
    keep_alive: float | None = None  # seconds without use after which to unload; None: as the settings say
    shows_thinking: bool = True  # the answer contains the thinking, too
    key: str = field(default="", repr=False)  # the API key: nothing of other keys is reused
    earlier_answers: bool = True  # drafts may be copied from earlier answers to the key
    notes: tuple[str, ...] = ()  # parameters without effect, which the answer names

    @property
    def echoes(self) -> bool:
        """Return True if each choice begins with its prompt."""
        return isinstance(self.prompt, RawPrompts) and self.prompt.echo

    @property
    def has_grammar(self) -> bool:
        """Return True if a grammar may have to be compiled for the answer."""
        return self.format is not None or (isinstance(self.prompt, Chat) and self.prompt.tools is not None)
