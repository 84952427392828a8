"""`/v1/completions`: OpenAI's text completions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from pydantic import Field

from mlx_spec.text.fill_in import FillIn
from mlx_spec.types import TokenLogprob

from .errors import invalid, unsupported
from .http import Api, Json
from .openai_common import (
    ChunkWriter,
    CompletionBody,
    check_options,
    parse_format,
    parse_max_tokens,
    parse_n,
    parse_prediction,
    parse_progress,
    parse_stop,
)
from .parameters import parse_sampling, parse_stop_tokens
from .request import ChoiceEnded, Event, GenerationRequest, RawPrompts, TextDelta, finite

DEFAULT_MAX_TOKENS = 16  # OpenAI's own default
PROMPT_FORMS = "give a text, a list of texts, a list of tokens, or a list of those"


class TextBody(CompletionBody):
    """The body of a request."""

    prompt: Any = None  # text, texts, tokens or lists of tokens
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: int | None = None
    suffix: str | None = None


def parse(body: TextBody, model: str) -> GenerationRequest:
    """Return the request. Raises Failure (400), with the field that cannot be honoured."""
    check_options(body)
    if body.best_of not in (None, 1 if body.n is None else body.n):
        raise unsupported("best_of: is not supported but where it equals n", "best_of")
    max_tokens = parse_max_tokens(body, 0 if body.echo else 1)
    return GenerationRequest(
        model=model,
        prompt=RawPrompts(_with_suffix(body, _parse_prompts(body.prompt)), echo=bool(body.echo)),
        sampling=parse_sampling(body),
        max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
        stop=parse_stop(body),
        stop_tokens=parse_stop_tokens(body),
        ignore_eos=bool(body.ignore_eos),
        n=parse_n(body),
        top_logprobs=body.logprobs,
        format=parse_format(body),
        prediction=parse_prediction(body),
        progress=parse_progress(body),
        prompt_param="prompt",
    )


def _with_suffix(
    body: TextBody, prompts: tuple[str | tuple[int, ...], ...]
) -> tuple[str | tuple[int, ...] | FillIn, ...]:
    """Return the prompts; with a suffix, each is the text before a gap."""
    if not body.suffix:
        return prompts
    if body.echo:
        raise unsupported("suffix: not with echo, the answer stands between prompt and suffix", "suffix")
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise unsupported("suffix: only with a prompt that is text", "suffix")
    return tuple(FillIn(text, body.suffix) for text in texts)


def _parse_prompts(given: Any) -> tuple[str | tuple[int, ...], ...]:
    if given is None:
        raise invalid(f"prompt: is missing: {PROMPT_FORMS}", "prompt", "missing_required_parameter")
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, list) or not given:
        raise invalid(f"prompt: {PROMPT_FORMS}", "prompt")
    if all(isinstance(one, str) for one in given):
        return tuple(given)
    return (_parse_tokens(given),) if _is_token(given[0]) else tuple(map(_parse_tokens, given))


def _parse_tokens(given: Any) -> tuple[int, ...]:
    if not isinstance(given, list) or not given or not all(map(_is_token, given)):
        raise invalid(f"prompt: {PROMPT_FORMS}, and none of them empty", "prompt")
    return tuple(given)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# --- answers


class TextWriter(ChunkWriter):
    """Writes an answer as text completions have it."""

    def __init__(self, body: TextBody, request: GenerationRequest) -> None:
        super().__init__("cmpl", "text_completion", request.model, body.stream_options)
        self._with_logprobs = request.top_logprobs is not None
        assert isinstance(request.prompt, RawPrompts)
        self._lengths = [0] * len(request.prompt.prompts) * request.n  # characters of each choice so far

    def _delta(self, delta: TextDelta) -> Json:
        start = self._lengths[delta.index]
        self._lengths[delta.index] += len(delta.text)
        logprobs = logprobs_json(delta.logprobs, start) if self._with_logprobs else None
        return _choice(delta.index, delta.text, logprobs, None)

    def _end(self, event: ChoiceEnded) -> Json:
        return _choice(event.index, "", None, event.reason)

    def _choices(self, events: Iterable[Event]) -> list[Json]:
        count = len(self._lengths)
        texts, reasons = [""] * count, [""] * count
        tokens: list[list[TokenLogprob]] = [[] for _ in range(count)]
        for event in events:
            match event:
                case TextDelta(index=i):
                    texts[i] += event.text
                    tokens[i] += event.logprobs
                case ChoiceEnded(index=i, reason=reason):
                    reasons[i] = reason
        return [
            _choice(i, texts[i], logprobs_json(tokens[i], 0) if self._with_logprobs else None, reasons[i])
            for i in range(count)
        ]


def _choice(index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def logprobs_json(tokens: Sequence[TokenLogprob], start: int) -> Json:
    """Return the logprobs of tokens whose text begins `start` characters into the choice.

    The first token of a prompt has none: its logprob is nan.
    """
    offsets, text = [], b""
    for token in tokens:
        offsets.append(start + len(text.decode("utf-8", "ignore")))
        text += token.written
    scored = [None if math.isnan(token.logprob) else token for token in tokens]
    return {
        "tokens": [_token_text(token.written) for token in tokens],
        "token_logprobs": [token and finite(token.logprob) for token in scored],
        "top_logprobs": [token and _top_json(token) for token in scored],
        "text_offset": offsets,
    }


def _top_json(token: TokenLogprob) -> dict[str, float]:
    """Return the likeliest tokens; of two with the same text, the likelier one."""
    found: dict[str, float] = {}
    for other in token.top:
        found.setdefault(_token_text(other.written), finite(other.logprob))
    return found


def _token_text(token: bytes) -> str:
    """Return the text of a token; the bytes of half a character are spelled out."""
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


API = Api(TextBody, parse, TextWriter)
