"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_spec.sampling import Sampling
from mlx_spec.vision.pictures import from_base64

from ..engine import answers
from ..engine.engine_thread import EngineThread
from ..errors import Failure, invalid, unsupported, unsupported_field
from ..http import Api, Json, named_event
from ..requests import parameters, parsing
from ..requests.conversation import ConversationBuilder
from ..requests.parsing import ContentPart, Fields, FunctionField
from ..requests.request import Chat, GenerationRequest, PictureFile, ToolChoice, ToolUse
from ..requests.thinking_fields import ThinkingField, ThinkingFields
from ..settings import Settings

HOSTED_TOOLS = re.compile("web_search_|web_fetch_|code_execution_|tool_search_tool_|mcp_toolset$")


# --- the body


class PictureSource(Fields):
    """The source of a picture; only the type base64 is read."""

    type: str
    data: str | None = None
    media_type: str | None = None


class ContentBlock(ContentPart):
    """A block of text or thinking, a picture, a tool call or its result."""

    thinking: str | None = None
    id: str | None = Field(default=None, min_length=1)
    name: str | None = Field(default=None, min_length=1)
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Blocks | None = None
    is_error: bool | None = None
    source: PictureSource | None = None


Blocks = Annotated[
    list[ContentBlock],
    parsing.known_types("text", "image", "thinking", "tool_use", "tool_result"),
    parsing.AS_PARTS,
]


class AnthropicMessage(Fields):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class ToolField(FunctionField):
    """A tool that the client runs, or, by another `type`, a tool of Anthropic's servers."""

    type: str | None = None
    parameters: parsing.Schema | None = Field(default=None, alias="input_schema")


class ToolChoiceField(Fields):
    """The choice between text and tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class PromptBody(ThinkingFields):
    """The fields that make up the prompt, which are all that `count_tokens` takes."""

    model: str
    messages: list[AnthropicMessage] = Field(min_length=1)
    system: Blocks | None = None
    tools: list[ToolField] | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    thinking: ThinkingField | None = None
    output_config: parameters.AnswerConfig | None = None
    thread: Any = None  # a conversation that the server would hold; refused


class MessagesBody(parameters.SharedFields, PromptBody):
    """The body of a request."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None
    output_format: parameters.FormatField | None = None  # the earlier name of `output_config.format`
    stream: bool | None = None


# --- from the body to a request


async def count_tokens(http_request: Request, *, engine: EngineThread, settings: Settings) -> Response:
    """Count the tokens of a prompt without answering it."""
    body = await parsing.read_body(http_request, PromptBody)
    request = GenerationRequest(engine.resolve(body.model or None), _parse_chat(body), Sampling())
    parsing.check_limits(request, settings.limits)
    return JSONResponse({"input_tokens": await run_in_threadpool(engine.count_tokens, request)})


def parse(body: MessagesBody, model: str) -> GenerationRequest:
    """Return the request. Raises Failure (400), with the field that cannot be honoured."""
    budget = body.thinking.budget_tokens if body.thinking else None
    if budget is not None and not 0 < budget < body.max_tokens:
        field, most = "thinking.budget_tokens", body.max_tokens - 1
        raise invalid(f"{field} is {budget}, it must be 1 to {most}: max_tokens is {body.max_tokens}", field)
    format_field = body.output_config.format if body.output_config else None
    form = parameters.parse_format(format_field, "output_config.format", binds=True)
    return parameters.start_request(
        body,
        model,
        _parse_chat(body),
        form or parameters.parse_format(body.output_format, "output_format", binds=True),
        max_tokens=body.max_tokens,
        stop=parsing.stop_strings(body.stop_sequences),
        notes=_notes(body),
    )


def _notes(body: MessagesBody) -> list[str]:
    """Return what of the request has no effect."""
    types = {tool.type or "" for tool in body.tools or ()}
    verbosity = body.output_config.verbosity if body.output_config else None
    left_out = parameters.leave_out_tools(filter(HOSTED_TOOLS.match, types))
    return [*left_out, *parameters.verbosity_notes(verbosity)]


def _parse_chat(body: PromptBody) -> Chat:
    if body.thread is not None:
        message = "thread: no conversation is held here: send all of its messages, without thread"
        # Anthropic's SDK reads this, and sends them.
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        raise Failure(400, message, param="thread", code="unsupported_value", details=details)
    effort = body.output_config.effort if body.output_config else None
    thinks = body.thinks(None if body.thinking is None else body.thinking.wanted)
    return _parse_messages(body).chat(_parse_tools(body), thinks, body.variables(effort))


def _parse_tools(body: PromptBody) -> ToolUse | None:
    tools = []
    for i, tool in enumerate(body.tools or ()):
        field, type_name = f"tools.{i}", tool.type or "custom"
        if HOSTED_TOOLS.match(type_name):
            continue
        if type_name != "custom":
            message = f"{field}: {type_name!r} is built into Anthropic's models: only custom tools work here"
            raise unsupported(message, field)
        parsing.required(tool.parameters, f"{field}.input_schema")
        tools.append(tool.tool(field, "input_schema"))
    choice = body.tool_choice or ToolChoiceField(type="auto")
    named = parsing.required(choice.name, "tool_choice.name") if choice.type == "tool" else None
    is_parallel = not choice.disable_parallel_tool_use and body.parallel_tool_calls is not False
    modes: dict[str, ToolChoice] = {"auto": "auto", "none": "none", "any": "required", "tool": "required"}
    return parsing.make_tool_use(tools, modes[choice.type], named, is_parallel)


def _parse_messages(body: PromptBody) -> ConversationBuilder:
    if body.messages[-1].role == "assistant":
        message = "the conversation must not end with the assistant: an answer cannot be prefilled here"
        raise unsupported(message, f"messages.{len(body.messages) - 1}")
    conversation = ConversationBuilder()
    conversation.param = "system"
    if body.system:
        conversation.add("system", *parsing.part_texts(body.system, "system"))
    for i, turn in enumerate(body.messages):
        conversation.param = f"messages.{i}"
        if not turn.content:
            conversation.add(turn.role, "")
        for k, block in enumerate(turn.content):
            _add_block(conversation, turn.role, block, f"messages.{i}.content.{k}")
    return conversation


def _add_block(conversation: ConversationBuilder, role: str, block: ContentBlock, field: str) -> None:
    match role, block.type:
        case _, "text":
            conversation.add(role, parsing.required(block.text, f"{field}.text"))
        case "user", "image":
            conversation.add(role, _picture(block, field))
        case "assistant", "thinking":
            conversation.add(role, thinking=parsing.required(block.thinking, f"{field}.thinking"))
        case "assistant", "redacted_thinking":  # encrypted: only the server that wrote it can read it
            conversation.add(role)
        case "assistant", "tool_use":
            id = parsing.required(block.id, f"{field}.id")
            name = parsing.required(block.name, f"{field}.name")
            conversation.add_call(id, name, parsing.required(block.input, f"{field}.input"))
        case "user", "tool_result":
            contents = _result(block.content or (), f"{field}.content")
            if block.is_error:
                first = contents.pop(0) if isinstance(contents[0], str) else ""
                contents.insert(0, f"Error: {first}")
            conversation.add_result(block.tool_use_id, contents, f"{field}.tool_use_id")
        case _:
            raise parsing.unsupported_part(block, field)


def _result(blocks: Sequence[ContentBlock], field: str) -> list[str | PictureFile]:
    """Return the texts and pictures of the result of a tool, at least one text. Raises Failure (400)."""
    contents: list[str | PictureFile] = []
    for i, block in enumerate(blocks):
        match block.type:
            case "image":
                contents.append(_picture(block, f"{field}.{i}"))
            case "text":
                contents.append(parsing.required(block.text, f"{field}.{i}.text"))
            case _:
                raise parsing.unsupported_part(block, f"{field}.{i}")
    return contents or [""]


def _picture(block: ContentBlock, field: str) -> PictureFile:
    """Return the picture of a block. Raises Failure (400)."""
    source = parsing.required(block.source, f"{field}.source")
    if source.type != "base64":
        shown, type_field = source.type[: parsing.MAX_SHOWN_CHARS], f"{field}.source.type"
        raise unsupported_field(type_field, f"{shown!r} is not fetched: send the picture itself, as base64")
    return parsing.picture(from_base64, parsing.required(source.data, f"{field}.source.data"), field)


# --- answers


class MessageWriter(answers.BlockWriter):
    """Writes an answer as a message that grows block by block.

    `signature` signs a thinking block. A client takes one without it for one that was broken off, and
    may send its thinking back as text of the answer. Requests may have any signature.
    """

    signature = "mlx_spec"

    def __init__(self, body: MessagesBody, request: GenerationRequest) -> None:
        super().__init__()
        self._max_tokens = body.max_tokens
        self._show_thinking = body.thinking is None or body.thinking.display != "omitted"
        head = {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant", "model": request.model}
        end = {"stop_reason": None, "stop_sequence": None}
        self.body = {**head, "content": self.blocks, **end, "usage": {}}
        self.body |= answers.notes_json(request.notes)

    def frames(self, event: answers.Event | None) -> Iterator[str]:
        return (named_event(content["type"], content) for content in self.read(event))

    def read(self, event: answers.Event | None) -> Iterator[Json]:
        if not self.body["usage"] and not isinstance(event, answers.Failed):  # the message has not begun
            match event:
                case answers.PromptRead(total, cached) | answers.PromptProgress(total, cached):
                    usage = answers.Usage(total, cached, 0, 0)
                case _:
                    usage = answers.Usage(0, 0, 0, 0)
            self.body["usage"] = _usage_json(usage)
            yield {"type": "message_start", "message": {**self.body, "content": []}}
        match event:
            case None:
                yield {"type": "ping"}
            case answers.PromptProgress():
                yield {"type": "ping", **answers.progress_json(event)}
            case answers.TextDelta(text=text) if text:
                yield from self.write(event)
            case answers.ToolCall():
                yield from self.write(event)
            case answers.ChoiceEnded():
                yield from self.close()
                stop_reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
                reason = "stop_sequence" if event.stop is not None else stop_reasons[event.reason]
                self.body |= {"stop_reason": reason, "stop_sequence": event.stop}
            case answers.Finished():
                yield from self._finish(event)
            case answers.Failed(failure=failure):
                yield error_json(failure)

    def new_block(self, begins: answers.TextDelta | answers.ToolCall) -> Json:
        if isinstance(begins, answers.ToolCall):
            return {"type": "tool_use", "id": begins.id, "name": begins.name, "input": {}}
        if begins.kind == "thinking":
            return {"type": "thinking", "thinking": "", "signature": ""}
        return {"type": "text", "text": ""}

    def started(self, block: Json) -> Iterator[Json]:
        yield self._event("start", content_block=dict(block))

    def grown(self, block: Json, more: answers.TextDelta | answers.ToolCall) -> Iterator[Json]:
        type_name = block["type"]  # also the name of the field with the text
        if isinstance(more, answers.ToolCall):
            if more.arguments:
                block["input"] = json.loads(more.arguments)
                yield self._event("delta", delta={"type": "input_json_delta", "partial_json": more.arguments})
        elif type_name == "text" or self._show_thinking:
            block[type_name] += more.text
            yield self._event("delta", delta={"type": f"{type_name}_delta", type_name: more.text})

    def ended(self, block: Json, *, is_cut: bool) -> Iterator[Json]:
        if block["type"] == "thinking":
            block["signature"] = self.signature
            yield self._event("delta", delta={"type": "signature_delta", "signature": self.signature})
        yield self._event("stop")

    def _event(self, name: str, **more: Any) -> Json:
        return {"type": f"content_block_{name}", "index": len(self.blocks) - 1, **more}

    def _finish(self, event: answers.Finished) -> Iterator[Json]:
        is_cut = self.body["stop_reason"] == "max_tokens"
        if is_cut and event.usage.completion_tokens < self._max_tokens:
            self.body["stop_reason"] = "model_context_window_exceeded"
        measured = {"usage": _usage_json(event.usage), "timings": answers.timings_json(event.timings)}
        self.body |= measured
        end = {key: self.body[key] for key in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": end, **measured}
        yield {"type": "message_stop"}


def _usage_json(usage: answers.Usage) -> Json:
    """Return the usage of a request as Anthropic counts it: input tokens do not include cached ones."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        **answers.reread_json(usage),
    }


def error_json(failure: Failure) -> dict[str, Any]:
    """Return Anthropic's error object: the body of a response, or of an `error` event."""
    default = "invalid_request_error" if failure.status < 500 else "api_error"
    types = {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
    }
    error_type = types.get(failure.status, default)
    details = {} if failure.details is None else {"details": dict(failure.details)}
    return {"type": "error", "error": {"type": error_type, "message": failure.message, **details}}


def _error(failure: Failure) -> Response:
    status = 529 if failure.status == 503 else failure.status  # Anthropic's status for an overload
    return JSONResponse(error_json(failure), status)


API = Api(MessagesBody, parse, MessageWriter, error=_error, header="anthropic-version")
