"""`/v1/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from mlx_spec.apps.server.ask import Raw
from mlx_spec.apps.server.bodies import read_body
from mlx_spec.apps.server.bridge import Works
from mlx_spec.apps.server.completions.answering import TextShape, whole
from mlx_spec.apps.server.completions.asking import ask_of
from mlx_spec.apps.server.completions.fields import Body
from mlx_spec.apps.server.replies import collected, head_of, streamed
from mlx_spec.apps.server.settings import Settings
from mlx_spec.apps.server.stream import Chunks, wanted


def router(worker: Works, settings: Settings) -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.post("/v1/completions")
    async def create(request: Request) -> Response:
        """Continue texts, whole or as a stream."""
        body = await read_body(request, Body, settings.limits)
        ask = ask_of(body, worker.resolve(body.model or None), settings.limits)
        with_logprobs = ask.top_logprobs is not None
        head = head_of("cmpl", "text_completion", ask.model)
        if body.stream:
            chunks = Chunks(head, TextShape(with_logprobs=with_logprobs), wanted(body.stream_options))
            return await streamed(request, worker, ask, settings.keepalive_seconds, chunks)
        events = await collected(request, worker, ask)
        count = ask.n * (len(ask.prompt.prompts) if isinstance(ask.prompt, Raw) else 1)
        return JSONResponse(whole(head, events, count, with_logprobs=with_logprobs))

    return routes
