"""Request bodies: reading and checking what the four protocols share."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError
from starlette.requests import ClientDisconnect, Request

from .errors import Failure, hung_up, invalid, missing, unsupported
from .request import Chat, GenerationRequest, Tool, ToolChoice, ToolUse
from .settings import Limits

OPENAI_TOOL_CHOICES: dict[str, ToolChoice] = {
    "auto": "auto",
    "none": "none",
    "required": "required",
    "function": "required",
}
TOOL_NAME = r"^[a-zA-Z0-9_.-]{1,128}$"
PARAGRAPH = "\n\n"  # joins texts that were written apart
NO_THINKING = (None, "none", "minimal")  # reasoning efforts without thinking
MAX_SHOWN_CHARS = 64  # characters of a value that an error repeats

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


class Fields(BaseModel):
    """An object of a body. Optional fields may be null; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class ContentPart(Fields):
    """A part of a message."""

    type: str
    text: str | None = None
    refusal: str | None = None


def _check_finite(given: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(given, allow_nan=False)
    except ValueError:
        raise ValueError("JSON has neither NaN nor Infinity: give finite numbers") from None
    return given


Schema = Annotated[dict[str, Any], AfterValidator(_check_finite)]


def as_parts(content: Any) -> Any:
    """Return a string as a list of one text part."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def as_type(given: Any) -> Any:
    """Return a word as an object of that type, as for a tool choice."""
    return {"type": given} if isinstance(given, str) else given


def without_unknown(given: Any, types: Collection[str]) -> Any:
    """Return objects of a list as they are; of one whose type is not known, only the type."""

    def known(each: Any) -> Any:
        kind = each.get("type") if isinstance(each, dict) else None
        return {"type": kind} if isinstance(kind, str) and kind not in types else each

    return [known(each) for each in given] if isinstance(given, list) else given


Parts = Annotated[list[ContentPart], BeforeValidator(as_parts)]
Texts = Annotated[
    list[str] | None, BeforeValidator(lambda given: [given] if isinstance(given, str) else given)
]


async def read_body(request: Request, model: type[M]) -> M:
    """Return the body of a request as a `model`. Raises Failure (400, or 413 if it exceeds the limit)."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        message = f"content-encoding: {encoding[:MAX_SHOWN_CHARS]!r} is not read here: send a plain body"
        raise unsupported(message, "content-encoding")
    try:
        return model.model_validate_json((await request.body()).removeprefix(BOM_UTF8))
    except ClientDisconnect as error:
        raise hung_up() from error
    except ValidationError as error:
        raise _first_problem(error) from error


def _first_problem(error: ValidationError) -> Failure:
    found = error.errors(include_url=False, include_context=False, include_input=False)[0]
    message, field = found["msg"].removeprefix("Value error, "), ".".join(map(str, found["loc"]))
    if not field:
        return invalid(f"the body is not what is expected here: {message}", code="invalid_json")
    code = "missing_required_parameter" if found["type"] == "missing" else "invalid_value"
    return invalid(f"{field}: {message}", field, code)


def required(value: T | None, field: str) -> T:
    """Return the value of a field that must be given. Raises Failure (400)."""
    if value is None:
        raise missing(field)
    return value


def check_limits(request: GenerationRequest, limits: Limits) -> None:
    """Raise Failure (400) if a request asks for more than the server gives to one."""
    prompt, n = request.prompt, request.n
    prompts = 1 if isinstance(prompt, Chat) else len(prompt.prompts)
    _check_count("prompts", prompts, limits.choices, request.prompt_param)
    if n * prompts > limits.choices:
        of = f" for {prompts} prompts" if prompts > 1 else ""
        raise unsupported(f"n: {n} choices{of}: a request may have {limits.choices} in all", "n")
    least, most = request.sampling.min_tokens, request.max_tokens
    if least and request.stop:
        raise unsupported("min_tokens: goes with stop_token_ids, not with stop strings", "min_tokens")
    if most is not None and least > most:
        raise invalid(f"min_tokens: {least} are more than the limit of {most}", "min_tokens")
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


def _check_count(what: str, count: int, limit: int, param: str) -> None:
    if count > limit:
        raise invalid(f"{count} {what}: {limit} are the most", param)


def make_tool_use(
    tools: Sequence[Tool], choice: ToolChoice, named: str | None, parallel: bool | None
) -> ToolUse | None:
    """Return how tools may be used, None without tools. Raises Failure (400) if there is no tool to call."""
    if named is not None and named not in [tool.name for tool in tools]:
        raise invalid(f"tool_choice: {named[:MAX_SHOWN_CHARS]!r} is none of the tools", "tool_choice")
    if choice == "required" and not tools:
        raise invalid("tool_choice: a call that is required needs tools", "tool_choice")
    return ToolUse(tuple(tools), choice, named, parallel is not False) if tools else None


# --- messages of a conversation


def part_texts(parts: Sequence[ContentPart], field: str, types: Sequence[str] = ("text",)) -> list[str]:
    """Return the texts of parts that must be text or refusals. Raises Failure (400)."""
    texts = []
    for i, part in enumerate(parts):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in (*types, "refusal"):
            raise unsupported_part(part, f"{field}.{i}")
        if text is None:
            raise missing(f"{field}.{i}.{'refusal' if part.type == 'refusal' else 'text'}")
        texts.append(text)
    return texts


def unsupported_part(part: ContentPart, field: str) -> Failure:
    """Return the failure for a part that is not read here: 400."""
    kind = part.type[:MAX_SHOWN_CHARS]
    return unsupported(f"{field}: a part of type {kind!r} is not supported here: only text is read", field)


def call_turn(id: str, name: str, arguments: Mapping[str, Any] | str) -> dict[str, Any]:
    """Return an earlier tool call as chat templates take it."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result_turn(id: str | None, text: str, names: Mapping[str, str], field: str) -> dict[str, Any]:
    """Return the result of an earlier tool call as chat templates take it. Raises Failure (400).

    `names` are those of the called functions, by the ids of the calls; `field` has the id.
    """
    id = required(id, field)
    if id not in names:
        raise invalid(f"{field}: there is no call {id[:MAX_SHOWN_CHARS]!r} before it", field)
    return {"role": "tool", "tool_call_id": id, "name": names[id], "content": text}


def parse_arguments(text: str) -> dict[str, Any] | str:
    """Return the arguments of an earlier tool call; the text itself if it is no JSON object."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


def assistant_turn(
    content: str | None, thinking: str | None = None, calls: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return an earlier answer as chat templates take it."""
    turn: dict[str, Any] = {"role": "assistant", "content": content}
    turn |= {"reasoning_content": thinking} if thinking else {}
    return turn | ({"tool_calls": list(calls)} if calls else {})


def merge_turns(turns: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Join neighbours of one role, as chat templates want it; results of tools stay apart.

    Texts of a user or the system become paragraphs, those of the model stay as they were generated.
    """
    merged: list[dict[str, Any]] = []
    for turn in turns:
        last = merged[-1] if merged else {}
        if turn["role"] != last.get("role") or turn["role"] == "tool":
            merged.append(dict(turn))
            continue
        between = "" if turn["role"] == "assistant" else PARAGRAPH
        for key, joint in (("content", between), ("reasoning_content", "")):
            texts = [each[key] for each in (last, turn) if each.get(key) is not None]
            last |= {key: joint.join(texts)} if texts else {}
        if calls := turn.get("tool_calls"):
            last["tool_calls"] = [*last.get("tool_calls", ()), *calls]
    return tuple(merged)
