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
from pathlib import Path
from typing import Any

from mlx_spec.errors import InvalidValue, SpecError

SCRIPT = Path(__file__).with_name("compiling.py")
START = 10.0  # seconds in which the process must be there


class Rehearsal:
    """Tries grammars out. The process is started when it is needed and ends with this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def compile(self, name: str, request: dict[str, Any], seconds: float) -> None:
        """Return once the grammar of `request` was compiled elsewhere, or refused there.

        Raises InvalidValue where that took more than `seconds` or ended the process; `name` says what it is.
        """
        with self._lock:
            process = self._process
            if process is None or process.poll() is not None:
                process = self._process = _started()
            started = time.monotonic()
            answered = _ask(process, json.dumps(request), seconds)
            if answered:
                return
            late = time.monotonic() - started >= seconds
            _end(process)
            self._process = None
        reason = f"takes more than {seconds:g} s to compile" if late else "is nested too deeply"
        raise InvalidValue(f"the {name} {reason}: make it simpler")


def _started() -> subprocess.Popen[str]:
    """A process that is ready."""
    command = [sys.executable, "-P", str(SCRIPT)]
    pipe, none = subprocess.PIPE, subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=none, text=True, encoding="utf-8")
    if not _answers(process, START):
        process.kill()
        raise SpecError(f"{sys.executable} does not run {SCRIPT}, which structured output needs")
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    with process:  # closes its pipes
        pass


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
