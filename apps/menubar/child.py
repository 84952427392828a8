"""A server process: one that was started here, or one that an earlier menu left running.

A menu that is killed cannot end its server, and macOS has no signal for a parent's death. So the server runs
on, answers requests meanwhile, and is adopted by the next menu, which finds it by the file written here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_spec.apps.menubar.client import Address
from mlx_spec.apps.menubar.places import read_object
from mlx_spec.hub.files import write_atomically

MODULE = "mlx_spec"
TICK = 0.02  # seconds between two looks
KILLED = 5.0  # seconds within which a killed process is gone


@dataclass(frozen=True)
class Record:
    """A server as a file remembers it."""

    pid: int
    address: Address
    options: tuple[str, ...]  # as the menu was told them, the port aside

    def keep(self, file: Path) -> None:
        """Write it down."""
        content = {
            "pid": self.pid,
            "host": self.address.host,
            "port": self.address.port,
            "options": self.options,
        }
        write_atomically(file, json.dumps(content))


def recorded(file: Path) -> Record | None:
    """The server of an earlier menu, if it is still alive."""
    match read_object(file):
        case {"pid": int(pid), "host": str(host), "port": int(port), "options": list(options)}:
            record = Record(pid, Address(host, port), tuple(map(str, options)))
            return record if _is_server(record) else None
    return None


def _is_server(record: Record) -> bool:
    """Whether the process is that server: ids are given anew."""
    if record.pid <= 1:
        return False
    asked = subprocess.run(
        ["ps", "-ww", "-o", "command=", "-p", str(record.pid)], capture_output=True, text=True, check=False
    )
    words = asked.stdout.split()
    return "serve" in words and MODULE in words and words[-2:] == ["--port", str(record.address.port)]


class Child:
    """A server process."""

    def __init__(self, record: Record, process: subprocess.Popen[bytes] | None = None) -> None:
        self.record = record
        self._process = process  # None: it is not a child of this process

    @property
    def status(self) -> int | None:
        """Its exit status, below 0 for a signal; None where that cannot be known."""
        return None if self._process is None else self._process.poll()

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None if self._process is not None else _is_server(self.record)

    def end(self, patience: float) -> None:
        """Ask it to end, and after `patience` seconds make it."""
        for way, limit in ((signal.SIGTERM, patience), (signal.SIGKILL, max(patience, KILLED))):
            self._send(way)
            end = time.monotonic() + limit
            while time.monotonic() < end:
                if not self.is_alive():
                    return
                time.sleep(TICK)

    def _send(self, way: signal.Signals) -> None:
        try:
            os.kill(self.record.pid, way)
        except ProcessLookupError:
            return


def start(address: Address, options: Sequence[str], remembered: Sequence[str], log: Path) -> Child:
    """Start a server. What it prints is appended to `log`.

    It has a session of its own, so that a Ctrl-C meant for the menu does not reach it.
    """
    command = [sys.executable, "-m", MODULE, "serve", *options, "--port", str(address.port)]
    with log.open("ab") as stream:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
        )
    return Child(Record(process.pid, address, tuple(remembered)), process)
