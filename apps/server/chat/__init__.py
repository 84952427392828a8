"""`/v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from mlx_spec.apps.server.ask import Ask
from mlx_spec.apps.server.bodies import read_body
from mlx_spec.apps.server.bridge import Works
from mlx_spec.apps.server.chat.answering import ChatShape, whole
from mlx_spec.apps.server.chat.asking import ask_of
from mlx_spec.apps.server.chat.fields import Body
from mlx_spec.apps.server.replies import collected, head_of, streamed
from mlx_spec.apps.server.settings import Settings
from mlx_spec.apps.server.stream import Chunks, wanted


def router(worker: Works, settings: Settings) -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions")
    async def create(request: Request) -> Response:
        """Answer a conversation, whole or as a stream."""
        body = await read_body(request, Body, settings.limits)
        ask = ask_of(body, worker.resolve(body.model or None), settings.limits)
        tier = {} if body.service_tier is None else {"service_tier": "default"}
        if body.stream:
            head = head_of("chatcmpl", "chat.completion.chunk", ask.model) | tier
            chunks = Chunks(head, ChatShape(ask.n), wanted(body.stream_options))
            return await streamed(request, worker, ask, settings.keepalive_seconds, chunks)
        return await _whole(request, worker, ask, tier)

    return routes


async def _whole(request: Request, worker: Works, ask: Ask, tier: dict[str, str]) -> Response:
    events = await collected(request, worker, ask)
    head = head_of("chatcmpl", "chat.completion", ask.model) | tier
    return JSONResponse(whole(head, events, ask.n, with_logprobs=ask.top_logprobs is not None))
