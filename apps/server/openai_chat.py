"""`/v1/chat/completions`: OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from . import parsing
from .errors import invalid, unsupported
from .http import Api, Json
from .openai_common import ChunkWriter, CompletionBody, parse_request
from .parameters import Effort, ThinkingField
from .parsing import Fields, Parts
from .request import AnswerPart, Chat, GenerationRequest, Tool, ToolCall, ToolUse, logprob_json

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
    """A tool, or a choice of one; only functions are supported."""

    type: str
    function: Function | None = None


class ChatBody(CompletionBody):
    """The body of a request."""

    messages: list[Message] = Field(min_length=1)
    tools: list[ToolField] | None = None
    tool_choice: Annotated[ToolField | None, BeforeValidator(parsing.as_type)] = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None  # as in `chat_template_kwargs`
    thinking: ThinkingField | None = None  # the same
    service_tier: str | None = None


# --- from the body to a request


def parse(body: ChatBody, model: str) -> GenerationRequest:
    """Return the request. Raises Failure (400), with the field that cannot be honoured."""
    if body.service_tier not in (None, "auto", "default"):
        raise unsupported("service_tier: there is only 'auto' or 'default'", "service_tier")
    chat = Chat(_parse_messages(body), _parse_tools(body), _thinks(body), _template_variables(body))
    return parse_request(body, model, chat, top_logprobs=parse_logprobs(body.logprobs, body.top_logprobs))


def _thinks(body: ChatBody) -> bool:
    wanted = (body.chat_template_kwargs or {}).get("enable_thinking", body.enable_thinking)
    if wanted is None and body.thinking is not None:
        wanted = body.thinking.type != "disabled"
    if wanted is None:
        return body.reasoning_effort not in parsing.NO_THINKING
    if not isinstance(wanted, bool):
        field = "chat_template_kwargs.enable_thinking"
        raise invalid(f"{field}: give true or false", field)
    return wanted


def _template_variables(body: ChatBody) -> Json:
    given = body.chat_template_kwargs or {}
    found = {name: value for name, value in given.items() if name != "enable_thinking"}
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
    given, named = body.tool_choice or ToolField(type="auto"), None
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
    return parsing.result_turn(message.tool_call_id, text, names, f"{field}.tool_call_id")


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

    def _start(self) -> Iterable[Json]:
        begun = {"role": "assistant", "content": ""}
        return [_choice_json(AnswerPart(i), "delta", begun, with_logprobs=False) for i in range(self._n)]

    def _piece(self, part: AnswerPart) -> Json:
        kinds = {delta.kind for delta in part.deltas}
        delta: Json = {}
        if "thinking" in kinds:
            delta["reasoning_content"] = part.text("thinking")
        if "answer" in kinds:
            delta["content"] = part.text()
        if part.calls:
            delta["tool_calls"] = [{"index": call.call, **_call_json(call)} for call in part.calls]
        return _choice_json(part, "delta", delta, with_logprobs=bool(part.logprobs()))

    def _whole(self, part: AnswerPart) -> Json:
        content = part.text() or (None if part.calls else "")
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if thinking := part.text("thinking"):
            message["reasoning_content"] = thinking
        if part.calls:
            message["tool_calls"] = [_call_json(call) for call in part.calls]
        return _choice_json(part, "message", message, with_logprobs=self._with_logprobs)


def _choice_json(part: AnswerPart, name: str, content: Json, *, with_logprobs: bool) -> Json:
    logprobs = {"content": [logprob_json(token) for token in part.logprobs()], "refusal": None}
    return {
        "index": part.index,
        name: content,
        "logprobs": logprobs if with_logprobs else None,
        "finish_reason": part.end and part.end.reason,
    }


def _call_json(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


API = Api(ChatBody, parse, ChatWriter)
