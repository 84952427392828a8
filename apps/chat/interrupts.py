"""What Ctrl-C does: leaves while the program starts, clears the line at the prompt, stops an answer."""

from __future__ import annotations

import enum
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Self

from mlx_spec.apps.command import INTERRUPTED


class _Mode(enum.Enum):
    START = enum.auto()
    PROMPT = enum.auto()
    ANSWER = enum.auto()
    QUIET = enum.auto()


class Interrupts:
    """The SIGINT handler of the program, as a context manager.

    At the start Ctrl-C leaves at once, because threads that download a model would hold up a return. At the
    prompt it raises KeyboardInterrupt, and so it does while the prompt of an answer is read. Once the answer
    has begun, the first one is noted, to be looked at between two rounds; the second one raises.
    """

    def __init__(self) -> None:
        self._mode = _Mode.START
        self._pressed = False
        self._begun = False

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    @property
    def pressed(self) -> bool:
        """Whether Ctrl-C was pressed since the last line was entered."""
        return self._pressed

    @contextmanager
    def prompting(self) -> Iterator[None]:
        """The program waits for a line."""
        self._mode, self._pressed = _Mode.PROMPT, False
        try:
            yield
        finally:
            self.settle()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """An answer is made. Before `begun`, its prompt is being read, which may take long."""
        self._mode, self._begun = _Mode.ANSWER, False
        try:
            yield
        finally:
            self.settle()

    def begun(self) -> None:
        """The first round is done: from now on Ctrl-C waits for the end of a round."""
        self._begun = True

    def settle(self) -> None:
        """Raise nothing: the answer is over, and its caches are being put in order."""
        self._mode = _Mode.QUIET

    def press(self) -> None:
        """Ctrl-C was read as a key: the answer that comes is to be stopped."""
        self._pressed = True

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        if self._mode is _Mode.START:
            newline = "\n" if os.isatty(2) else ""
            _say(f"{newline}mlx-spec: interrupted\n")
            os._exit(INTERRUPTED)
        again = self._pressed or not self._begun
        self._pressed = True
        if self._mode is _Mode.PROMPT or (self._mode is _Mode.ANSWER and again):
            self.settle()
            raise KeyboardInterrupt


def _say(text: str) -> None:
    # Not by sys.stderr: the signal may have come in the middle of a buffered write.
    with suppress(OSError):
        os.write(2, text.encode())
