"""How a server is, for health checks, metrics and the page."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from mlx_spec.apps.server.memory import NOTHING, Memory

State = Literal["loading", "ready", "failed", "draining", "closed"]


@dataclass(frozen=True)
class ModelStatus:
    """A model that is loaded."""

    name: str
    weights: int  # bytes
    caches: int  # bytes of its conversations
    conversations: int


@dataclass(frozen=True)
class Status:
    """A moment of a server."""

    state: State  # failed: the first model could not be loaded
    waiting: int = 0  # requests
    running: int = 0
    models: tuple[ModelStatus, ...] = ()  # those that are loaded
    memory: Memory = NOTHING
    budget: int = 0  # bytes for weights and caches
    problem: str | None = None  # why it failed

    @property
    def conversations(self) -> int:
        """Of all models."""
        return sum(model.conversations for model in self.models)

    def at(self, state: State, waiting: int, running: int, problem: str | None) -> Status:
        """The same bytes at another moment."""
        return replace(self, state=state, waiting=waiting, running=running, problem=problem)
