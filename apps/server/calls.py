"""Calls that are held back until they are complete, for protocols in which nothing can be taken back.

Their clients run a call as soon as its item ends: one that turns out to be malformed, or is cut off, must not
have been shown.
"""

from __future__ import annotations

import time

from mlx_spec.apps.server.ask import CallArguments, CallDropped, CallOpened, Event, Failed, RoundDone


class CompleteCalls:
    """Passes events on, but a call in one piece, and not at all where it is dropped."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds  # that may pass without a word while a call is held
        self._spoke = time.monotonic()
        self._call: CallOpened | None = None
        self._arguments: list[str] = []

    def read(self, event: Event | None) -> list[Event | None]:
        """What is to be written for an event, or for silence; None stands for that."""
        passed, now = self._passed(event), time.monotonic()
        if not passed and now - self._spoke >= self._seconds:
            passed = [None]
        self._spoke = now if passed else self._spoke
        return passed

    def _passed(self, event: Event | None) -> list[Event | None]:
        match event:
            case RoundDone():
                return []
            case CallOpened():
                done, self._call = self._released(), event
                return done
            case CallArguments(text=text):
                self._arguments.append(text)
                return []
            case CallDropped():
                self._forget()
                return []
            case Failed():
                self._forget()
                return [event]
            case None:
                return [None]
        return [*self._released(), event]

    def _released(self) -> list[Event | None]:
        """The call that is held, as it is complete now."""
        call, text = self._call, "".join(self._arguments)
        self._forget()
        return [] if call is None else [call, CallArguments(call.index, call.call, text)]

    def _forget(self) -> None:
        self._call, self._arguments = None, []
