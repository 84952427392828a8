"""What Ctrl-C does: leaves while the program starts, clears the line at the prompt, stops an answer."""

from __future__ import annotations

import enum
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Self

from mlx_spec.apps.command import INTERRUPTED

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

HEED = 0.1  # seconds
AGAIN = 0.01  # seconds


class _Mode(enum.Enum):
    START = enum.auto()
    PROMPT = enum.auto()
    LOADING = enum.auto()
    ANSWER = enum.auto()
    QUIET = enum.auto()


class Interrupts:
    """The SIGINT handler of the program, as a context manager.

    At the start Ctrl-C leaves at once, because threads that download a model would hold up a return. At the
    prompt it raises KeyboardInterrupt, or tells the editor where there is one, whose tasks would not survive
    that. It raises while a command waits for a file or the network, and while the prompt of an answer is
    read. Once the answer has begun, the first one is noted, to be looked at between two rounds; the second
    one raises. It raises while another model is loaded; the second one, while the former model comes back,
    leaves as at the start.

    Python drops what is raised while an object is finalized. A KeyboardInterrupt lost there is raised again
    AGAIN seconds later.
    """

    def __init__(self) -> None:
        self._mode = self._raised_in = _Mode.START
        self._pressed = False
        self._begun = False
        self._leave: Callable[[], None] | None = None  # that of the editor that reads a line

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGINT, self._handle)
        self._hook, sys.unraisablehook = sys.unraisablehook, self._lose
        return self

    def __exit__(self, *_: object) -> None:
        sys.unraisablehook = self._hook
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
    def editing(self, leave: Callable[[], None]) -> Iterator[None]:
        """An editor reads the line. Ctrl-C is noted, and `leave` called, which may come at any moment."""
        self._leave = leave
        self.settle()
        try:
            yield
        finally:
            self._leave = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A command waits for a file or for the network, perhaps for ever.

        Raises KeyboardInterrupt where Ctrl-C came since the line was entered.
        """
        self._mode = _Mode.PROMPT
        try:
            if self._pressed:
                raise KeyboardInterrupt
            yield
        finally:
            self.settle()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Another model is loaded. Raises KeyboardInterrupt where Ctrl-C came since the line was entered."""
        self._mode = _Mode.LOADING
        try:
            if self._pressed:
                self._handle(signal.SIGINT, None)
            yield
        finally:
            if self._mode is _Mode.LOADING:
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
            _tell()
            os._exit(INTERRUPTED)
        again = self._pressed or not self._begun
        self._pressed, self._raised_in = True, self._mode
        if self._mode is _Mode.LOADING:
            self._mode = _Mode.START
            _tell()
            raise KeyboardInterrupt
        if self._leave is not None:
            self._leave()
        if self._mode is _Mode.PROMPT or (self._mode is _Mode.ANSWER and again):
            self.settle()
            raise KeyboardInterrupt

    def _lose(self, lost: UnraisableHookArgs) -> None:
        if not isinstance(lost.exc_value, KeyboardInterrupt):
            self._hook(lost)
            return
        self._mode = self._raised_in
        threading.Timer(AGAIN, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()


@contextmanager
def heeded() -> Iterator[None]:
    """A line is read by `input()`, and Ctrl-C ends that within HEED seconds.

    `input()` asks for signals when one interrupts its wait for a key. One that comes between the prompt and
    the wait interrupts nothing, and would be seen at the next key only (CPython's Modules/readline.c). A
    timer interrupts the wait soon after.
    """
    before = signal.signal(signal.SIGALRM, lambda _signal, _frame: None)
    signal.setitimer(signal.ITIMER_REAL, HEED, HEED)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _tell() -> None:
    newline = "\n" if os.isatty(2) else ""
    # Not by sys.stderr: the signal may have come in the middle of a buffered write.
    with suppress(OSError):
        os.write(2, f"{newline}mlx-spec: interrupted\n".encode())
