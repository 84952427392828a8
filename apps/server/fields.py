"""Fields that both of OpenAI's routes take, and what they mean."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from mlx_spec.apps.server.ask import Format
from mlx_spec.apps.server.failures import invalid, unsupported
from mlx_spec.apps.server.settings import Limits
from mlx_spec.errors import InvalidValue
from mlx_spec.sampling import Sampling

MOST_BIASES = 16_384
KNOWN_NAMES = 64  # unknown fields that are logged, each once

_log = logging.getLogger("mlx_spec.server")
_logged: set[str] = set()


class Fields(BaseModel):
    """An object of a body. Whatever is optional may be null; what is not known is ignored."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


def _listed(given: Any) -> Any:
    """A string is short for a list of it."""
    return [given] if isinstance(given, str) else given


def as_parts(content: Any) -> Any:
    """A string is short for one part of text."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Part(Fields):
    """A part of a message."""

    type: str
    text: str | None = None
    refusal: str | None = None


Parts = Annotated[list[Part] | None, BeforeValidator(as_parts)]


class StreamOptions(Fields):
    """What a stream holds besides the answer."""

    include_usage: bool | None = None
    include_draft: bool | None = None  # ours: which drafter wrote what, and figures of each round


class JsonSchema(Fields):
    """A schema and its name."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None  # every schema is kept to


class ResponseFormat(Fields):
    """What the answer must look like; `regex` and `lark` are ours."""

    type: str
    json_schema: JsonSchema | None = None
    pattern: str | None = None
    grammar: str | None = None


class Prediction(Fields):
    """What much of the answer is expected to be."""

    type: str
    content: Parts = None


class Body(Fields):
    """What a request to either route may hold."""

    model_config = ConfigDict(extra="allow")  # to name what is not known

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_listed)] = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None

    # Accepted, and of no effect here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


def check_options(body: Body) -> None:
    """Raises Failure (400) for stream options without a stream. Fields that nobody knows are logged once."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options: only with stream true", "stream_options")
    for name in body.model_extra or {}:
        if name not in _logged and len(_logged) < KNOWN_NAMES:
            _logged.add(name)
            _log.warning("requests have a field that is not known here and is ignored: %.64r", name)


def sampling_of(body: Body) -> Sampling:
    """How to choose tokens; temperature and top_p are 1 where they are not given. Raises Failure (400)."""
    given = {
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "seed": body.seed,
        "logit_bias": _bias(body.logit_bias or {}),
    }
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    try:
        return Sampling(**fields)
    except InvalidValue as error:
        named = re.match(r"[a-z_]+", str(error))
        raise invalid(str(error), named[0] if named else None) from error


def _bias(given: dict[str, float]) -> dict[int, float] | None:
    if len(given) > MOST_BIASES:
        raise invalid(f"logit_bias: {len(given)} tokens, {MOST_BIASES} are the most", "logit_bias")
    for token in given:
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise invalid(f"logit_bias: {token[:32]!r} is no token id: give integers as keys", "logit_bias")
    return {int(token): value for token, value in given.items()} or None


def max_tokens_of(body: Body, least: int) -> int | None:
    """Of one choice; `max_completion_tokens` wins. Raises Failure (400)."""
    for name, given in (
        ("max_completion_tokens", body.max_completion_tokens),
        ("max_tokens", body.max_tokens),
    ):
        if given is not None and given < least:
            raise invalid(f"{name}: {given} is too few, the least is {least}", name)
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def stop_of(body: Body, limits: Limits) -> tuple[str, ...]:
    """Stop strings. Raises Failure (400)."""
    stop = body.stop or []
    if len(stop) > limits.stop_strings:
        raise invalid(f"stop: {len(stop)} strings, {limits.stop_strings} are the most", "stop")
    if "" in stop:
        raise invalid("stop: an empty string ends every answer: leave it out", "stop")
    return tuple(dict.fromkeys(stop))


def choices_of(body: Body, prompts: int, limits: Limits) -> int:
    """Choices for each prompt. Raises Failure (400)."""
    n = 1 if body.n is None else body.n
    if n < 1:
        raise invalid(f"n: {n} choices, the least is 1", "n")
    if n * prompts > limits.choices:
        of = f" for {prompts} prompts" if prompts > 1 else ""
        raise unsupported(f"n: {n} choices{of}: a request may have {limits.choices} in all", "n")
    return n


def format_of(body: Body, limits: Limits) -> Format | None:
    """What the answer must look like. Raises Failure (400)."""
    given, where = body.response_format, "response_format"
    match given:
        case None | ResponseFormat(type="text"):
            return None
        case ResponseFormat(type="json_object"):
            return Format("json_object")
        case ResponseFormat(type="json_schema"):
            if given.json_schema is None or given.json_schema.schema_ is None:
                raise invalid(f"{where}.json_schema.schema: is missing", f"{where}.json_schema.schema")
            found = Format(
                "json_schema", json.dumps(given.json_schema.schema_), f"{where}.json_schema.schema"
            )
        case ResponseFormat(type="regex", pattern=str(pattern)):
            found = Format("regex", pattern, f"{where}.pattern")
        case ResponseFormat(type="lark", grammar=str(grammar)):
            found = Format("lark", grammar, f"{where}.grammar")
        case ResponseFormat(type="regex" | "lark"):
            needed = "pattern" if given.type == "regex" else "grammar"
            raise invalid(f"{where}.{needed}: is missing", f"{where}.{needed}")
        case _:
            known = "text, json_object, json_schema, regex or lark"
            raise unsupported(f"{where}.type: {given.type[:32]!r} is not one of {known}", f"{where}.type")
    size = len(found.text.encode())
    if size > limits.schema_bytes:
        raise invalid(f"{found.param}: {size} bytes, {limits.schema_bytes} are the most", found.param)
    return found


def prediction_of(body: Body) -> str | None:
    """The text that is expected. Raises Failure (400)."""
    if body.prediction is None:
        return None
    if body.prediction.type != "content":
        raise unsupported("prediction.type: only 'content' is supported", "prediction.type")
    if body.prediction.content is None:
        raise invalid("prediction.content: is missing", "prediction.content")
    return "".join(texts(body.prediction.content, "prediction.content")) or None


def texts(parts: Sequence[Part], where: str) -> list[str]:
    """The texts of parts that must be text. Raises Failure (400)."""
    found = []
    for i, part in enumerate(parts):
        place = f"{where}.{i}"
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "refusal"):
            message = f"{place}: a part of type {part.type[:32]!r} is not supported: only text is read here"
            raise unsupported(message, place)
        if text is None:
            raise invalid(f"{place}.{part.type}: is missing", f"{place}.{part.type}")
        found.append(text)
    return found
