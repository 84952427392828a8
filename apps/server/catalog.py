"""`/v1/models`: what can be asked for."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from mlx_spec.apps.server.failures import no_such_model
from mlx_spec.apps.server.models import ModelCard
from mlx_spec.apps.server.worker import Worker


def router(worker: Worker) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        """All models, then their aliases."""
        cards = worker.models()
        listed = [_json(card.name, card) for card in cards]
        listed += [_json(alias, card) for card in cards for alias in card.aliases]
        return {"object": "list", "data": listed}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One of them."""
        cards = worker.models()
        found = next((card for card in cards if name in (card.name, *card.aliases)), None)
        if found is None:
            raise no_such_model(name, ", ".join(card.name for card in cards))
        return _json(name, found)

    return routes


def _json(name: str, card: ModelCard) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": card.created,
        "owned_by": "mlx_spec",
        "model": card.name,
        "loaded": card.loaded,
        "context_length": card.context_length,
        "thinks": card.thinks,
        "tools": card.tools,
    }
