"""`/infill`: code completion as llama.cpp's server has it, for its editor plugins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from mlx_spec.text.fill_in import FillIn

from .errors import unsupported
from .http import Api, Json, data_event
from .openai_common import (
    KEEPALIVE,
    CompletionBody,
    check_options,
    parse_format,
    parse_max_tokens,
    parse_stop,
)
from .parameters import parse_sampling, parse_stop_tokens
from .parsing import Fields
from .request import (
    ChoiceEnded,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    RawPrompts,
    TextDelta,
    timings_json,
)

DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}  # llama.cpp's own
STOP_TYPES = {"stop": "eos", "length": "limit", "tool_calls": "eos"}


class ExtraFile(Fields):
    """Text of another file of the project."""

    filename: str = "file"
    text: str


class InfillBody(CompletionBody):
    """The body of a request."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[ExtraFile] | None = None
    prompt: str | None = None  # the beginning of the middle
    response_fields: list[str] | None = None  # paths of the fields to return, such as timings/prompt_n

    # Accepted without effect. The samplers are those of every request here.
    samplers: list[str] | None = None
    n_indent: int | None = None
    t_max_prompt_ms: int | None = None
    t_max_predict_ms: int | None = None
    cache_prompt: bool | None = None
    id_slot: int | None = None


def parse(body: InfillBody, model: str) -> GenerationRequest:
    """Return the request. Raises Failure (400), with the field that cannot be honoured."""
    check_options(body)
    if body.n not in (None, 1):
        raise unsupported("n: there is one choice", "n")
    extra = tuple((file.filename, file.text) for file in body.input_extra or ())
    given = FillIn(body.input_prefix, body.input_suffix, extra, body.prompt or "", "input_suffix")
    defaults = {name: value for name, value in DEFAULTS.items() if name not in body.model_fields_set}
    return GenerationRequest(
        model=model,
        prompt=RawPrompts((given,)),
        sampling=parse_sampling(body.model_copy(update=defaults)),
        max_tokens=parse_max_tokens(body, 1),
        stop=parse_stop(body),
        stop_tokens=parse_stop_tokens(body),
        ignore_eos=bool(body.ignore_eos),
        format=parse_format(body),
        prompt_param="input_prefix",
    )


class InfillWriter:
    """Writes an answer as llama.cpp's server does."""

    def __init__(self, body: InfillBody, request: GenerationRequest) -> None:
        self._model, self._fields = request.model, body.response_fields
        self._end = ChoiceEnded(0, "stop")

    def frames(self, event: Event | None) -> Iterator[str]:
        """Yield the text of a stream for an event, or for silence."""
        match event:
            case None:
                yield KEEPALIVE
            case TextDelta(text=text) if text:
                yield data_event({"index": 0, "content": text, "stop": False})
            case ChoiceEnded():
                self._end = event
            case Finished():
                yield data_event(self._last("", event))
            case Failed(failure=failure):
                yield data_event(failure.body)

    def whole(self, events: Iterable[Event]) -> Json:
        """Return a response without a stream."""
        text = ""
        for event in events:
            match event:
                case TextDelta():
                    text += event.text
                case ChoiceEnded():
                    self._end = event
                case Finished():
                    return self._last(text, event)
        raise AssertionError("an answer without an end")

    def _last(self, text: str, event: Finished) -> Json:
        usage, end = event.usage, self._end
        found: Json = {
            "index": 0,
            "content": text,
            "stop": True,
            "model": self._model,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.cached_tokens,
            "truncated": False,
            "stop_type": STOP_TYPES[end.reason] if end.stop is None else "word",
            "stopping_word": end.stop or "",
            "timings": timings_json(event.timings),
        }
        if self._fields is None:
            return found
        paths = {path: _at(found, path) for path in self._fields}
        return {path: value for path, value in paths.items() if value is not None}


def _at(found: Any, path: str) -> Any:
    """Return the value at a path; None if there is none."""
    for name in path.split("/"):
        found = found.get(name) if isinstance(found, dict) else None
    return found


API = Api(InfillBody, parse, InfillWriter)
