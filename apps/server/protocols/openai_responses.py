"""`/v1/responses`: OpenAI's Responses API.

Agents send a namespace of functions for each server of tools. The model sees NAMESPACE__NAME as the name of a
function; a call goes back to the client with `namespace` and `name`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..engine import answers
from ..engine.engine_thread import EngineThread
from ..errors import Failure, invalid_field, unsupported, unsupported_field
from ..http import Api, Json, answer, given_key, named_event
from ..requests import parameters, parsing
from ..requests.conversation import ConversationBuilder
from ..requests.parsing import Fields, FunctionField
from ..requests.request import GenerationRequest, Tool, ToolUse
from ..requests.thinking_fields import ThinkingFields
from ..settings import Settings
from .stored_responses import ItemField, KeyResponses, ResponseStore

INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDE_ENCRYPTED = "reasoning.encrypted_content"
HOSTED_TOOLS = re.compile(  # they run on OpenAI's servers, or have other forms of calls and results
    "apply_patch|code_interpreter|computer|custom|file_search|image_generation|local_shell|mcp|shell"
    "|programmatic_tool_calling|tool_search|(computer_use|web_search)(_preview)?(_[0-9]{4}_[0-9]{2}_[0-9]{2})?"
)
THINKING_PREFIX = "mlx-spec:"  # of `encrypted_content` that we wrote: nothing is encrypted


# --- the body


class ToolField(FunctionField):
    """A function that the client runs, a namespace of functions, or a tool of OpenAI's servers."""

    type: str
    namespace: str | None = Field(default=None, pattern=parsing.TOOL_NAME)  # within a tool choice
    tools: list[ToolField] | None = None  # of a namespace


class ToolChoiceField(Fields):
    """The choice between text and tools."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ToolField] | None = None


class ResponsesBody(ThinkingFields, parameters.SharedFields):
    """The body of a request."""

    model: str | None = None
    input: Annotated[
        list[ItemField],
        parsing.known_types(
            "message", "function_call", "function_call_output", "reasoning", "item_reference"
        ),
        parsing.from_text(lambda text: [{"role": "user", "content": text}]),
        Field(min_length=1),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    include: list[str] | None = None
    tools: list[ToolField] | None = None
    tool_choice: Annotated[ToolChoiceField | None, parsing.AS_TYPE] = None
    parallel_tool_calls: bool | None = None
    text: parameters.AnswerConfig | None = None
    reasoning: parameters.AnswerConfig | None = None
    stream: bool | None = None
    stream_options: parameters.StreamOptions | None = None
    store: bool | None = None
    previous_response_id: str | None = None

    # Without effect, but sent back.
    max_tool_calls: int | None = None
    metadata: parsing.Repeated = None
    prompt_cache_key: parsing.Repeated = None
    safety_identifier: parsing.Repeated = None
    user: parsing.Repeated = None


# --- from the body to a request


def parse(body: ResponsesBody, model: str, store: KeyResponses) -> GenerationRequest:
    """Return the request. Raises Failure (400), with the field that cannot be honoured."""
    _check_supported(body)
    effort = body.reasoning.effort if body.reasoning else None
    with_logprobs = INCLUDE_LOGPROBS in (body.include or ()) or body.top_logprobs
    conversation = _parse_messages(body, store.conversation(body.previous_response_id, body.input))
    chat = conversation.chat(_parse_tools(body), body.thinks(effort=effort), body.variables(effort))
    form = body.text.format if body.text else None
    if form is not None and form.type == "json_schema":
        parsing.required(form.name, "text.format.name")
    return parameters.start_request(
        body,
        model,
        chat,
        parameters.parse_format(form, "text.format"),
        max_tokens=body.max_output_tokens,
        notes=_notes(body),
        top_logprobs=body.top_logprobs or 0 if with_logprobs else None,
        prompt_param="input",
    )


def _notes(body: ResponsesBody) -> list[str]:
    """Return what of the request has no effect."""
    types = {tool.type for outer in body.tools or () for tool in (outer, *(outer.tools or ()))}
    verbosity = body.text.verbosity if body.text else None
    left_out = parameters.leave_out_tools(filter(HOSTED_TOOLS.fullmatch, types))
    return [*left_out, *parameters.verbosity_notes(verbosity)]


async def count_input(
    http_request: Request, *, engine: EngineThread, settings: Settings, store: ResponseStore
) -> Response:
    """Count the tokens of a prompt without answering it."""
    body = await parsing.read_body(http_request, ResponsesBody)
    request = parse(body, engine.resolve(body.model or None), store.of(given_key(http_request.headers)))
    parsing.check_limits(request, settings.limits)
    count = await run_in_threadpool(engine.count_tokens, request)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": count})


def _check_supported(body: ResponsesBody) -> None:
    refused = {  # except for null and false
        "context_management": "send as much as the context holds",
        "conversation": "continue a response by previous_response_id",
        "prompt": "send the prompt itself",
    }
    for name, way_out in refused.items():
        if (body.model_extra or {}).get(name) not in (None, False):
            raise unsupported(f"{name} is not supported here: {way_out}", name)
    for i, name in enumerate(body.include or ()):
        if name not in (INCLUDE_LOGPROBS, INCLUDE_ENCRYPTED):
            known = f"{INCLUDE_LOGPROBS!r} and {INCLUDE_ENCRYPTED!r}"
            raise unsupported(f"include.{i}: {name!r} is not supported, only {known}", "include")
    if body.stream_options is not None and not body.stream:
        raise invalid_field("stream_options", "only for a stream")


def _parse_messages(body: ResponsesBody, items: Sequence[ItemField]) -> ConversationBuilder:
    conversation = ConversationBuilder()
    conversation.param = "instructions"
    if body.instructions is not None:
        conversation.add("system", body.instructions)
    for i, item in enumerate(items, start=len(body.input) - len(items)):
        conversation.param = f"input.{i}" if i >= 0 else "previous_response_id"
        _add_item(conversation, item, f"input.{i}")
    return conversation


def _add_item(conversation: ConversationBuilder, item: ItemField, field: str) -> None:
    text_parts = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
    match item.type or "message":
        case "message":
            role = parsing.required(item.role, f"{field}.role")
            reader = parsing.part_contents if role == "user" else parsing.part_texts
            contents = reader(item.content, f"{field}.content", text_parts)
            conversation.add("system" if role == "developer" else role, *contents)
        case "function_call":
            id = parsing.required(item.call_id, f"{field}.call_id")
            name = _joined_name(item.namespace, parsing.required(item.name, f"{field}.name"))
            conversation.add_call(id, name, parsing.required(item.arguments, f"{field}.arguments"))
        case "function_call_output":
            contents = parsing.part_contents(item.output, f"{field}.output", text_parts)
            conversation.add_result(item.call_id, contents, f"{field}.call_id")
        case "reasoning":
            text = "".join(parsing.part_texts(item.content or item.summary or [], field, text_parts))
            foreign, _, thinking = (item.encrypted_content or "").partition(THINKING_PREFIX)
            conversation.add("assistant", thinking=text or ("" if foreign else thinking))
        case _:
            raise unsupported_field(field, f"an item of type {item.type!r} is not supported here")


# --- tools: functions, namespaces of functions, and hosted tools, which are left out


def _parse_tools(body: ResponsesBody) -> ToolUse | None:
    """Return how the functions may be used; None without any. Raises Failure (400)."""
    tools = [tool for tool, _, _ in _functions(body.tools or ())]
    choice = body.tool_choice or ToolChoiceField(type="auto")
    named, mode = None, choice.type
    if choice.type == "allowed_tools":
        names = [_joined_name(tool.namespace, tool.name or "") for tool in choice.tools or ()]
        tools, mode = parsing.allowed_tools(tools, names), choice.mode or "auto"
    elif choice.type == "function":
        named = _joined_name(choice.namespace, choice.name or "")
    return parsing.make_tool_use(tools, mode, named, body.parallel_tool_calls)


def _functions(tools: Sequence[ToolField]) -> Iterator[tuple[Tool, str | None, str]]:
    """Yield each function, its namespace and its name there. Raises Failure (400)."""
    for i, outer in enumerate(tools):
        field, space, members = f"tools.{i}", None, [outer]
        if outer.type == "namespace":
            space = parsing.required(outer.name, f"{field}.name")
            members = parsing.required(outer.tools, f"{field}.tools")
        for k, tool in enumerate(members):
            member_field = f"{field}.tools.{k}" if space else field
            if tool.type == "function":
                function = tool.tool(member_field)
                about = [outer.description] if space and k == 0 else []  # of the namespace, shown once
                description = parsing.PARAGRAPH.join(filter(None, [*about, function.description])) or None
                joined = replace(function, name=_joined_name(space, function.name), description=description)
                yield joined, space, function.name
            elif not HOSTED_TOOLS.fullmatch(tool.type):
                problem = f"{tool.type!r} is not supported here, only 'function' and 'namespace'"
                raise unsupported_field(member_field, problem)


def _joined_name(namespace: str | None, name: str) -> str:
    """Return the name of a function as the model sees it, such as mcp__server__tool."""
    return f"{namespace}__{name}" if namespace else name


def _tools_json(tools: Sequence[ToolField]) -> list[Json]:
    """Return the functions and namespaces, without the tools that are left out."""
    shown: list[Json] = []
    for tool in tools:
        one: Json = {"type": tool.type, "name": tool.name, "description": tool.description}
        if tool.type == "namespace":
            shown.append(one | {"tools": _tools_json(tool.tools or ())})
        elif tool.type == "function":
            shown.append(one | {"parameters": tool.parameters or {}, "strict": bool(tool.strict)})
    return shown


# --- answers


class ResponseWriter(answers.BlockWriter):
    """Writes an answer as a response that grows item by item."""

    def __init__(self, body: ResponsesBody, request: GenerationRequest, store: KeyResponses) -> None:
        super().__init__()
        self._store = None if body.store is False else store
        self._input = store.referenced(body.input)
        self._previous = store.continued(body.previous_response_id)
        named = _functions(body.tools or ())
        self._spaces = {tool.name: (space, name) for tool, space, name in named if space is not None}
        self.body = _new_response(body, request) | {"output": self.blocks}
        self._encode_thinking = INCLUDE_ENCRYPTED in (body.include or ())
        self._numbers = count()
        self._part: Json = {}  # the content part that grows
        self._started = False
        self._shown = 0.0  # time.monotonic() when the progress of the prompt was last shown

    def frames(self, event: answers.Event | None) -> Iterator[str]:
        for content in self.read(event):
            yield named_event(content["type"], {**content, "sequence_number": next(self._numbers)})

    def read(self, event: answers.Event | None) -> Iterator[Json]:
        """Yield the protocol's events for one of ours, without their numbers."""
        progress, interval_s = {}, 2.0  # each event holds the whole request
        if isinstance(event, answers.PromptProgress) and time.monotonic() - self._shown >= interval_s:
            self._shown, progress = time.monotonic(), answers.progress_json(event)
        # In a silence, too: agents do not count comments as events.
        if not self._started or event is None or progress:
            names = ("in_progress",) if self._started else ("created", "in_progress")
            self._started = True
            for name in names:
                yield {"type": f"response.{name}", "response": {**self.body, "output": []}, **progress}
        match event:
            case answers.TextDelta() if event.text or (event.kind == "answer" and event.logprobs):
                yield from self.write(event)
            case answers.ToolCall():
                yield from self.write(event)
            case answers.ChoiceEnded(reason=reason):
                yield from self.close(is_cut=reason == "length")
                if reason == "length":
                    self.body["incomplete_details"] = {"reason": "max_output_tokens"}
            case answers.Finished():
                yield self._finish(event)
            case answers.Failed(failure=failure):
                yield from self._fail(failure)

    def new_block(self, begins: answers.TextDelta | answers.ToolCall) -> Json:
        if isinstance(begins, answers.ToolCall):
            space, called = self._spaces.get(begins.name, (None, begins.name))
            item = {"id": f"fc_{uuid4().hex}", "type": "function_call", "call_id": begins.id, "name": called}
            return item | {"arguments": ""} | ({} if space is None else {"namespace": space})
        if begins.kind == "thinking":
            self._part = {"type": "reasoning_text", "text": ""}
            return {"id": f"rs_{uuid4().hex}", "type": "reasoning", "summary": [], "content": []}
        self._part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant", "content": []}

    def started(self, block: Json) -> Iterator[Json]:
        yield self._event("output_item.added", item={**block, "status": "in_progress"})
        if block["type"] != "function_call":
            yield self._part_event("content_part.added", part=dict(self._part))

    def grown(self, block: Json, more: answers.TextDelta | answers.ToolCall) -> Iterator[Json]:
        if isinstance(more, answers.ToolCall):
            block["arguments"] = more.arguments
            if more.arguments:
                id = block["id"]
                yield self._event("function_call_arguments.delta", item_id=id, delta=more.arguments)
            return
        self._part["text"] += more.text
        logprobs = {}
        if "logprobs" in self._part:
            logprobs = {"logprobs": [answers.logprob_json(token) for token in more.logprobs]}
            self._part["logprobs"] += logprobs["logprobs"]
        yield self._part_event(f"{self._part['type']}.delta", delta=more.text, **logprobs)

    def ended(self, block: Json, *, is_cut: bool) -> Iterator[Json]:
        if block["type"] == "function_call":
            call = {"item_id": block["id"], "name": block["name"], "arguments": block["arguments"]}
            yield self._event("function_call_arguments.done", **call)
        else:
            part = self._part
            whole = {key: part[key] for key in ("text", "logprobs") if key in part}
            yield self._part_event(f"{part['type']}.done", **whole)
            yield self._part_event("content_part.done", part=part)
            block["content"] = [part]
            if block["type"] == "reasoning" and self._encode_thinking:
                block["encrypted_content"] = THINKING_PREFIX + part["text"]
        block["status"] = "incomplete" if is_cut else "completed"
        yield self._event("output_item.done", item=block)

    def _part_event(self, name: str, /, **more: Any) -> Json:
        return self._event(name, item_id=self.blocks[-1]["id"], content_index=0, **more)

    def _event(self, name: str, /, **more: Any) -> Json:
        return {"type": f"response.{name}", "output_index": len(self.blocks) - 1, **more}

    def _finish(self, event: answers.Finished) -> Json:
        status = "completed" if self.body["incomplete_details"] is None else "incomplete"
        self.body |= {"status": status, "usage": _usage_json(event.usage)}
        self.body |= {"completed_at": int(time.time())} if status == "completed" else {}
        self.body["timings"] = answers.timings_json(event.timings)
        if self._store is not None:  # before the client knows that it can be continued
            self._store.save(self.body, self._input, self._previous)
        return {"type": f"response.{status}", "response": self.body}

    def _fail(self, failure: Failure) -> Iterator[Json]:
        code = "invalid_prompt" if failure.status < 500 else "server_error"  # the nearest of the protocol's
        error = {"code": "rate_limit_exceeded" if failure.status == 429 else code, "message": failure.message}
        yield {"type": "error", **error, "param": failure.param}
        yield from self.close(is_cut=True)
        self.body |= {"status": "failed", "error": error}
        yield {"type": "response.failed", "response": self.body}


def _new_response(body: ResponsesBody, request: GenerationRequest) -> Json:
    """Return a response without output, which repeats the parameters of the request."""
    reasoning = body.reasoning or parameters.AnswerConfig()
    format = body.text.format if body.text else None
    choice: Json = body.tool_choice.model_dump(exclude_none=True) if body.tool_choice else {"type": "auto"}
    return {
        **answers.notes_json(request.notes),
        "id": f"resp_{uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": request.model,
        "output": [],
        "usage": None,
        **body.model_dump(
            include=set(
                "instructions max_output_tokens max_tool_calls previous_response_id prompt_cache_key "
                "safety_identifier user".split()
            )
        ),
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": body.reasoning_effort or reasoning.effort, "summary": reasoning.summary},
        "service_tier": "default",
        "store": body.store is not False,
        "background": False,
        "temperature": request.sampling.temperature,
        "text": {
            "format": format.model_dump(by_alias=True, exclude_none=True) if format else {"type": "text"},
            "verbosity": (body.text.verbosity if body.text else None) or body.verbosity or "medium",
        },
        "tool_choice": choice["type"] if len(choice) == 1 else choice,
        "tools": _tools_json(body.tools or ()),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": request.sampling.top_p,
        "truncation": "disabled",
    }


def _usage_json(usage: answers.Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": 0,
            **answers.reread_json(usage),
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


async def respond(
    http_request: Request, *, engine: EngineThread, settings: Settings, store: ResponseStore
) -> Response:
    """Answer a request, which may refer to stored responses of its API key."""
    responses = store.of(given_key(http_request.headers))
    api = Api(ResponsesBody, partial(parse, store=responses), partial(ResponseWriter, store=responses))
    return await answer(http_request, engine=engine, settings=settings, api=api)
