"""Grammars are compiled in a process of its own first: one that never ends or ends the process does it there.

llguidance bounds most of what a grammar can cost, but not all: the intersection of patterns can take forever,
and a chain of thousands of rules overflows the stack.
"""

from __future__ import annotations

import atexit
import json
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlx_spec.errors import InvalidValue, SpecError

SCRIPT = Path(__file__).with_name("compiling.py")
START = 30.0  # seconds in which the process must be there
SOON = 0.05  # seconds between two attempts to end it


class Rehearsal:
    """Tries grammars out. The process is started when it is needed and ends with this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._closing = False
        atexit.register(self.close)

    def compile(self, name: str, request: dict[str, Any], seconds: float) -> None:
        """Return once the grammar of `request` was compiled elsewhere, or refused there.

        Raises InvalidValue where that took more than `seconds` or ended the process; `name` says what it is.
        """
        with self._lock:
            if self._closing:
                raise SpecError(f"the {name} was not compiled: this process ends")
            process = self._ready()
            started = time.monotonic()
            answered = _ask(process, json.dumps(request), seconds)
            if answered:
                return
            late = time.monotonic() - started >= seconds
            self._end()
        reason = f"takes more than {seconds:g} s to compile" if late else "is nested too deeply"
        raise InvalidValue(f"the {name} {reason}: make it simpler")

    def close(self) -> None:
        """End the process; what it was compiling is refused. It is started again when it is needed."""
        self._closing = True
        while not self._lock.acquire(timeout=SOON):
            process = self._process
            if process is not None:
                process.kill()  # whoever waits for it lets go of the lock
        try:
            self._end()
            self._closing = False
        finally:
            self._lock.release()

    def _ready(self) -> subprocess.Popen[str]:
        """The process, started anew if it has ended."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        self._process = _started()
        if not _answers(self._process, START):
            self._end()
            raise SpecError(f"{sys.executable} does not run {SCRIPT}, which structured output needs")
        return self._process

    def _end(self) -> None:
        """End the process and close its pipes."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        with suppress(OSError), process:  # closes its pipes, in which a request may be left
            pass


REHEARSAL = Rehearsal()  # the one of this process


def _started() -> subprocess.Popen[str]:
    """A process that says so when it is ready."""
    command = [sys.executable, "-P", str(SCRIPT)]
    pipe, none = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=none, text=True, encoding="utf-8")


def _ask(process: subprocess.Popen[str], line: str, seconds: float) -> bool:
    """Whether there was an answer in time."""
    assert process.stdin is not None
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return False
    return _answers(process, seconds)


def _answers(process: subprocess.Popen[str], seconds: float) -> bool:
    """Whether there is a line within so many seconds."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    return bool(ready) and process.stdout.readline() != ""
