"""Fields of bodies and chunks of streams that `/v1/chat/completions` and `/v1/completions` share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import Field

from mlx_spec import __version__

from .errors import invalid
from .http import Json, data_event
from .parameters import FormatField, SharedFields, parse_format, start_request
from .parsing import Fields, Parts, Texts, part_texts
from .request import (
    AnswerPart,
    Chat,
    ChoiceEnded,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    PromptProgress,
    PromptRead,
    RawPrompts,
    RoundDone,
    TextDelta,
    ToolCall,
    Usage,
    answer_parts,
    statistics_json,
    timings_json,
)

DONE = "data: [DONE]\n\n"
KEEPALIVE = ": keepalive\n\n"
LIMITS = {"max_tokens", "max_completion_tokens"}
OPEN_LIMITS = {"max_new_tokens", "n_predict", "num_predict"}  # the same in other runtimes; -1 is no limit


class StreamOptions(Fields):
    """Additions to a stream."""

    include_usage: bool | None = None
    include_draft: bool | None = None  # ours: which drafter wrote what, and measurements of each round


class PredictionField(Fields):
    """Text that the answer is expected to contain."""

    type: Literal["content"]
    content: Parts


class CompletionBody(SharedFields):
    """The fields that both routes take."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_new_tokens: int | None = None
    n_predict: int | None = None
    num_predict: int | None = None
    stop: Texts = None
    response_format: FormatField | None = None
    prediction: PredictionField | None = None


def parse_request(
    body: CompletionBody, model: str, prompt: Chat | RawPrompts, least: int = 1, **more: Any
) -> GenerationRequest:
    """Return a request with the fields of all these routes, and `more`. Raises Failure (400).

    `least` is the smallest limit of tokens that is allowed.
    """
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options: only with stream true", "stream_options")
    expected = part_texts(body.prediction.content, "prediction.content") if body.prediction else ()
    if "" in (body.stop or ()):
        raise invalid("stop: an empty string ends every answer: leave it out", "stop")
    return start_request(
        body,
        model,
        prompt,
        parse_format(body.response_format, "response_format", "json_schema.schema"),
        max_tokens=_max_tokens(body, least),
        stop=tuple(dict.fromkeys(body.stop or ())),
        n=1 if body.n is None else body.n,
        prediction="".join(expected) or None,
        progress=body.stream_options is not None and bool(body.stream_options.include_draft),
        **more,
    )


def _max_tokens(body: CompletionBody, least: int) -> int | None:
    """Return the limit of a choice, the smallest of those given."""
    limits = body.model_dump(include=LIMITS | OPEN_LIMITS, exclude_none=True)
    given = {name: limit for name, limit in limits.items() if limit != -1 or name in LIMITS}
    for name, limit in given.items():
        if limit < least:
            raise invalid(f"{name}: {limit} is too few, the least is {least}", name)
    return min(given.values(), default=None)


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
        self._pending: list[TextDelta] = []  # text of one kind, of a round that is not over
        self._last: Json | None = None  # the chunk that ended a choice

    @abstractmethod
    def _piece(self, part: AnswerPart) -> Json:
        """Return a choice of a chunk."""

    @abstractmethod
    def _whole(self, part: AnswerPart) -> Json:
        """Return a choice of a response without a stream."""

    def _start(self) -> Iterable[Json]:
        """Return the choices that begin a stream."""
        return ()

    def whole(self, events: Iterable[Event]) -> Json:
        events = list(events)
        last = events[-1]
        assert isinstance(last, Finished)
        totals = {"usage": usage_json(last.usage), "timings": timings_json(last.timings)}
        choices = [self._whole(part) for part in answer_parts(events)]
        return {**self.head, **totals, "choices": choices}

    def frames(self, event: Event | None) -> Iterator[str]:
        match event:
            case None:
                yield KEEPALIVE
            case PromptRead():
                for choice in self._start():
                    yield data_event(self._chunk([choice]))
            case PromptProgress():
                read = {"cached_n": event.cached_tokens, "read_n": event.read_tokens}
                prompt = {"prompt": {"prompt_n": event.prompt_tokens, **read}}
                yield data_event({**self._chunk([]), "mlx_spec": prompt})
            case TextDelta():
                last = self._pending[-1] if self._pending else event
                if (last.index, last.kind) != (event.index, event.kind):
                    yield from self._flush()
                self._pending.append(event)
            case RoundDone():
                yield from self._flush({"statistics": statistics_json(event)} if self._with_draft else {})
            case ToolCall():
                yield from self._flush()
                yield from self._send(self._chunk(map(self._piece, answer_parts([event]))))
            case ChoiceEnded():
                yield from self._flush()
                yield from self._send()
                self._last = self._chunk(map(self._piece, answer_parts([event])))
            case Finished():
                yield from self._finish(event)
            case Failed(failure=failure):
                yield from self._flush()
                yield from self._send(failure.body)

    def _flush(self, measured: Json | None = None) -> Iterator[str]:
        """Send the pending text, and what was measured in its round."""
        deltas, self._pending = self._pending, []
        has_text = any(delta.text or delta.logprobs for delta in deltas)
        if not has_text and not measured:
            return
        chunk = self._chunk(map(self._piece, answer_parts(deltas if has_text else ())))
        if self._with_draft:
            spans = [vars(span) for delta in deltas for span in delta.spans]
            chunk["mlx_spec"] = ({"spans": spans} if has_text else {}) | (measured or {})
        yield from self._send(chunk)

    def _send(self, *chunks: Json) -> Iterator[str]:
        """Send chunks, after the end of a choice that was not the last one."""
        last, self._last = self._last, None
        yield from map(data_event, chunks if last is None else (last, *chunks))

    def _finish(self, event: Finished) -> Iterator[str]:
        yield from self._flush()
        timings = {"timings": timings_json(event.timings)}
        if self._last is not None and not self._with_usage:
            self._last |= timings
        yield from self._send()
        if self._with_usage:
            yield data_event({**self._chunk([]), "usage": usage_json(event.usage), **timings})
        yield DONE

    def _chunk(self, choices: Iterable[Json]) -> Json:
        usage = {"usage": None} if self._with_usage else {}
        return {**self.head, "choices": list(choices), **usage}


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
