"""What is typed while an answer streams: not shown within it, and kept for the next prompt."""

from __future__ import annotations

import os
import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

DEADLY = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
LOCAL, CHARACTERS = 3, 6  # places in what tcgetattr returns


@contextmanager
def unseen() -> Iterator[None]:
    """Keys are not echoed and wait for whoever reads next; those of signals, such as Ctrl-C, work as ever.

    The terminal is as before afterwards, also where a signal ends the program.
    """
    terminal = _terminal()
    if terminal is None:
        yield
        return
    before = termios.tcgetattr(terminal)

    def restore() -> None:
        with suppress(termios.error):  # it may be gone
            termios.tcsetattr(terminal, termios.TCSANOW, before)

    def end(number: int, _frame: FrameType | None) -> None:
        restore()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    unhandled = [number for number in DEADLY if signal.getsignal(number) is signal.SIG_DFL]
    for number in unhandled:
        signal.signal(number, end)
    try:
        termios.tcsetattr(terminal, termios.TCSANOW, _without_echo(before))
        yield
    finally:
        restore()
        for number in unhandled:
            signal.signal(number, signal.SIG_DFL)


def _without_echo(found: list[int | list[bytes | int]]) -> list[int | list[bytes | int]]:
    """Keys are handed on one by one: lines would be cut where the kernel has no room for more."""
    local, characters = found[LOCAL], found[CHARACTERS]
    assert isinstance(local, int) and isinstance(characters, list)
    changed = [*characters]
    changed[termios.VMIN], changed[termios.VTIME] = 1, 0
    new = [*found]
    new[LOCAL], new[CHARACTERS] = local & ~(termios.ECHO | termios.ICANON), changed
    return new


def _terminal() -> int | None:
    """The one on stdin, if this program is in its foreground: one in the background would be stopped."""
    if sys.stdin is None or not sys.stdin.isatty():
        return None
    number = sys.stdin.fileno()
    try:
        return number if os.tcgetpgrp(number) == os.getpgrp() else None
    except OSError:  # it is not the terminal of this session
        return None
