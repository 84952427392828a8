"""What both of OpenAI's routes answer with."""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

from fastapi import Request

from mlx_spec import __version__
from mlx_spec.apps.server.ask import Ask, Chat, Event
from mlx_spec.apps.server.bridge import Streaming, Works, collect, paced, stream
from mlx_spec.apps.server.failures import Failure
from mlx_spec.apps.server.stream import Chunks

TOO_LONG = "context_length_exceeded"


def head_of(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """What comes first in an answer and in each of its chunks."""
    return {
        "id": f"{prefix}-{uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"mlx_spec-{__version__}",
    }


async def collected(request: Request, worker: Works, ask: Ask) -> list[Event]:
    """All events of a request. Raises Failure."""
    try:
        return await collect(request, worker, ask)
    except Failure as failure:
        raise _named(failure, ask) from failure


async def streamed(
    request: Request, worker: Works, ask: Ask, keepalive_seconds: float, chunks: Chunks
) -> Streaming:
    """The stream of a request. Raises Failure for what goes wrong before it begins."""
    try:
        return await stream(request, paced(worker, ask, keepalive_seconds), chunks.frames)
    except Failure as failure:
        raise _named(failure, ask) from failure


def _named(failure: Failure, ask: Ask) -> Failure:
    """With the field that is at fault, where the engine could not know its name."""
    if failure.code != TOO_LONG or failure.param is not None:
        return failure
    param = "messages" if isinstance(ask.prompt, Chat) else "prompt"
    return Failure(failure.status, failure.message, param=param, code=failure.code)
