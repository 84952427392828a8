"""Start the server as a process, send HTTP requests to it, and draw random requests.

The server benchmarks and the tests of clients and of the page use this.
"""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from support.random_requests import Reply

ROOT = Path(__file__).parents[1]
READY_TIMEOUT_S = 120.0  # for a server to load its model


@dataclass(frozen=True)
class Serving:
    process: subprocess.Popen[str]
    host: str
    port: int
    log: list[str]

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def connect(self, timeout: float = 300) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout)

    def send(self, path: str, body: object = None, *, timeout: float = 300, **headers: str) -> Reply:
        """Send a GET without a body, else a POST of JSON; bytes are sent as they are."""
        connection = self.connect(timeout)
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
        try:
            if body is None:
                connection.request("GET", path, headers=headers)
            else:
                connection.request("POST", path, raw, sent)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(answer.status, answer.read(), found)
        finally:
            connection.close()

    @property
    def resident_bytes(self) -> int:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))

    @property
    def threads(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.process.pid}/task").iterdir())

    def stop(self, with_signal: signal.Signals = signal.SIGTERM) -> int:
        """End the process. Return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(with_signal)
        return self.process.wait(30)


def start(*options: str, port: int = 0, program: Sequence[str] = ("-m", "mlx_spec.serve")) -> Serving:
    """Start a server, on the demo pair if no option says otherwise, and wait until it is ready."""
    command = [sys.executable, *program, "--port", str(port), *options]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    log: list[str] = []
    threading.Thread(target=_drain, args=(process, log), daemon=True).start()
    end = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < end:
        found = next((m for line in list(log) if (m := re.search(r"http://([\w.]+):(\d+)", line))), None)
        if found:
            serving = Serving(process, found[1], int(found[2]), log)
            if _ready(serving):
                return serving
        if process.poll() is not None:
            break
        time.sleep(0.1)
    process.kill()
    raise RuntimeError("the server did not come up:\n" + "".join(log))


@contextmanager
def serving(*options: str) -> Iterator[Serving]:
    """Run a server for as long as the context lasts."""
    started = start(*options)
    try:
        yield started
    finally:
        started.stop()


def _ready(serving: Serving) -> bool:
    try:
        return bool(serving.send("/health", timeout=5).json["status"] == "ok")
    except (OSError, ValueError, http.client.HTTPException):
        return False


def _drain(process: subprocess.Popen[str], log: list[str]) -> None:
    assert process.stdout is not None
    with process.stdout as output:
        log.extend(iter(output.readline, ""))
