"""JSON bodies of requests: read, checked against a model, and refused in one line that names the field."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, TypeVar

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from mlx_spec.apps.server.ask import Ask, Chat
from mlx_spec.apps.server.failures import Failure, invalid
from mlx_spec.apps.server.settings import Limits

M = TypeVar("M", bound=BaseModel)
TOO_LARGE = 413


async def read_body(request: Request, model: type[M], limits: Limits) -> M:
    """The body of a request as a `model`. Raises Failure: 400, or 413 for one beyond the limit."""
    try:
        raw = await request.body()
    except HTTPException as error:
        raise Failure(error.status_code, str(error.detail)) from error
    except ClientDisconnect as error:
        raise Failure(499, "the client hung up", code="disconnected") from error
    if len(raw) > limits.body_bytes:
        message = f"the body has {len(raw)} bytes: {limits.body_bytes} are the most"
        raise Failure(TOO_LARGE, message, code="body_too_large")
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise _refusal(error) from error


def refusal(failure: Failure, body: dict[str, Any]) -> JSONResponse:
    """The response of a request that failed before its stream began."""
    headers = {} if failure.retry_after is None else {"retry-after": str(failure.retry_after)}
    return JSONResponse(body, status_code=failure.status, headers=headers)


def check_limits(ask: Ask, limits: Limits) -> None:
    """Raises Failure (400) where a request asks for more than the server gives to one."""
    tools = ask.prompt.tools.tools if isinstance(ask.prompt, Chat) and ask.prompt.tools else ()
    _most("stop strings", len(ask.stop), limits.stop_strings)
    _most("tools", len(tools), limits.tools)
    for name, times in Counter(tool.name for tool in tools).items():
        if times > 1:
            raise invalid(f"{times} tools are called {name!r}: give each a name of its own", "tools")
    for tool in tools:
        size = len(json.dumps(dict(tool.parameters)))
        _most(f"bytes in the schema of tool {tool.name!r}", size, limits.schema_bytes)
    if ask.format is not None:
        _most("bytes in the format of the answer", len(ask.format.text), limits.schema_bytes)


def _most(what: str, count: int, most: int) -> None:
    if count > most:
        raise invalid(f"{count} {what}: {most} are the most")


def _refusal(error: ValidationError) -> Failure:
    """The first of the errors."""
    found = error.errors(include_url=False, include_context=False, include_input=False)[0]
    message, where = found["msg"].removeprefix("Value error, "), ".".join(map(str, found["loc"]))
    if not where:
        return invalid(f"the body is not what is expected here: {message}", code="invalid_json")
    code = "missing_required_parameter" if found["type"] == "missing" else "invalid_value"
    return invalid(f"{where}: {message}", where, code)
