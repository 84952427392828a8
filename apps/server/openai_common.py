"""Fields of bodies and chunks of streams that `/v1/chat/completions` and `/v1/completions` share."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Annotated, Any
from uuid import uuid4

from pydantic import BeforeValidator, Field

from mlx_spec import __version__

from .errors import invalid, missing, unsupported
from .http import Json, data_event
from .parameters import SharedFields, start_request
from .parsing import MAX_SHOWN_CHARS, Fields, Parts, Schema, part_texts, required
from .request import (
    Chat,
    ChoiceEnded,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    OutputFormat,
    PromptProgress,
    RawPrompts,
    RoundDone,
    TextDelta,
    Usage,
    statistics_json,
    timings_json,
)

DONE = "data: [DONE]\n\n"
KEEPALIVE = ": keepalive\n\n"


def _as_list(given: Any) -> Any:
    return [given] if isinstance(given, str) else given


class StreamOptions(Fields):
    """Additions to a stream."""

    include_usage: bool | None = None
    include_draft: bool | None = None  # ours: which drafter wrote what, and measurements of each round


class JsonSchema(Fields):
    """A schema and its name."""

    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = None  # the answer matches any schema


class ResponseFormat(Fields):
    """The form of the answer; `regex` and `lark` are ours, `schema` is llama.cpp's."""

    type: str
    schema_: Schema | None = Field(default=None, alias="schema")
    json_schema: JsonSchema | None = None
    pattern: str | None = None
    grammar: str | None = None


class PredictionField(Fields):
    """Text that the answer is expected to contain."""

    type: str
    content: Parts | None = None


class CompletionBody(SharedFields):
    """The fields that both routes take."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_new_tokens: int | None = None  # the same in other runtimes; -1 is no limit
    n_predict: int | None = None
    num_predict: int | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_as_list)] = None
    response_format: ResponseFormat | None = None
    prediction: PredictionField | None = None

    # Accepted without effect.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


def parse_request(
    body: CompletionBody, model: str, prompt: Chat | RawPrompts, least: int = 1
) -> GenerationRequest:
    """Return a request with the fields of all these routes. Raises Failure (400).

    `least` is the smallest limit of tokens that is allowed.
    """
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options: only with stream true", "stream_options")
    n, stop = 1 if body.n is None else body.n, body.stop or []
    if n < 1:
        raise invalid(f"n: {n} choices, the least is 1", "n")
    if "" in stop:
        raise invalid("stop: an empty string ends every answer: leave it out", "stop")
    return replace(
        start_request(body, model, prompt, _response_format(body.response_format)),
        max_tokens=_max_tokens(body, least),
        stop=tuple(dict.fromkeys(stop)),
        n=n,
        prediction=_prediction(body.prediction),
        progress=body.stream_options is not None and bool(body.stream_options.include_draft),
    )


def _max_tokens(body: CompletionBody, least: int) -> int | None:
    """Return the limit of a choice, the smallest of those given."""
    limits = {"max_completion_tokens": body.max_completion_tokens, "max_tokens": body.max_tokens}
    others = {
        "max_new_tokens": body.max_new_tokens,
        "n_predict": body.n_predict,
        "num_predict": body.num_predict,
    }
    limits |= {name: None if limit == -1 else limit for name, limit in others.items()}
    given = {name: limit for name, limit in limits.items() if limit is not None}
    for name, limit in given.items():
        if limit < least:
            raise invalid(f"{name}: {limit} is too few, the least is {least}", name)
    return min(given.values(), default=None)


def _response_format(given: ResponseFormat | None) -> OutputFormat | None:
    field = "response_format"
    match given:
        case None | ResponseFormat(type="text"):
            return None
        case ResponseFormat(type="json_object", schema_=None):
            return OutputFormat("json_object")
        case ResponseFormat(type="json_object" | "json_schema", schema_=dict(schema)):
            return OutputFormat("json_schema", json.dumps(schema), f"{field}.schema")
        case ResponseFormat(type="json_schema"):
            param = f"{field}.json_schema.schema"
            if given.json_schema is None or given.json_schema.schema_ is None:
                raise missing(param)
            return OutputFormat("json_schema", json.dumps(given.json_schema.schema_), param)
        case ResponseFormat(type="regex", pattern=str(pattern)):
            return OutputFormat("regex", pattern, f"{field}.pattern")
        case ResponseFormat(type="lark", grammar=str(grammar)):
            return OutputFormat("lark", grammar, f"{field}.grammar")
        case ResponseFormat(type="regex" | "lark"):
            raise missing(f"{field}.{'pattern' if given.type == 'regex' else 'grammar'}")
    known = "text, json_object, json_schema, regex or lark"
    shown = given.type[:MAX_SHOWN_CHARS]
    raise unsupported(f"{field}.type: {shown!r} is not one of {known}", f"{field}.type")


def _prediction(given: PredictionField | None) -> str | None:
    if given is None:
        return None
    if given.type != "content":
        raise unsupported("prediction.type: only 'content' is supported", "prediction.type")
    content = required(given.content, "prediction.content")
    return "".join(part_texts(content, "prediction.content")) or None


# --- answers


class ChunkWriter(ABC):
    """Writes an answer as chunks. The text of a round of a choice is one chunk.

    The chunk that ends the last choice waits for the timings, unless they come with the usage.
    """

    def __init__(self, prefix: str, object: str, model: str, options: StreamOptions | None) -> None:
        self.head: Json = {
            "id": f"{prefix}-{uuid4().hex}",
            "object": object,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"mlx_spec-{__version__}",
        }
        self._with_usage = options is not None and bool(options.include_usage)
        self._with_draft = options is not None and bool(options.include_draft)
        self._pending: TextDelta | None = None  # text of a round that is not over
        self._last: Json | None = None  # the chunk that ended a choice

    def _start(self, event: Event) -> Iterable[Json]:
        """Return choices for an event that is no text: the begin of an answer, a tool call."""
        return ()

    @abstractmethod
    def _delta(self, delta: TextDelta) -> Json:
        """Return a choice with more text."""

    @abstractmethod
    def _end(self, event: ChoiceEnded) -> Json:
        """Return a choice that is complete."""

    @abstractmethod
    def _choices(self, events: Iterable[Event]) -> list[Json]:
        """Return the choices of a response without a stream."""

    def whole(self, events: Iterable[Event]) -> Json:
        """Return a response without a stream."""
        events = list(events)
        last = events[-1]
        assert isinstance(last, Finished)
        totals = {"usage": usage_json(last.usage), "timings": timings_json(last.timings)}
        return {**self.head, **totals, "choices": self._choices(events)}

    def frames(self, event: Event | None) -> Iterator[str]:
        """Yield the text of a stream for an event, or for silence."""
        match event:
            case None:
                yield KEEPALIVE
            case TextDelta():
                yield from self._add_text(event)
            case PromptProgress():
                read = {"cached_n": event.cached_tokens, "read_n": event.read_tokens}
                prompt = {"prompt": {"prompt_n": event.prompt_tokens, **read}}
                yield data_event({**self._chunk([]), "mlx_spec": prompt})
            case RoundDone():
                yield from self._end_round(event)
            case ChoiceEnded():
                yield from self._flush()
                yield from self._release_last()
                self._last = self._chunk([self._end(event)])
            case Finished():
                yield from self._finish(event)
            case Failed(failure=failure):
                yield from self._flush()
                yield from self._release_last()
                yield data_event(failure.body)
            case _:
                for choice in self._start(event):
                    yield from self._flush()
                    yield from self._release_last()
                    yield data_event(self._chunk([choice]))

    def _add_text(self, delta: TextDelta) -> Iterator[str]:
        pending = self._pending
        if pending is not None and (pending.index, pending.kind) == (delta.index, delta.kind):
            self._pending = replace(
                pending,
                text=pending.text + delta.text,
                logprobs=pending.logprobs + delta.logprobs,
                spans=pending.spans + delta.spans,
            )
            return
        yield from self._flush()
        self._pending = delta

    def _end_round(self, event: RoundDone) -> Iterator[str]:
        if not self._with_draft:
            yield from self._flush()
            return
        round_json = {"statistics": statistics_json(event)}
        if self._pending is None or not (self._pending.text or self._pending.logprobs):
            yield from self._release_last()
            yield data_event({**self._chunk([]), "mlx_spec": round_json})
        yield from self._flush(round_json)

    def _flush(self, round_json: Json | None = None) -> Iterator[str]:
        """Send the pending text."""
        delta, self._pending = self._pending, None
        if delta is None or not (delta.text or delta.logprobs):
            return
        yield from self._release_last()
        chunk = self._chunk([self._delta(delta)])
        if self._with_draft:
            spans = [{"text": s.text, "source": s.source, "position": s.position} for s in delta.spans]
            chunk["mlx_spec"] = {"spans": spans, **(round_json or {})}
        yield data_event(chunk)

    def _release_last(self) -> Iterator[str]:
        """Send the end of a choice that was not the last one."""
        if self._last is not None:
            yield data_event(self._last)
            self._last = None

    def _finish(self, event: Finished) -> Iterator[str]:
        yield from self._flush()
        timings = {"timings": timings_json(event.timings)}
        if self._last is not None and not self._with_usage:
            self._last |= timings
        yield from self._release_last()
        if self._with_usage:
            yield data_event({**self._chunk([]), "usage": usage_json(event.usage), **timings})
        yield DONE

    def _chunk(self, choices: list[Json]) -> Json:
        usage = {"usage": None} if self._with_usage else {}
        return {**self.head, "choices": choices, **usage}


def usage_json(usage: Usage) -> Json:
    """Return the tokens of a request as OpenAI counts them, without rejected predictions."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": usage.accepted_prediction_tokens,
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        },
    }
