"""`/v1/responses`: OpenAI's Responses API without state, translated to what the worker is asked and back."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from mlx_spec.apps.server.bodies import check_limits, read_body, refusal
from mlx_spec.apps.server.bridge import Works, collect, paced, stream
from mlx_spec.apps.server.failures import Failure
from mlx_spec.apps.server.responses.answering import Answer, response_of
from mlx_spec.apps.server.responses.asking import ask_of
from mlx_spec.apps.server.responses.fields import Body
from mlx_spec.apps.server.settings import Settings


def router(worker: Works, settings: Settings) -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.post("/v1/responses")
    async def create(request: Request) -> Response:
        """Answer a conversation, whole or as a stream."""
        try:
            return await _answer(request, worker, settings)
        except Failure as failure:
            return refusal(failure, _named(failure).body)

    return routes


async def _answer(request: Request, worker: Works, settings: Settings) -> Response:
    body = await read_body(request, Body, settings.limits)
    ask = ask_of(body, worker.resolve(body.model or None))
    check_limits(ask, settings.limits)
    answer = Answer(body, ask, seconds=settings.keepalive_seconds)
    if body.stream:
        source = paced(worker, ask, settings.keepalive_seconds)
        return await stream(request, source, answer.frames)
    return JSONResponse(response_of(answer, await collect(request, worker, ask)))


def _named(failure: Failure) -> Failure:
    """With the field that is at fault, where the engine could not know its name."""
    if failure.code != "context_length_exceeded" or failure.param is not None:
        return failure
    return Failure(failure.status, failure.message, param="input", code=failure.code)
