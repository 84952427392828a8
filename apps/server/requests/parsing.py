"""Read and check what the bodies of all protocols share: fields, parts, tools, limits, conversations."""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar, cast, get_args

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request

from mlx_spec.errors import InvalidValue
from mlx_spec.tokenizer.fill_in import FillIn
from mlx_spec.vision.pictures import from_data_url

from ..errors import Failure, hung_up, invalid, invalid_field, missing, unsupported_field
from ..settings import Limits
from .request import Chat, GenerationRequest, PictureFile, Tool, ToolChoice, ToolUse

TOOL_NAME = r"^[a-zA-Z0-9_.-]{1,128}$"
PICTURES = ("image_url", "input_image")  # the types of parts in OpenAI's protocols
MAX_SHOWN_CHARS = 64  # characters of a value that an error repeats
PARAGRAPH = "\n\n"  # joins texts that were written apart

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


class Fields(BaseModel):
    """An object of a body. Optional fields may be null; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _read_number(cls, value: Any) -> Any:
        """Return a whole number as an integer: to JSON 8192.0 is one, and clients in Python write it."""
        if isinstance(value, float) and value.is_integer():
            return int(value)
        return list(map(cls._read_number, value)) if isinstance(value, list) else value


class ContentPart(Fields):
    """A part of a message."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Annotated[str | None, BeforeValidator(lambda value: _url_of(value))] = None
    file_id: str | None = None


def _url_of(value: Any) -> Any:
    """Return the URL of a picture, which chat completions wrap in an object with a level of detail."""
    return value.get("url") if isinstance(value, dict) else value


def _check_finite(value: T) -> T:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise ValueError("JSON has neither NaN nor Infinity: give finite numbers") from None
    return value


Schema = Annotated[dict[str, Any], AfterValidator(_check_finite)]
Count = Annotated[int, Field(ge=0)]
Repeated = Annotated[Any, AfterValidator(_check_finite)]  # any value that an answer sends back


def from_text(make: Callable[[str], Any]) -> BeforeValidator:
    """Return a validator that replaces a text by `make(text)`, and leaves other values unchanged."""
    return BeforeValidator(lambda value: make(value) if isinstance(value, str) else value)


AS_PARTS = from_text(lambda text: [{"type": "text", "text": text}])
AS_LIST = from_text(lambda text: [text])
AS_TYPE = from_text(lambda word: {"type": word})


def known_types(*types: str) -> BeforeValidator:
    """Return a validator of a list: objects of other types keep their `type` only, so they can be named."""

    def known(item: Any) -> Any:
        type_name = item.get("type") if isinstance(item, dict) else None
        return {"type": type_name} if isinstance(type_name, str) and type_name not in types else item

    return BeforeValidator(lambda items: list(map(known, items)) if isinstance(items, list) else items)


Parts = Annotated[list[ContentPart], AS_PARTS]
Texts = Annotated[list[str] | None, AS_LIST]


def stop_strings(texts: Sequence[str] | None) -> tuple[str, ...]:
    """Return the strings that end an answer, each once. Some clients send empty ones, which are dropped."""
    return tuple(dict.fromkeys(filter(None, texts or ())))


async def read_body(http_request: Request, model: type[M]) -> M:
    """Return the body of a request as a `model`. Raises Failure (400, or 413 if it exceeds the limit).

    Half a surrogate pair, as in a text that was cut within an emoji, is read as U+FFFD.
    """
    encoding = http_request.headers.get("content-encoding", "").strip()
    if encoding.lower() not in ("", "identity"):
        shown = encoding[:MAX_SHOWN_CHARS]
        raise unsupported_field("content-encoding", f"{shown!r} is not read here: send a plain body")
    try:
        body = (await http_request.body()).removeprefix(BOM_UTF8)
        quick_bytes = 2**18  # the event loop reads these in milliseconds
        if len(body) <= quick_bytes:
            return _validated(body, model)
        return await run_in_threadpool(_validated, body, model)
    except ClientDisconnect as error:
        raise hung_up() from error
    except ValidationError as error:
        raise _first_problem(error) from error


def _validated(body: bytes, model: type[M]) -> M:
    """Return a body as a `model`. Raises ValidationError, and Failure (413) for a text that is too long."""
    most = Limits.text_bytes  # base64 has no commas, and reading many values takes seconds
    if len(body) > most and body.count(b",") > 500_000:
        message = f"the body has more than {most} bytes, and they are not pictures"
        raise Failure(413, message, code="body_too_large")
    # Half a surrogate pair as bytes, not as an escape: UTF-8 does not have these bytes.
    body = re.sub(rb"\xed[\xa0-\xbf][\x80-\xbf]", "\ufffd".encode(), body)
    return model.model_validate_json(replace_halves(body))


def replace_halves(body: bytes) -> bytes:
    """Return JSON with U+FFFD for each escaped half of a surrogate pair.

    It takes the same time whatever the body holds.
    """
    if not re.search(rb"\\u[dD][89a-fA-F]", body):
        return body
    data = np.frombuffer(body + bytes(6), np.uint8).copy()
    is_hex = np.isin(np.arange(256), list(b"0123456789abcdefABCDEF"))
    backslash, end = data == ord("\\"), len(body)
    starts = np.flatnonzero(
        backslash[:end] & (data[1 : end + 1] == ord("u")) & (data[2 : end + 2] | 32 == ord("d"))
    )
    is_low, is_high = (np.isin(data[starts + 3], list(digits)) for digits in (b"cdefCDEF", b"89abAB"))
    is_half = (is_low | is_high) & is_hex[data[starts + 4]] & is_hex[data[starts + 5]]
    # After an odd number of backslashes the next one is escaped, and begins no escape.
    others = np.concatenate(([-1], np.flatnonzero(~backslash)))
    is_half &= (starts - others[np.searchsorted(others, starts) - 1]) % 2 == 1
    starts, is_high = starts[is_half], is_high[is_half]
    begins = np.zeros(len(starts), np.bool_)  # a pair
    begins[:-1] = is_high[:-1] & ~is_high[1:] & (np.diff(starts) == 6)
    alone = starts[~(begins | np.roll(begins, 1))]
    for i, letter in enumerate(b"fffd"):
        data[alone + 2 + i] = letter
    return data[:end].tobytes()


def read_query(http_request: Request, model: type[M]) -> M:
    """Return the parameters of a URL as a `model`. Raises Failure (400)."""
    try:
        return model.model_validate(dict(http_request.query_params))
    except ValidationError as error:
        raise _first_problem(error) from error


def _first_problem(error: ValidationError) -> Failure:
    field, message, error_type = _first_error(error)
    if not field:
        return invalid(f"the body is not what is expected here: {message}", code="invalid_json")
    code = "missing_required_parameter" if error_type == "missing" else "invalid_value"
    return invalid_field(field, message, code)


def _first_error(error: ValidationError) -> tuple[str, str, str]:
    """Return the field of the first error, its message and its type."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, "), first["type"]


def required(value: T | None, field: str) -> T:
    """Return the value of a field that must be given. Raises Failure (400)."""
    if value is None:
        raise missing(field)
    return value


def check_limits(request: GenerationRequest, limits: Limits) -> None:
    """Raise Failure (400) if a request asks for more than the server gives to one."""
    prompt, n = request.prompt, request.n
    texts = prompt.messages if isinstance(prompt, Chat) else prompt.prompts
    if _text_length(texts) > limits.text_bytes:
        message = f"{request.prompt_param}: the text is longer than {limits.text_bytes} characters"
        raise Failure(413, message, param=request.prompt_param, code="body_too_large")
    prompts = 1 if isinstance(prompt, Chat) else len(prompt.prompts)
    _check_count("prompts", prompts, limits.choices, request.prompt_param)
    if n * prompts > limits.choices:
        of = f" for {prompts} prompts" if prompts > 1 else ""
        raise unsupported_field("n", f"{n} choices{of}: a request may have {limits.choices} in all")
    least, most = request.sampling.min_tokens, request.max_tokens
    if least and request.stop:
        raise unsupported_field("min_tokens", "goes with stop_token_ids, not with stop strings")
    if most is not None and least > most:
        raise invalid_field("min_tokens", f"{least} are more than the limit of {most}")
    tools = prompt.tools.tools if isinstance(prompt, Chat) and prompt.tools else ()
    _check_count("stop strings", len(request.stop), limits.stop_strings, "stop")
    _check_count("tools", len(tools), limits.tools, "tools")
    for name, times in Counter(tool.name for tool in tools).items():
        if times > 1:
            raise invalid(f"{times} tools are called {name!r}: give each a name of its own", "tools")
    for tool in tools:
        size = len(json.dumps(dict(tool.parameters)))
        _check_count(f"bytes in the schema of tool {tool.name!r}", size, limits.schema_bytes, "tools")
    if request.format is not None:
        size, param = len(request.format.text.encode()), request.format.param
        _check_count(f"bytes in {param}", size, limits.schema_bytes, param)


def _text_length(value: Any) -> int:
    """Return the characters of all texts in a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        value = value.values()
    elif isinstance(value, FillIn):
        value = (value.prefix, value.suffix)
    elif not isinstance(value, list | tuple):
        return 0
    return sum(map(_text_length, value))


def _check_count(what: str, count: int, limit: int, param: str) -> None:
    if count > limit:
        raise invalid(f"{count} {what}: {limit} are the most", param)


class FunctionField(Fields):
    """A function that the client runs."""

    name: str | None = Field(default=None, pattern=TOOL_NAME)
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None

    def tool(self, field: str, parameters_name: str = "parameters") -> Tool:
        """Return the tool. Raises Failure (400)."""
        name, parameters = required(self.name, f"{field}.name"), self.parameters or {}
        if parameters.get("type", "object") != "object":
            raise invalid_field(f"{field}.{parameters_name}.type", "arguments are an object")
        return Tool(name, self.description, parameters, bool(self.strict))


def allowed_tools(tools: Sequence[Tool], names: Sequence[str]) -> list[Tool]:
    """Return the tools of these names. Raises Failure (400) for a name that no tool has."""
    for name in names:
        _check_named(name, tools)
    return [tool for tool in tools if tool.name in names]


def _check_named(name: str, tools: Sequence[Tool]) -> None:
    if name not in [tool.name for tool in tools]:
        raise invalid_field("tool_choice", f"{name[:MAX_SHOWN_CHARS]!r} is none of the tools")


def make_tool_use(tools: list[Tool], mode: str, named: str | None, parallel: bool | None) -> ToolUse | None:
    """Return how tools may be used, None without tools. Raises Failure (400) for a call that no tool allows.

    `mode` is a ToolChoice, or "function" if `named` must be called.
    """
    choice = cast(ToolChoice, "required" if mode == "function" else mode)
    if choice not in get_args(ToolChoice):
        raise unsupported_field("tool_choice", f"{mode[:MAX_SHOWN_CHARS]!r} is not supported here")
    if named is not None:
        _check_named(named, tools)
    if choice == "required" and not tools:
        raise invalid_field("tool_choice", "a call that is required needs tools")
    return ToolUse(tuple(tools), choice, named, parallel is not False) if tools else None


# --- parts of messages, and the conversation that a chat template reads


def part_texts(
    parts: Sequence[ContentPart] | None, field: str, types: Sequence[str] = ("text",)
) -> list[str]:
    """Return the texts of parts, [""] without parts. Raises Failure (400) for other parts than text."""
    given = _required_parts(parts, field)
    return [_part_text(part, f"{field}.{i}", types) for i, part in enumerate(given)] or [""]


def part_contents(
    parts: Sequence[ContentPart] | None, field: str, types: Sequence[str] = ("text",)
) -> list[str | PictureFile]:
    """Return the texts and pictures of parts, [""] without parts. Raises Failure (400) for other parts."""
    contents: list[str | PictureFile] = []
    for i, part in enumerate(_required_parts(parts, field)):
        part_field = f"{field}.{i}"
        if part.type not in PICTURES:
            contents.append(_part_text(part, part_field, types))
        elif part.file_id is not None and part.image_url is None:
            why = "no files are kept here: send the picture as image_url"
            raise unsupported_field(f"{part_field}.file_id", why)
        else:
            url = required(part.image_url, f"{part_field}.image_url")
            contents.append(picture(from_data_url, url, part_field))
    return contents or [""]


def _required_parts(parts: Sequence[ContentPart] | None, field: str) -> Sequence[ContentPart]:
    """Return the parts. Raises Failure (400) if the field is missing or null."""
    if parts is None:
        raise missing(field, "is missing or null: give a text or a list of parts")
    return parts


def picture(read: Callable[[str], bytes], source: str, field: str) -> PictureFile:
    """Return the picture that `read` decodes from a text. Raises Failure (400)."""
    try:
        return PictureFile(read(source), field)
    except InvalidValue as error:
        raise invalid_field(field, error) from error


def _part_text(part: ContentPart, field: str, types: Sequence[str]) -> str:
    if part.type not in (*types, "refusal"):
        raise unsupported_part(part, field)
    name = "refusal" if part.type == "refusal" else "text"
    text: str = required(vars(part)[name], f"{field}.{name}")
    return text


def unsupported_part(part: ContentPart, field: str) -> Failure:
    """Return the failure for a part that is not read there: 400."""
    shown = part.type[:MAX_SHOWN_CHARS]
    is_picture = shown in (*PICTURES, "image")
    where = "pictures are read from the user and from tools"
    why = where if is_picture else "only text and pictures are read"
    return unsupported_field(field, f"a part of type {shown!r} is not supported here: {why}")


def parse_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object in `text`, or None. Half a surrogate pair is read as U+FFFD."""
    try:
        value = json.loads(replace_halves(text.encode("utf-8", "surrogatepass")))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
