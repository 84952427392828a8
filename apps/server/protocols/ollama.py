"""Ollama's native API: `/api/chat`, `/api/generate`, and routes about models. Streams are lines of JSON."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_spec import __version__
from mlx_spec.checkpoint.config import Checkpoint
from mlx_spec.errors import SpecError
from mlx_spec.hub.inspect import CheckpointInfo, inspect_checkpoint
from mlx_spec.tokenizer.fill_in import FillIn
from mlx_spec.vision.pictures import from_base64

from ..engine import answers
from ..engine.engine_thread import EngineThread
from ..engine.models import LATEST, ModelCard, checkpoints_of
from ..errors import Failure, unsupported_field
from ..http import Api, Json, answer, json_line
from ..requests import parsing
from ..requests.conversation import ConversationBuilder
from ..requests.parameters import (
    CONSTRAINTS,
    GROUP,
    HARMLESS,
    NEUTRAL,
    LimitFields,
    OpenFields,
    SharedFields,
    as_format,
    start_request,
)
from ..requests.parsing import Fields
from ..requests.request import Chat, GenerationRequest, PictureFile, RawPrompts
from ..requests.thinking_fields import ThinkingFields
from ..settings import ServedModel, Settings
from .openai_chat import ToolChoiceField, ToolField, parse_limit, parse_logprobs, parse_tool_use

OLLAMA_PATH = "/api/"


@lru_cache
def _inspect(folder: Path) -> CheckpointInfo:
    return inspect_checkpoint(Checkpoint(folder, folder.name))


# --- the bodies


class OllamaOptions(LimitFields, SharedFields):
    """The parameters of an answer, with Ollama's defaults. As in Ollama, unknown ones are not errors."""

    takes_unknown: ClassVar[bool] = True

    temperature: Annotated[float, Field(ge=0)] = 0.8
    top_k: int = 40
    top_p: Annotated[float, Field(ge=0, le=1)] = 0.9
    stop: parsing.Texts = None


class OllamaBody(ThinkingFields, OpenFields):
    """The fields of `/api/chat` and `/api/generate`. A body without a prompt loads or unloads the model."""

    model: str | None = None
    stream: Annotated[bool, BeforeValidator(lambda value: value is None or value)] = True
    options: OllamaOptions = OllamaOptions()
    format: Any = None  # "json" or a schema
    think: Any = None  # a bool or a level
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncate: bool | None = None  # without effect: no prompt is ever cut
    shift: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _set_options(cls, body: Any) -> Any:
        """Move options beside `options` into it, unless they are there: clients of other APIs send them so.

        Some clients always send all fields. So null is left out, and beside `options` also "", 0 and false.
        """
        inner = body.get("options") or {} if isinstance(body, dict) else None
        if not isinstance(inner, dict):
            return body
        known = {*OllamaOptions.model_fields, *CONSTRAINTS, *HARMLESS, *NEUTRAL, GROUP, "extra_body"}
        beside = {key: each for key, each in body.items() if key in known - cls.model_fields.keys()}
        options = {key: each for key, each in (beside | inner).items() if each is not None}
        rest = {key: each for key, each in body.items() if key in cls.model_fields or each}
        return {key: each for key, each in rest.items() if key not in beside} | {"options": options}


class OllamaCalled(Fields):
    """A function and its arguments."""

    name: str = Field(min_length=1)
    arguments: dict[str, Any] | None = None


class OllamaCall(Fields):
    """A tool call in an earlier answer."""

    id: str | None = None
    function: OllamaCalled


class OllamaMessage(Fields):
    """A turn of the conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChat(OllamaBody):
    """The body of `/api/chat`."""

    messages: list[OllamaMessage] | None = None
    tools: list[ToolField] | None = None
    tool_choice: Annotated[ToolChoiceField | None, parsing.AS_TYPE] = None  # as in chat completions
    parallel_tool_calls: bool | None = None


class OllamaGenerate(OllamaBody):
    """The body of `/api/generate`."""

    prompt: str | None = None
    suffix: str | None = None  # the prompt is the text before a gap
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None


class OllamaName(Fields):
    """The body of the routes that only need the name of a model; `name` is the older field."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None


# --- from a body to a request


def parse(
    body: OllamaChat | OllamaGenerate, model: str, *, engine: EngineThread, pinned: Collection[str] = ()
) -> GenerationRequest:
    """Return the request. `pinned` models are never unloaded.

    Raises Failure (400), with the field that cannot be honoured.
    """
    refused = {  # field -> why it is not supported
        "template": "the model's own chat template is used",
        "context": "give the conversation to /api/chat",
    }
    for name in refused.keys() & (body.model_extra or {}).keys():
        raise unsupported_field(name, f"is not supported: {refused[name]}")
    options = body.options
    request = start_request(
        options,
        model,
        _prompt(body, _thinks(body, model, engine)),
        None if body.format in (None, "") else as_format("json", body.format, "format", strict=False),
        max_tokens=parse_limit(options, prefix="options."),
        stop=parsing.stop_strings(options.stop),
        top_logprobs=parse_logprobs(body.logprobs, body.top_logprobs),
        prompt_param="messages" if isinstance(body, OllamaChat) else "prompt",
    )
    if not _unloads(request) or not (model in pinned or engine.status().running):
        return request
    what = "the model is pinned, so it stays" if model in pinned else "it goes once no request uses it"
    return replace(request, notes=(*request.notes, f"keep_alive: {what}"))


def _unloads(request: GenerationRequest) -> bool:
    """Return True if a request has no prompt, and unloads the model."""
    return request.prompt == RawPrompts(()) and request.keep_alive == 0


def _thinks(body: OllamaBody, model: str, engine: EngineThread) -> bool:
    """Return True if the model shall think; without `think` it does if it can, as in Ollama."""
    can = engine.card(model).thinks
    if body.think not in (None, True, False, "low", "medium", "high", "max"):
        raise unsupported_field("think", "give true, false, or low, medium, high, max")
    if body.think and can is False:
        raise unsupported_field("think", f"{model!r} does not support thinking")
    wanted = body.thinks(None if body.think is None else bool(body.think))
    return can is not False if wanted is None else wanted


def _prompt(body: OllamaChat | OllamaGenerate, thinks: bool) -> Chat | RawPrompts:
    variables = body.variables(body.think if isinstance(body.think, str) else None)
    if isinstance(body, OllamaChat):
        if not body.messages:
            return RawPrompts(())
        use = parse_tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
        return _parse_messages(body.messages).chat(use, thinks, variables)
    if not (body.prompt or body.images) or body.raw or body.suffix:
        for name, value in (("system", body.system), ("think", body.think), ("images", body.images)):
            if value and (body.raw or body.suffix):
                raise unsupported_field(name, "goes with neither raw nor suffix")
        if body.suffix:
            return RawPrompts((FillIn(body.prompt or "", body.suffix),))
        return RawPrompts((body.prompt,) if body.prompt else ())
    conversation = ConversationBuilder()
    conversation.param = "prompt"
    if body.system:
        conversation.add("system", body.system)
    conversation.add("user", *_pictures(body.images, "images"), body.prompt or "")
    return conversation.chat(None, thinks, variables)


def _pictures(images: list[str] | None, field: str) -> list[PictureFile]:
    return [parsing.picture(from_base64, each, f"{field}.{i}") for i, each in enumerate(images or ())]


def _parse_messages(messages: list[OllamaMessage]) -> ConversationBuilder:
    conversation = ConversationBuilder()
    waiting: list[tuple[str, str]] = []  # ids and names of the calls without a result
    for i, message in enumerate(messages):
        field, content = f"messages.{i}", message.content or ""
        conversation.param = field
        pictures = _pictures(message.images, f"{field}.images")
        if pictures and message.role in ("system", "assistant"):
            raise unsupported_field(f"{field}.images", "pictures are read from the user and from tools")
        if message.role == "assistant":
            calls = message.tool_calls or []
            texts = [content] if content or not calls else []
            conversation.add("assistant", *texts, thinking=message.thinking)
            for k, call in enumerate(calls):
                waiting.append((call.id or f"call_{i}_{k}", call.function.name))
                conversation.add_call(*waiting[-1], call.function.arguments or {})
        elif message.role == "tool":
            id, name = message.tool_call_id, message.tool_name
            answered = next((c for c in waiting if id in (None, "", c[0]) and name in (None, "", c[1])), None)
            if answered is None:  # a client may have cut off the beginning of the conversation, with the call
                conversation.add_output(id or f"call_{i}", name or "", [*pictures, content])
            else:
                waiting.remove(answered)
                conversation.add_result(answered[0], [*pictures, content], field)
        else:
            conversation.add(message.role, *pictures, content)
    if messages[-1].role == "assistant":
        raise unsupported_field(field, "an answer cannot be begun for the model here")
    return conversation


# --- answers


class LinesWriter:
    """Writes an answer as lines of JSON, or as one object."""

    def __init__(self, body: OllamaBody, request: GenerationRequest) -> None:
        self._model = request.model
        self._is_chat = isinstance(body, OllamaChat)
        self._began = time.perf_counter()
        self._notes = answers.notes_json(request.notes)
        self._is_empty = request.prompt == RawPrompts(())
        self._reason = "unload" if request.keep_alive == 0 else "load"  # a choice that ends changes it

    def frames(self, event: answers.Event | None) -> Iterator[str]:
        if isinstance(event, answers.Failed):
            yield f"{json_line({'error': event.failure.message})}\n"
            return
        line = self._object([] if event is None else [event])
        if isinstance(event, answers.PromptProgress):
            yield f"{json_line(line | answers.progress_json(event))}\n"
        if event is None or isinstance(event, answers.TextDelta | answers.ToolCall | answers.Finished):
            yield f"{json_line(line)}\n"

    def whole(self, events: list[answers.Event]) -> Json:
        return self._object(events) | ({} if events else {"done": True, "done_reason": self._reason})

    def _object(self, events: list[answers.Event]) -> Json:
        choice = next(iter(answers.choices(events)), answers.ChoiceContent(0))
        if choice.end is not None:
            self._reason = "length" if choice.end.reason == "length" else "stop"
        thinking = {"thinking": text} if (text := choice.text("thinking")) else {}
        if self._is_chat:
            piece: Json = {"message": {"role": "assistant", "content": choice.text(), **thinking}}
            if choice.calls:
                piece["message"]["tool_calls"] = [_call_json(call) for call in choice.calls]
        else:
            piece = {"response": choice.text(), **thinking}
        if logprobs := [answers.logprob_json(token) for delta in choice.deltas for token in delta.logprobs]:
            piece["logprobs"] = logprobs
        end: Json = {"done": False}
        if events and isinstance(last := events[-1], answers.Finished):
            end = {"done": True, "done_reason": self._reason, **self._notes}
            end |= {} if self._is_chat else {"context": []}  # clients require it, and may send it back
            end |= {} if self._is_empty else self._measured(last)
        return {"model": self._model, "created_at": answers.timestamp(time.time()), **piece, **end}

    def _measured(self, event: answers.Finished) -> Json:
        statistics = event.timings.statistics
        return {
            "total_duration": _nanoseconds(time.perf_counter() - self._began),
            "load_duration": _nanoseconds(event.timings.queued_seconds),
            "prompt_eval_count": event.usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(statistics.prefill_seconds),
            "eval_count": event.usage.completion_tokens,
            "eval_duration": _nanoseconds(statistics.decode_seconds),
            "timings": answers.timings_json(event.timings),  # ours
        }


def _call_json(call: answers.ToolCall) -> Json:
    arguments = json.loads(call.arguments or "{}")
    return {"id": call.id, "function": {"index": call.call, "name": call.name, "arguments": arguments}}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _error(failure: Failure) -> Response:
    return JSONResponse({"error": failure.message}, failure.status)


# --- models


def _checkpoint(served: ServedModel) -> CheckpointInfo | None:
    """Return what the headers of a target say; None if it is not on this machine yet."""
    try:
        return _inspect(checkpoints_of(served)[0].folder)
    except SpecError:
        return None


def _model_json(name: str, checkpoint: CheckpointInfo | None) -> Json:
    tagged = name if ":" in name else name + LATEST
    details: Json = {"parent_model": "", "format": "safetensors"}
    if checkpoint is not None:
        millions = checkpoint.parameters / 1e6
        details |= {
            "family": checkpoint.family,
            "families": [checkpoint.family],
            "parameter_size": f"{millions:.1f}M" if millions < 1000 else f"{millions / 1000:.1f}B",
            "quantization_level": checkpoint.precision,
        }
    digest = hashlib.sha256(repr((name, checkpoint)).encode()).hexdigest()
    size = checkpoint.size if checkpoint else 0
    return {"name": tagged, "model": tagged, "size": size, "digest": digest, "details": details}


def _shown(card: ModelCard, checkpoint: CheckpointInfo | None) -> Json:
    """Return the body of `/api/show`. Without `checkpoint`, facts of its headers are left out."""
    info: Json = {"general.basename": card.name}
    if checkpoint is not None:
        values = {
            "context_length": card.context_length or checkpoint.context,
            "embedding_length": checkpoint.hidden_size,
            "block_count": checkpoint.layers,
            "attention.head_count": checkpoint.heads,
            "attention.head_count_kv": checkpoint.kv_heads,
            "vocab_size": checkpoint.vocab_size,
        }
        info |= {"general.architecture": checkpoint.family, "general.parameter_count": checkpoint.parameters}
        info |= {f"{checkpoint.family}.{key}": value for key, value in values.items() if value is not None}
    abilities = (("tools", card.tools), ("thinking", card.thinks), ("vision", card.images))
    extras = [name for name, can in abilities if can]
    return {
        "modified_at": answers.timestamp(card.created),
        "details": _model_json(card.name, checkpoint)["details"],
        "capabilities": ["completion", *extras],
        "model_info": info,
        "parameters": "",
        "template": (card.template or "") if card.tools else "",  # clients look for "tools" in it
        "modelfile": "",
    }


# --- routes


def add_routes(app: Starlette, engine: EngineThread, settings: Settings) -> None:
    """Add all routes under `/api/`."""

    def checkpoint(name: str) -> CheckpointInfo | None:
        return _checkpoint(engine.served(name))

    json_lines = "application/x-ndjson"
    pinned = frozenset(served.name for served in settings.models if served.pinned)

    def is_done(request: GenerationRequest) -> bool:  # True to unload a model that is not loaded
        return _unloads(request) and not engine.card(request.model).loaded

    for path, body in (("chat", OllamaChat), ("generate", OllamaGenerate)):
        parser = partial(parse, engine=engine, pinned=pinned)
        api = Api(
            body, parser, LinesWriter, json_lines, lambda body: (body, body.options), is_done, error=_error
        )
        app.state.apis[OLLAMA_PATH] = api
        endpoint = partial(answer, engine=engine, settings=settings, api=api)
        app.add_route(OLLAMA_PATH + path, endpoint, methods=["POST"])

    async def tags(_: Request) -> Response:
        listed = [
            _model_json(name, checkpoint(card.name)) | {"modified_at": answers.timestamp(card.created)}
            for card in engine.models()
            for name in (card.name, *card.aliases)
        ]
        return JSONResponse({"models": listed})

    async def running(_: Request) -> Response:
        listed = []
        for status in engine.status().models:
            shown = _model_json(status.name, checkpoint(status.name))
            size, context = status.weights + status.caches, engine.card(status.name).context_length
            shown |= {"size": size, "size_vram": size, "expires_at": answers.timestamp(status.expires_at)}
            listed.append(shown | {"context_length": context})
        return JSONResponse({"models": listed})

    async def show(http_request: Request) -> Response:
        body = await parsing.read_body(http_request, OllamaName)
        card = engine.card(engine.resolve(body.model or body.name))
        return JSONResponse(_shown(card, checkpoint(card.name)))

    async def pull(http_request: Request) -> Response:
        body = await parsing.read_body(http_request, OllamaName)
        try:
            engine.resolve(body.model or body.name)
        except Failure as failure:
            way = "fetch it with `mlx-spec convert`, then serve it"
            raise Failure(failure.status, f"{failure.message}; {way}", code=failure.code) from failure
        return Response(json_line({"status": "success"}) + "\n", media_type=json_lines)

    refused = {
        "embed": "there are no embeddings here",
        "embeddings": "there are no embeddings here",
        "create": "make a model with `mlx-spec convert`",
        "copy": "name a model with `mlx-spec serve --alias`",
        "delete": "remove a model with `mlx-spec rm`",
        "push": "nothing is ever uploaded here",
    }

    async def refuse(http_request: Request) -> Response:
        path = http_request.url.path
        raise unsupported_field(path, f"is not supported: {refused[path.removeprefix(OLLAMA_PATH)]}")

    version = "0.13.0"  # of the Ollama whose API this is: clients require a least version
    app.add_route("/api/version", lambda _: JSONResponse({"version": version, "mlx_spec": __version__}))
    app.add_route("/api/tags", tags)
    app.add_route("/api/ps", running)
    app.add_route("/api/show", show, methods=["POST"])
    app.add_route("/api/pull", pull, methods=["POST"])
    for path in refused:
        app.add_route(OLLAMA_PATH + path, refuse, methods=["POST", "DELETE"])
