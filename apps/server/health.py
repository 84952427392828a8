"""`/health`: whether requests are answered, and that it is us who would."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from mlx_spec import __version__
from mlx_spec.apps.server.worker import Worker

STATES = {"ready": "ok", "closed": "draining"}  # the others go by their own names


def router(worker: Worker) -> APIRouter:
    """The route. Its status is 200 where requests are answered, else 503."""
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> JSONResponse:
        """Open to all, so it says little."""
        status = worker.status()
        body = {
            "status": STATES.get(status.state, status.state),
            "service": "mlx_spec",
            "version": __version__,
            "waiting": status.waiting,
            "running": status.running,
        }
        return JSONResponse(body, status_code=200 if status.state == "ready" else 503)

    return routes
