"""Handle Ctrl-C: leave the program, interrupt a wait, or stop an answer between two rounds."""

from __future__ import annotations

import enum
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Self

from mlx_spec.cli.command import INTERRUPTED


class CtrlC(enum.Enum):
    """The effects of Ctrl-C. Each also sets `pressed`."""

    EXIT = enum.auto()  # end the process at once: threads that download or load would delay a return
    NOTE = enum.auto()  # no more than that
    RAISE = enum.auto()  # raise KeyboardInterrupt, at once if `pressed` was set before; then NOTE
    LOAD = enum.auto()  # raise KeyboardInterrupt; then EXIT, for example while the old model comes back
    STOP = enum.auto()  # NOTE the first time; the second time raise SystemExit, which restores the terminal


class Interrupts:
    """The handler of SIGINT, as a context manager. Ctrl-C ends the process, except within `acting`."""

    def __init__(self, message: str = "interrupted") -> None:
        self._message = message
        self.pressed = False  # since `clear`; also set by the line editor, which reads Ctrl-C as a key
        self.action = CtrlC.EXIT

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def clear(self) -> None:
        """Forget that Ctrl-C was pressed: a new line begins."""
        self.pressed = False

    @contextmanager
    def acting(self, action: CtrlC) -> Iterator[None]:
        """Give Ctrl-C this effect within the context, where `action` may change. Restore the former one."""
        before, self.action = self.action, action
        try:
            if action is CtrlC.RAISE and self.pressed:
                raise KeyboardInterrupt
            yield
        finally:
            self.action = before

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        again, self.pressed = self.pressed, True
        match self.action:
            case CtrlC.EXIT:
                self._report()
                os._exit(INTERRUPTED)
            case CtrlC.LOAD:
                self.action = CtrlC.EXIT
                self._report()
                raise KeyboardInterrupt
            case CtrlC.STOP if again:
                self._report()
                raise SystemExit(INTERRUPTED)
            case CtrlC.RAISE:
                self.action = CtrlC.NOTE
                raise KeyboardInterrupt

    def _report(self) -> None:
        newline = "\n" if os.isatty(2) else ""
        # sys.stderr may be in the middle of a buffered write.
        with suppress(OSError):
            os.write(2, f"{newline}mlx-spec: {self._message}\n".encode())
