"""The application: routes behind guards."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.routing import APIRoute

from mlx_spec import __version__
from mlx_spec.apps.server import catalog, chat, completions, health, messages, metrics, page, responses
from mlx_spec.apps.server.guards import BodyGuard, HostGuard, KeyGuard, OriginGuard
from mlx_spec.apps.server.log import LOG
from mlx_spec.apps.server.refusals import LastResort, add_handlers
from mlx_spec.apps.server.settings import Settings
from mlx_spec.apps.server.worker import Worker

PATIENCE = 2.0  # seconds for the engine to end a round; loading a model may take longer
TICK = 0.02  # seconds between two looks


def create(settings: Settings, worker: Worker) -> FastAPI:
    """The application. Its lifespan starts the worker and closes it."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        try:
            yield
        finally:
            await _close(worker)

    app = FastAPI(
        title="mlx_spec",
        version=__version__,
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_url=None,  # and with it the pages that would load scripts from elsewhere
    )
    counted = metrics.Metrics(worker)
    works = metrics.Observed(worker, counted)
    routers = (
        chat.router(works, settings),
        completions.router(works, settings),
        messages.router(works, settings, worker.count),
        responses.router(works, settings),
        catalog.router(worker),
        health.router(worker),
        metrics.router(counted),
        page.router(),
    )
    for router in routers:
        app.include_router(router)
    add_handlers(app)
    paths = [route.path for router in routers for route in router.routes if isinstance(route, APIRoute)]
    app.add_middleware(LastResort)
    _add_guards(app, settings)
    app.add_middleware(metrics.Counting, metrics=counted, paths=frozenset(paths))
    return app


def _add_guards(app: FastAPI, settings: Settings) -> None:
    """The last one added is the first one asked."""
    app.add_middleware(BodyGuard, most=settings.limits.body_bytes)
    if settings.api_key is not None:
        app.add_middleware(KeyGuard, key=settings.api_key)
    app.add_middleware(OriginGuard, settings=settings)
    app.add_middleware(HostGuard, settings=settings)


async def _close(worker: Worker) -> None:
    """Close the worker without a wait for a model that is being loaded."""
    closing = threading.Thread(target=worker.close, name="mlx_spec closing", daemon=True)
    closing.start()
    for _ in range(round(PATIENCE / TICK)):
        if not closing.is_alive():
            return
        await asyncio.sleep(TICK)
    LOG.warning("the engine is still busy: leaving it")
