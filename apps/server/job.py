"""A request that was admitted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from mlx_spec.apps.server.ask import Ask, Event

_log = logging.getLogger("mlx_spec.server")

Send = Callable[[Event], None]


class Job:
    """A request, from its admission to its last event. Made by `Worker.submit`."""

    def __init__(self, ask: Ask, send: Send, wake: Callable[[], None]) -> None:
        self.ask = ask
        self.submitted = time.perf_counter()
        self._send = send
        self._wake = wake
        self._cancelled = False

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._cancelled

    def cancel(self) -> None:
        """End it within a round or a step of its prompt. No event follows. For any thread, at any time."""
        if not self._cancelled:
            self._cancelled = True
            self._wake()

    def send(self, event: Event) -> None:
        """Hand an event to whoever asked, on the engine thread; one who cannot take it is gone."""
        if self._cancelled:
            return
        try:
            self._send(event)
        except Exception:
            _log.exception("an event could not be handed over")
            self._cancelled = True
