"""`/v1/completions`, OpenAI's text completions, and `/infill`, which editor plugins of llama.cpp use."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field, StrictInt, StrictStr, TypeAdapter, ValidationError

from mlx_spec.tokenizer.fill_in import FillIn
from mlx_spec.types import TokenLogprob

from ..engine import answers
from ..errors import invalid_field, unsupported_field
from ..http import Api, Json, data_event
from ..requests.parsing import Fields
from ..requests.request import GenerationRequest, RawPrompt, RawPrompts
from .openai_chat import KEEPALIVE, ChunkWriter, CompletionBody, parse_limit, parse_request

SOME = Field(min_length=1, fail_fast=True)  # lists are long: the first bad element is enough
Tokens = Annotated[tuple[StrictInt, ...], SOME]
Texts = Annotated[tuple[StrictStr, ...], SOME]
PROMPTS: TypeAdapter[Any] = TypeAdapter(
    Annotated[
        StrictStr | Texts | Tokens | Annotated[tuple[Tokens, ...], SOME], Field(union_mode="left_to_right")
    ]
)


class TextBody(CompletionBody):
    """The body of a request."""

    prompt: Any = None  # text, texts, tokens or lists of tokens
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: int | None = None
    suffix: str | None = None


def parse(body: TextBody, model: str) -> GenerationRequest:
    """Return the request. Raises Failure (400), with the field that cannot be honoured."""
    if body.best_of not in (None, 1 if body.n is None else body.n):
        raise unsupported_field("best_of", "is not supported but where it equals n")
    prompts = RawPrompts(tuple(_parse_prompts(body)), echo=bool(body.echo))
    limit, top = parse_limit(body, 0 if body.echo else 1, 16), body.logprobs  # OpenAI's own default
    return parse_request(body, model, prompts, max_tokens=limit, top_logprobs=top, prompt_param="prompt")


def _parse_prompts(body: TextBody) -> Iterator[RawPrompt]:
    """Yield the prompts. With a suffix, each is a `FillIn`: the prompt is the text before the gap."""
    try:
        prompts = PROMPTS.validate_python(body.prompt)
    except ValidationError as error:
        code = "missing_required_parameter" if body.prompt is None else "invalid_value"
        forms = "give a text, a list of texts, a list of tokens, or a list of those; no list may be empty"
        raise invalid_field("prompt", forms, code) from error
    if body.suffix and body.echo:
        raise unsupported_field("suffix", "not with echo, the answer stands between prompt and suffix")
    for prompt in [prompts] if isinstance(prompts, str) or isinstance(prompts[0], int) else prompts:
        if body.suffix and not isinstance(prompt, str):
            raise unsupported_field("suffix", "only with a prompt that is text")
        yield FillIn(prompt, body.suffix) if body.suffix else prompt


# --- answers


class TextWriter(ChunkWriter):
    """Writes an answer in the form of text completions."""

    def __init__(self, body: TextBody, request: GenerationRequest) -> None:
        super().__init__("cmpl", "text_completion", request, body)
        self._with_logprobs = request.top_logprobs is not None

    def _piece(self, choice: answers.ChoiceContent) -> Json:
        return self._whole(choice) | ({} if choice.deltas else {"logprobs": None})

    def _whole(self, choice: answers.ChoiceContent) -> Json:
        logprobs = logprobs_json(choice.logprobs()) if self._with_logprobs else None
        reason = choice.end and choice.end.reason
        return {"index": choice.index, "text": choice.text(), "logprobs": logprobs, "finish_reason": reason}


def logprobs_json(tokens: Sequence[TokenLogprob]) -> Json:
    """Return the logprobs of tokens; null for the first token of an echoed prompt, whose logprob is nan."""
    scored = [None if math.isnan(token.logprob) else token for token in tokens]
    return {
        "tokens": [_token_text(token.token_bytes) for token in tokens],
        "token_logprobs": [token and answers.finite(token.logprob) for token in scored],
        "top_logprobs": [token and _top_json(token) for token in scored],
        "text_offset": [token.offset for token in tokens],
    }


def _top_json(token: TokenLogprob) -> dict[str, float]:
    """Return the logprobs of the likeliest tokens by their text; of equal texts, the likelier one counts."""
    logprobs: dict[str, float] = {}
    for other in token.top:
        logprobs.setdefault(_token_text(other.token_bytes), answers.finite(other.logprob))
    return logprobs


def _token_text(token: bytes) -> str:
    """Return the text of a token; the bytes of half a character are spelled out."""
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


API = Api(TextBody, parse, TextWriter)


# --- code between two texts


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

    # Accepted without effect: every request here has the same samplers.
    samplers: list[str] | None = None
    n_indent: int | None = None
    t_max_prompt_ms: int | None = None
    t_max_predict_ms: int | None = None


def parse_infill(body: InfillBody, model: str) -> GenerationRequest:
    """Return the request. Raises Failure (400), with the field that cannot be honoured."""
    if body.n not in (None, 1):
        raise unsupported_field("n", "there is one choice")
    extra = tuple((file.filename, file.text) for file in body.input_extra or ())
    gap = FillIn(body.input_prefix, body.input_suffix, extra, body.prompt or "", "input_suffix")
    defaults = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}  # llama.cpp's
    sampling = defaults | body.model_dump(include=set(defaults), exclude_none=True)
    filled = body.model_copy(update=sampling)
    limit = parse_limit(body, least=0)  # 0: editors have the other files read before they need an answer
    return parse_request(filled, model, RawPrompts((gap,)), max_tokens=limit, prompt_param="input_prefix")


class InfillWriter:
    """Writes an answer in the form of llama.cpp's `/infill`."""

    def __init__(self, body: InfillBody, request: GenerationRequest) -> None:
        self._model, self._fields = request.model, body.response_fields
        self._with_progress = bool(body.return_progress)
        self._notes = answers.notes_json(request.notes)
        self._end = answers.ChoiceContent(0)  # the last part of a stream, without text

    def frames(self, event: answers.Event | None) -> Iterator[str]:
        match event:
            case None:
                yield KEEPALIVE
            case answers.PromptProgress() if self._with_progress:
                yield data_event({"index": 0, "content": "", "stop": False, **answers.progress_json(event)})
            case answers.TextDelta(text=text) if text:
                yield data_event({"index": 0, "content": text, "stop": False})
            case answers.ChoiceEnded():
                self._end = answers.ChoiceContent(0, end=event)
            case answers.Finished():
                yield data_event(self._last(self._end, event))
            case answers.Failed(failure=failure):
                yield data_event(failure.body)

    def whole(self, events: list[answers.Event]) -> Json:
        (answer,), last = answers.choices(events), events[-1]
        assert isinstance(last, answers.Finished)
        return self._last(answer, last)

    def _last(self, choice: answers.ChoiceContent, event: answers.Finished) -> Json:
        usage, end = event.usage, choice.end
        assert end is not None
        body: Json = {
            "index": 0,
            "content": choice.text(),
            "stop": True,
            "model": self._model,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.cached_tokens,
            "truncated": False,
            "stop_type": "word" if end.stop is not None else "limit" if end.reason == "length" else "eos",
            "stopping_word": end.stop or "",
            "timings": answers.timings_json(event.timings),
            **self._notes,
        }
        if self._fields is None:
            return body
        paths = {path: _at(body, path) for path in self._fields}
        return {path: value for path, value in paths.items() if value is not None}


def _at(value: Any, path: str) -> Any:
    """Return the value at a path; None if there is none."""
    for name in path.split("/"):
        value = value.get(name) if isinstance(value, dict) else None
    return value


INFILL_API = Api(InfillBody, parse_infill, InfillWriter)
