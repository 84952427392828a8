"""`/v1/messages`: Anthropic's Messages API, translated to what the worker is asked and back."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from mlx_spec.apps.server.ask import Ask
from mlx_spec.apps.server.bodies import check_limits, read_body, refusal
from mlx_spec.apps.server.bridge import Works, collect, paced, stream
from mlx_spec.apps.server.failures import Failure
from mlx_spec.apps.server.messages.answering import Answer, message_of
from mlx_spec.apps.server.messages.asking import ask_of, chat_of
from mlx_spec.apps.server.messages.errors import error_json, translated
from mlx_spec.apps.server.messages.fields import Body, Prompt
from mlx_spec.apps.server.settings import Settings
from mlx_spec.sampling import Sampling

Count = Callable[[Ask], int]  # tokens of a prompt; raises Failure; called outside of the event loop


def router(worker: Works, settings: Settings, count: Count | None = None) -> APIRouter:
    """The route; with `count`, that of `/v1/messages/count_tokens`, too."""
    routes = APIRouter()

    @routes.post("/v1/messages")
    async def create(request: Request) -> Response:
        """Answer a conversation, whole or as a stream."""
        try:
            return await _answer(request, worker, settings)
        except Failure as failure:
            return _refused(failure)

    if count is None:
        return routes

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        """The tokens of a prompt, without an answer to it."""
        try:
            prompt = await read_body(request, Prompt, settings.limits)
            ask = Ask(worker.resolve(prompt.model or None), chat_of(prompt), Sampling())
            check_limits(ask, settings.limits)
            return JSONResponse({"input_tokens": await run_in_threadpool(count, ask)})
        except Failure as failure:
            return _refused(failure)

    return routes


async def _answer(request: Request, worker: Works, settings: Settings) -> Response:
    body = await read_body(request, Body, settings.limits)
    ask = ask_of(body, worker.resolve(body.model or None))
    check_limits(ask, settings.limits)
    shown = body.thinking is None or body.thinking.display != "omitted"
    answer = Answer(ask, show_thoughts=shown, seconds=settings.keepalive_seconds)
    if body.stream:
        source = paced(worker, ask, settings.keepalive_seconds)
        return await stream(request, source, answer.frames)
    return JSONResponse(message_of(answer, await collect(request, worker, ask)))


def _refused(failure: Failure) -> Response:
    return refusal(translated(failure), error_json(failure))
