"""`/v1/chat/completions`: OpenAI's chat completions, and the parts that text completions share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import Field

from mlx_spec import __version__

from ..engine import answers
from ..errors import invalid_field, unsupported_field
from ..http import Api, Json, comment, data_event
from ..requests import parameters, parsing
from ..requests.conversation import ConversationBuilder
from ..requests.parsing import Fields, FunctionField, Parts, Texts, part_texts
from ..requests.request import Chat, GenerationRequest, RawPrompts, Tool, ToolUse
from ..requests.thinking_fields import Effort, ThinkingField, ThinkingFields

DONE = "data: [DONE]\n\n"
KEEPALIVE = comment("keepalive")


# --- bodies


class ChunkOptions(parameters.StreamOptions):
    """Additions to a stream of chunks."""

    include_draft: bool | None = None  # ours: which drafter wrote what, and measurements of each round
    continuous_usage_stats: bool | None = None  # of vLLM's clients, without effect: usage comes at the end


class PredictionField(Fields):
    """Text that the answer is expected to contain."""

    type: Literal["content"]
    content: Parts


class CompletionBody(parameters.LimitFields, parameters.SharedFields):
    """The fields of chat completions, text completions and /infill."""

    model: str | None = None
    stream: bool | None = None
    stream_options: ChunkOptions | None = None
    return_progress: bool | None = None  # as llama.cpp's clients ask for it
    n: Annotated[int, Field(ge=1)] | None = None
    stop: Texts = None
    prediction: PredictionField | None = None


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
    reasoning: Any = None  # another name of reasoning_content, if it is text
    refusal: str | None = None
    tool_calls: list[CallField] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    audio: Any = None


class ToolField(Fields):
    """A tool; only functions are supported."""

    type: str
    function: FunctionField | None = None


class NamedTool(Fields):
    """The name of a tool, as chat completions and responses write it."""

    name: str | None = None
    function: FunctionField | None = None

    def find(self, field: str) -> str:
        """Return the name. Raises Failure (400)."""
        return parsing.required(self.function.name if self.function else self.name, f"{field}.function.name")


class AllowedTools(Fields):
    """The names of the tools of the request that may be called."""

    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedTool]


class ToolChoiceField(NamedTool):
    """The choice between text and tools."""

    type: str
    allowed_tools: AllowedTools | None = None


class ReasoningField(Fields):
    """Thinking as OpenRouter's clients ask for it. No budget is enforced, as for `thinking`."""

    effort: Effort | None = None
    enabled: bool | None = None
    exclude: bool | None = None  # think, and leave it out of the answer
    max_tokens: int | None = None
    summary: Any = None  # without effect: all thinking is returned


class ChatBody(ThinkingFields, CompletionBody):
    """The body of a request."""

    messages: list[Message] = Field(min_length=1)
    tools: list[ToolField] | None = None
    tool_choice: Annotated[ToolChoiceField | None, parsing.AS_TYPE] = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    reasoning: ReasoningField | None = None  # effort and more, as OpenRouter groups them
    thinking: ThinkingField | None = None  # as Anthropic's clients ask for it
    continue_final_message: bool | None = None  # as in vLLM
    service_tier: Any = None


# --- from a body to a request


def parse_request(
    body: CompletionBody, model: str, prompt: Chat | RawPrompts, **more: Any
) -> GenerationRequest:
    """Return a request with the fields of `CompletionBody`, and `more`. Raises Failure (400)."""
    if body.stream_options is not None and not body.stream:
        raise invalid_field("stream_options", "only with stream true")
    expected = part_texts(body.prediction.content, "prediction.content") if body.prediction else ()
    return parameters.start_request(
        body,
        model,
        prompt,
        None,
        stop=parsing.stop_strings(body.stop),
        n=1 if body.n is None else body.n,
        prediction="".join(expected) or None,
        **more,
    )


def parse_limit(
    body: parameters.LimitFields, least: int = 1, default: int | None = None, prefix: str = ""
) -> int | None:
    """Return the limit of a choice: the smallest given one, else `default`. Raises Failure (400).

    `prefix` is the path before these fields, such as "options.".
    """
    limits = body.model_dump(include=set(parameters.LimitFields.model_fields), exclude_none=True)
    no_limit = (-1, -2)  # in LM Studio, llama.cpp and Ollama
    for name, limit in limits.items():
        if limit < least and limit not in no_limit:
            field = prefix + name
            raise invalid_field(field, f"{limit} is too few, the least is {least}; -1 sets no limit")
    bounds = set(limits.values()) - set(no_limit)
    return min(bounds, default=None) if limits else default


def parse(body: ChatBody, model: str) -> GenerationRequest:
    """Return the request. Raises Failure (400), with the field that cannot be honoured."""
    use = parse_tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    grouped = body.reasoning or ReasoningField()
    enabled = grouped.enabled if body.thinking is None else body.thinking.wanted
    thinks = body.thinks(enabled, grouped.effort)
    begun = _begun(body) if body.continue_final_message else ""
    conversation = _parse_messages(body.messages[:-1] if begun else body.messages)
    chat = replace(conversation.chat(use, thinks, body.variables(grouped.effort)), begun=begun)
    return parse_request(
        body,
        model,
        chat,
        max_tokens=parse_limit(body),
        top_logprobs=parse_logprobs(body.logprobs, body.top_logprobs),
        shows_thinking=not grouped.exclude,
    )


def parse_logprobs(wanted: bool | None, top: int | None) -> int | None:
    """Return how many alternatives each token gets; None without logprobs. Raises Failure (400)."""
    if wanted:
        return top or 0
    if top:
        raise invalid_field("top_logprobs", "only with logprobs true")
    return None


def parse_tool_use(
    fields: Sequence[ToolField] | None, choice: ToolChoiceField | None, parallel: bool | None
) -> ToolUse | None:
    """Return how tools may be used, None without tools. Raises Failure (400)."""
    tools = [_parse_tool(tool, f"tools.{i}") for i, tool in enumerate(fields or ())]
    choice = choice or ToolChoiceField(type="auto")
    named, mode = None, choice.type
    if mode == "function":
        named = choice.find("tool_choice")
    elif mode == "allowed_tools":
        allowed, field = parsing.required(choice.allowed_tools, "tool_choice.allowed_tools"), "tool_choice"
        names = [tool.find(f"{field}.allowed_tools.tools.{i}") for i, tool in enumerate(allowed.tools)]
        tools, mode = parsing.allowed_tools(tools, names), allowed.mode
    return parsing.make_tool_use(tools, mode, named, parallel)


def _parse_tool(tool: ToolField, field: str) -> Tool:
    if tool.type != "function":
        shown = tool.type[: parsing.MAX_SHOWN_CHARS]
        raise unsupported_field(f"{field}.type", f"{shown!r} is not supported: only functions")
    return parsing.required(tool.function, f"{field}.function").tool(f"{field}.function")


def _begun(body: ChatBody) -> str:
    """Return the text of the last message, after which the answer goes on. Raises Failure (400)."""
    last, field = body.messages[-1], f"messages.{len(body.messages) - 1}"
    if last.role != "assistant" or last.tool_calls or len(body.messages) < 2:
        raise unsupported_field(field, "only an answer of text goes on: leave out continue_final_message")
    if body.response_format is not None or body.tools:
        raise unsupported_field("continue_final_message", "not for an answer in a given form, or with tools")
    return "".join(part_texts(last.content, f"{field}.content"))


def _parse_messages(messages: Sequence[Message]) -> ConversationBuilder:
    conversation = ConversationBuilder()
    for i, message in enumerate(messages):
        field = conversation.param = f"messages.{i}"
        if message.role == "function" or message.function_call is not None:
            raise unsupported_field(field, "function calls of the old kind: give tool calls instead")
        if message.audio is not None:
            raise unsupported_field(f"{field}.audio", "only text is read here")
        if message.role == "assistant":
            _add_answer(conversation, message, field)
            continue
        if message.role in ("user", "tool"):
            contents = parsing.part_contents(message.content, f"{field}.content")
            if message.role == "user":
                conversation.add("user", *contents)
            else:
                conversation.add_result(message.tool_call_id, contents, f"{field}.tool_call_id")
        else:
            conversation.add("system", *part_texts(message.content, f"{field}.content"))
    return conversation


def _add_answer(conversation: ConversationBuilder, message: Message, field: str) -> None:
    texts, calls = [] if message.refusal is None else [message.refusal], message.tool_calls or []
    if message.content is not None:
        texts = part_texts(message.content, f"{field}.content")
    thinking = message.reasoning if isinstance(message.reasoning, str) else None
    thinking = message.reasoning_content or thinking
    if not texts and not calls and thinking is None and message.reasoning_content is None:
        raise invalid_field(f"{field}.content", "is missing, and there are no tool calls")
    conversation.add("assistant", *texts, thinking=thinking)
    for i, call in enumerate(calls):
        call_field = f"{field}.tool_calls.{i}"
        if call.function is None or call.type not in (None, "function"):
            raise unsupported_field(call_field, "only calls of functions are supported")
        conversation.add_call(call.id, call.function.name, call.function.arguments)


# --- answers


class ChunkWriter(ABC):
    """Writes an answer as chunks.

    The chunk that ends a choice is held back: the last one also gets the timings, unless the usage has them.
    """

    def __init__(self, prefix: str, object: str, request: GenerationRequest, body: CompletionBody) -> None:
        options = body.stream_options
        self.head: Json = {
            "id": f"{prefix}-{uuid4().hex}",
            "object": object,
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": f"mlx_spec-{__version__}",
        }
        self._notes = answers.notes_json(request.notes)
        self._with_usage = options is not None and bool(options.include_usage)
        self._with_draft = options is not None and bool(options.include_draft)
        self._with_progress = bool(body.return_progress)
        self._last: Json | None = None  # the chunk that ends a choice, held back

    @abstractmethod
    def _piece(self, choice: answers.ChoiceContent) -> Json:
        """Return the choice in a chunk, with the content of one event."""

    @abstractmethod
    def _whole(self, choice: answers.ChoiceContent) -> Json:
        """Return the choice in a response that is not streamed."""

    def _start(self) -> Iterable[Json]:
        """Return the choices that begin a stream."""
        return ()

    def whole(self, events: list[answers.Event]) -> Json:
        last = events[-1]
        assert isinstance(last, answers.Finished)
        totals = {"usage": usage_json(last.usage), "timings": answers.timings_json(last.timings)}
        choices = [self._whole(choice) for choice in answers.choices(events)]
        return {**self.head, **totals, **self._notes, "choices": choices}

    def frames(self, event: answers.Event | None) -> Iterator[str]:
        match event:
            case None:
                yield KEEPALIVE
            case answers.PromptRead():
                for choice in self._start():
                    yield data_event(self._chunk([choice]))
            case answers.PromptProgress() if self._with_progress:
                yield data_event(self._chunk([]) | answers.progress_json(event))
            case answers.PromptProgress() if self._with_draft:
                read = {"cached_n": event.cached_tokens, "read_n": event.read_tokens}
                yield data_event(self._chunk([], prompt={"prompt_n": event.prompt_tokens, **read}))
            case answers.PromptProgress() if event.prompt_tokens - event.cached_tokens > 1000:  # seconds
                yield comment(f"{event.read_tokens} of {event.prompt_tokens} tokens of the prompt are read")
            case answers.TextDelta() if event.text or event.logprobs:
                spans = [vars(span) for span in event.spans]
                yield from self._send(self._chunk(self._pieces(event), spans=spans))
            case answers.ToolCall():
                yield from self._send(self._chunk(self._pieces(event)))
            case answers.RoundDone() if self._with_draft:
                yield from self._send(self._chunk([], statistics=answers.statistics_json(event)))
            case answers.ChoiceEnded():
                yield from self._send()
                self._last = self._chunk(self._pieces(event))
            case answers.Finished():
                timings = {"timings": answers.timings_json(event.timings), **self._notes}
                if self._last is not None and not self._with_usage:
                    self._last |= timings
                yield from self._send()
                if self._with_usage:
                    yield data_event(self._chunk([]) | {"usage": usage_json(event.usage), **timings})
                yield DONE
            case answers.Failed(failure=failure):
                yield from self._send(failure.body)

    def _send(self, *chunks: Json) -> Iterator[str]:
        """Yield chunks as events, after the chunk that was held back."""
        last, self._last = self._last, None
        yield from map(data_event, chunks if last is None else (last, *chunks))

    def _pieces(self, event: answers.Event) -> list[Json]:
        return [self._piece(choice) for choice in answers.choices([event])]

    def _chunk(self, choices: list[Json], **draft: Any) -> Json:
        """Return a chunk. Only a request with `include_draft` gets `draft`."""
        usage = {"usage": None} if self._with_usage else {}
        ours = {"mlx_spec": draft} if draft and self._with_draft else {}
        return {**self.head, "choices": choices, **usage, **ours}


def usage_json(usage: answers.Usage) -> Json:
    """Return the usage of a request as OpenAI counts it: rejected predictions are not completion tokens."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "audio_tokens": 0,
            "image_tokens": usage.image_tokens,
            **answers.reread_json(usage),
        },
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": usage.accepted_prediction_tokens,
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        },
    }


class ChatWriter(ChunkWriter):
    """Writes an answer in the form of chat completions."""

    def __init__(self, body: ChatBody, request: GenerationRequest) -> None:
        object = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__("chatcmpl", object, request, body)
        if body.service_tier is not None:
            self.head["service_tier"] = "default"
        self._n = request.n
        self._with_logprobs = request.top_logprobs is not None

    def _start(self) -> Iterable[Json]:
        begun = {"role": "assistant", "content": ""}
        choices = map(answers.ChoiceContent, range(self._n))
        return [_choice_json(choice, "delta", begun, with_logprobs=False) for choice in choices]

    def _piece(self, choice: answers.ChoiceContent) -> Json:
        text_fields = {"answer": "content", "thinking": "reasoning_content"}
        delta: Json = {text_fields[each.kind]: each.text for each in choice.deltas}
        if choice.calls:
            delta["tool_calls"] = [{"index": call.call, **_call_json(call)} for call in choice.calls]
        return _choice_json(choice, "delta", delta, with_logprobs=bool(choice.logprobs()))

    def _whole(self, choice: answers.ChoiceContent) -> Json:
        content = choice.text() or (None if choice.calls else "")
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if thinking := choice.text("thinking"):
            message["reasoning_content"] = thinking
        if choice.calls:
            message["tool_calls"] = [_call_json(call) for call in choice.calls]
        return _choice_json(choice, "message", message, with_logprobs=self._with_logprobs)


def _choice_json(choice: answers.ChoiceContent, name: str, content: Json, *, with_logprobs: bool) -> Json:
    logprobs = {"content": [answers.logprob_json(token) for token in choice.logprobs()], "refusal": None}
    return {
        "index": choice.index,
        name: content,
        "logprobs": logprobs if with_logprobs else None,
        "finish_reason": choice.end and choice.end.reason,
    }


def _call_json(call: answers.ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


API = Api(ChatBody, parse, ChatWriter)
