"""`/v1/chat/completions`: OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mlx_spec.types import TokenLogprob

from . import parsing
from .errors import invalid, unsupported
from .http import Api, Json
from .openai_common import ChunkWriter, CompletionBody, parse_request
from .parsing import Fields, Parts
from .request import (
    Chat,
    ChoiceEnded,
    Event,
    GenerationRequest,
    PromptRead,
    TextDelta,
    Tool,
    ToolCall,
    ToolUse,
    logprob_json,
)

OWN_VARIABLES = ("messages", "tools", "add_generation_prompt")  # of a template; other fields set them


# --- the body


class CalledFunction(Fields):
    """A function and its arguments as JSON text."""

    name: str = Field(min_length=1)
    arguments: str


class CallField(Fields):
    """A tool call in an earlier answer."""

    id: str = Field(min_length=1)
    type: str | None = None
    function: CalledFunction | None = None


class Message(Fields):
    """A turn of the conversation."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: Parts | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None  # another name of it, if it is text
    refusal: str | None = None
    tool_calls: list[CallField] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    audio: Any = None


class Function(Fields):
    """A function that the client runs."""

    name: str = Field(pattern=parsing.TOOL_NAME)
    description: str | None = None
    parameters: parsing.Schema | None = None
    strict: bool | None = None


class ToolField(Fields):
    """A tool; only functions are supported."""

    type: str
    function: Function | None = None


class FunctionName(Fields):
    """A function by its name."""

    name: str


class ToolChoiceField(Fields):
    """The choice between text and tools."""

    type: str
    function: FunctionName | None = None


class ThinkingField(Fields):
    """Turns thinking on or off."""

    type: Literal["enabled", "disabled"]


class ChatBody(CompletionBody):
    """The body of a request."""

    messages: list[Message]
    tools: list[ToolField] | None = None
    tool_choice: Annotated[ToolChoiceField | None, BeforeValidator(parsing.as_type)] = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None  # as in `chat_template_kwargs`
    thinking: ThinkingField | None = None  # the same

    # Refused, except for values without effect.
    modalities: list[str] | None = None
    service_tier: str | None = None
    verbosity: str | None = None


# --- from the body to a request


def parse(body: ChatBody, model: str) -> GenerationRequest:
    """Return the request. Raises Failure (400), with the field that cannot be honoured."""
    _check_supported(body)
    chat = Chat(_parse_messages(body), _parse_tools(body), _thinks(body), _template_variables(body))
    top = parse_logprobs(body.logprobs, body.top_logprobs)
    return replace(parse_request(body, model, chat), top_logprobs=top)


def _check_supported(body: ChatBody) -> None:
    parsing.check_accepted("service_tier", body.service_tier, "auto", "default")
    parsing.check_accepted("verbosity", body.verbosity, "medium")
    if set(body.modalities or []) - {"text"}:
        raise unsupported("modalities: only text is supported", "modalities")


def _thinks(body: ChatBody) -> bool:
    wanted = (body.chat_template_kwargs or {}).get("enable_thinking", body.enable_thinking)
    if wanted is None and body.thinking is not None:
        wanted = body.thinking.type == "enabled"
    if wanted is None:
        return body.reasoning_effort not in parsing.NO_THINKING
    if not isinstance(wanted, bool):
        field = "chat_template_kwargs.enable_thinking"
        raise invalid(f"{field}: give true or false", field)
    return wanted


def _template_variables(body: ChatBody) -> Json:
    found = dict(body.chat_template_kwargs or {})
    found.pop("enable_thinking", None)
    for name in OWN_VARIABLES:
        if name in found:
            raise unsupported(f"chat_template_kwargs.{name}: is set by other fields", "chat_template_kwargs")
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    return effort | found


def parse_logprobs(wanted: bool | None, top: int | None) -> int | None:
    """Return the alternatives of each token, None without logprobs. Raises Failure (400)."""
    if wanted:
        return top or 0
    if top:
        raise invalid("top_logprobs: only with logprobs true", "top_logprobs")
    return None


def _parse_tools(body: ChatBody) -> ToolUse | None:
    tools = [parse_tool(tool, f"tools.{i}") for i, tool in enumerate(body.tools or [])]
    given, named = body.tool_choice or ToolChoiceField(type="auto"), None
    choice = parsing.OPENAI_TOOL_CHOICES.get(given.type)
    if choice is None:
        shown = given.type[: parsing.MAX_SHOWN_CHARS]
        raise unsupported(f"tool_choice: {shown!r} is not supported", "tool_choice")
    if given.type == "function":
        named = parsing.required(given.function, "tool_choice.function").name
    return parsing.make_tool_use(tools, choice, named, body.parallel_tool_calls)


def parse_tool(tool: ToolField, field: str) -> Tool:
    """Return a tool. Raises Failure (400)."""
    if tool.type != "function":
        shown = tool.type[: parsing.MAX_SHOWN_CHARS]
        raise unsupported(f"{field}.type: {shown!r} is not supported: only functions", f"{field}.type")
    function = parsing.required(tool.function, f"{field}.function")
    parameters = function.parameters or {}
    if parameters.get("type", "object") != "object":
        place = f"{field}.function.parameters.type"
        raise invalid(f"{place}: arguments are an object", place)
    return Tool(function.name, function.description, parameters, bool(function.strict))


def _parse_messages(body: ChatBody) -> tuple[Json, ...]:
    if not body.messages:
        raise invalid("messages: is empty: give at least one", "messages")
    turns = []
    names: dict[str, str] = {}  # of the called functions, by the ids of the calls
    for i, message in enumerate(body.messages):
        field = f"messages.{i}"
        if message.role == "function" or message.function_call is not None:
            raise unsupported(f"{field}: function calls of the old kind: give tool calls instead", field)
        if message.audio is not None:
            raise unsupported(f"{field}.audio: only text is read here", f"{field}.audio")
        turns.append(_parse_message(message, field, names))
    return parsing.merge_turns(turns)


def _parse_message(message: Message, field: str, names: dict[str, str]) -> Json:
    if message.role == "assistant":
        return _parse_answer(message, field, names)
    content = parsing.required(message.content, f"{field}.content")
    text = parsing.PARAGRAPH.join(parsing.part_texts(content, f"{field}.content"))
    if message.role != "tool":
        return {"role": "user" if message.role == "user" else "system", "content": text}
    place = f"{field}.tool_call_id"
    id = parsing.required(message.tool_call_id, place)
    if id not in names:
        raise invalid(f"{place}: there is no call {id[: parsing.MAX_SHOWN_CHARS]!r} before it", place)
    return {"role": "tool", "tool_call_id": id, "name": names[id], "content": text}


def _parse_answer(message: Message, field: str, names: dict[str, str]) -> Json:
    calls = []
    for i, call in enumerate(message.tool_calls or []):
        place = f"{field}.tool_calls.{i}"
        if call.function is None or call.type not in (None, "function"):
            raise unsupported(f"{place}: only calls of functions are supported", place)
        name = call.function.name
        arguments = parsing.parse_arguments(call.function.arguments)
        calls.append(parsing.call_turn(call.id, name, arguments))
        names[call.id] = name
    text = message.refusal
    if message.content is not None:
        text = "".join(parsing.part_texts(message.content, f"{field}.content"))
    thinking = message.reasoning if isinstance(message.reasoning, str) else None
    thinking = message.reasoning_content or thinking
    if text is None and not calls and thinking is None and message.reasoning_content is None:
        raise invalid(f"{field}.content: is missing, and there are no tool calls", f"{field}.content")
    return parsing.assistant_turn(text, thinking, calls)


# --- answers


class ChatWriter(ChunkWriter):
    """Writes an answer as chat completions have it."""

    def __init__(self, body: ChatBody, request: GenerationRequest) -> None:
        object = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__("chatcmpl", object, request.model, body.stream_options)
        if body.service_tier is not None:
            self.head["service_tier"] = "default"
        self._n = request.n
        self._with_logprobs = request.top_logprobs is not None

    def _start(self, event: Event) -> Iterator[Json]:
        match event:
            case PromptRead():
                for i in range(self._n):
                    yield _delta_choice(i, {"role": "assistant", "content": ""})
            case ToolCall(index=index, call=call):
                yield _delta_choice(index, {"tool_calls": [{"index": call, **_call_json(event)}]})

    def _delta(self, delta: TextDelta) -> Json:
        if delta.kind == "thinking":
            return _delta_choice(delta.index, {"reasoning_content": delta.text})
        choice = _delta_choice(delta.index, {"content": delta.text})
        return {**choice, "logprobs": _logprobs_json(delta.logprobs) if delta.logprobs else None}

    def _end(self, event: ChoiceEnded) -> Json:
        return {**_delta_choice(event.index, {}), "finish_reason": event.reason}

    def _choices(self, events: Iterable[Event]) -> list[Json]:
        found: list[list[Event]] = [[] for _ in range(self._n)]
        for event in events:
            if isinstance(event, TextDelta | ToolCall | ChoiceEnded):
                found[event.index].append(event)
        return [self._choice(i, own) for i, own in enumerate(found)]

    def _choice(self, index: int, events: Iterable[Event]) -> Json:
        texts, calls, reason = {"answer": "", "thinking": ""}, list[Json](), None
        tokens: list[TokenLogprob] = []
        for event in events:
            match event:
                case TextDelta(kind=kind, text=text):
                    texts[kind] += text
                    tokens += event.logprobs if kind == "answer" else ()
                case ToolCall():
                    calls.append(_call_json(event))
                case ChoiceEnded():
                    reason = event.reason
        content = texts["answer"] or (None if calls else "")
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        message |= {"reasoning_content": texts["thinking"]} if texts["thinking"] else {}
        message |= {"tool_calls": calls} if calls else {}
        logprobs = _logprobs_json(tokens) if self._with_logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}


def _delta_choice(index: int, delta: Json) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _call_json(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _logprobs_json(tokens: Iterable[TokenLogprob]) -> Json:
    return {"content": [logprob_json(token) for token in tokens], "refusal": None}


API = Api(ChatBody, parse, ChatWriter)
