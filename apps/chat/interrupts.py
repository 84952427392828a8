"""Ctrl-C: it leaves, interrupts a wait, or stops an answer between two rounds."""

from __future__ import annotations

import enum
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import Self

from ..command import INTERRUPTED


class _Action(enum.Enum):
    """The effects of Ctrl-C."""

    EXIT = enum.auto()  # end the process at once: threads that download or load would delay a return
    NOTE = enum.auto()  # set `pressed`
    RAISE = enum.auto()  # raise KeyboardInterrupt, then only note
    LOAD = enum.auto()  # raise KeyboardInterrupt, then EXIT
    STOP = enum.auto()  # set `pressed`, then raise SystemExit, which puts the terminal in order


class Interrupts:
    """The handler of SIGINT, as a context manager. Ctrl-C ends the process, except in the contexts below."""

    def __init__(self, message: str = "interrupted") -> None:
        self._message = message
        self.pressed = False  # since `clear`; the line editor sets it, too, where it reads Ctrl-C as a key
        self._action = _Action.EXIT

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def clear(self) -> None:
        """Forget that Ctrl-C was pressed: a new line begins."""
        self.pressed = False

    def noting(self) -> AbstractContextManager[None]:
        """Let Ctrl-C only set `pressed`."""
        return self._acting(_Action.NOTE)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Let Ctrl-C raise KeyboardInterrupt, at once if it was pressed before."""
        with self._acting(_Action.RAISE):
            if self.pressed:
                raise KeyboardInterrupt
            yield

    def loading(self) -> AbstractContextManager[None]:
        """Let Ctrl-C cancel a load; a second one leaves, for example while the former model returns."""
        return self._acting(_Action.LOAD)

    def begin_rounds(self) -> None:
        """Within `raising`, let Ctrl-C set `pressed`, to be read after each round; a second one leaves."""
        self._action = _Action.STOP

    def settle(self) -> None:
        """Within `raising`, let Ctrl-C only set `pressed`: the caches of an answer are put in order."""
        self._action = _Action.NOTE

    @contextmanager
    def _acting(self, action: _Action) -> Iterator[None]:
        before, self._action = self._action, action
        try:
            yield
        finally:
            self._action = before

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        again, self.pressed = self.pressed, True
        match self._action:
            case _Action.EXIT:
                self._report()
                os._exit(INTERRUPTED)
            case _Action.LOAD:
                self._action = _Action.EXIT
                self._report()
                raise KeyboardInterrupt
            case _Action.STOP if again:
                self._report()
                raise SystemExit(INTERRUPTED)
            case _Action.RAISE:
                self._action = _Action.NOTE
                raise KeyboardInterrupt

    def _report(self) -> None:
        newline = "\n" if os.isatty(2) else ""
        # Not through sys.stderr: the signal may have come in the middle of a buffered write.
        with suppress(OSError):
            os.write(2, f"{newline}mlx-spec: {self._message}\n".encode())
