"""A server from its first line to its exit status."""

from __future__ import annotations

import os
import socket
import sys
import threading
from types import FrameType

import uvicorn

from mlx_spec.apps.server import log
from mlx_spec.apps.server.app import create
from mlx_spec.apps.server.settings import CANNOT_LISTEN, Settings
from mlx_spec.apps.server.worker import Worker
from mlx_spec.errors import InvalidValue

BACKLOG = 128  # connections that wait to be accepted
PATIENCE = 2  # seconds for responses to end once their requests have


def run(settings: Settings) -> int:
    """Serve until a signal ends it. Returns the exit status: 0, or 1 if the first model cannot be loaded.

    Raises InvalidValue where the address or the log file cannot be used.
    """
    listening = _bind(settings.host, settings.port)
    log.configure(settings.log_file)
    worker = Worker(settings)
    server = _Server(settings, worker)
    names = ", ".join(model.name for model in settings.models)
    print(f"mlx-spec: {names} at {_url(settings.host, listening)}/v1 (Ctrl-C stops the server)", flush=True)
    watching = threading.Thread(target=server.watch, name="mlx_spec watching", daemon=True)
    watching.start()
    server.run([listening])
    status = 1 if server.problem else 0
    if worker.status().state != "closed":  # it loads: a thread inside MLX must not see the interpreter end
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    worker.close()
    return status


class _Server(uvicorn.Server):
    """Ends requests before connections: on a signal, streams get an error, then their end."""

    def __init__(self, settings: Settings, worker: Worker) -> None:
        super().__init__(
            uvicorn.Config(
                create(settings, worker),
                http="h11",
                ws="none",
                loop="asyncio",
                lifespan="on",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=PATIENCE,
            )
        )
        self._worker = worker
        self._in_log_file = settings.log_file is not None
        self.problem: str | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On a signal, which uvicorn is not told of: it would raise it again at the end."""
        self.force_exit = self.should_exit
        self.should_exit = True
        # not here: the thread that the signal came to may hold the worker's lock
        threading.Thread(target=self._worker.close, name="mlx_spec closing", daemon=True).start()

    def watch(self) -> None:
        """Wait for the first model; without it there is nothing to serve."""
        if self._worker.begun():
            return
        self.problem = self._worker.status().problem
        if self.problem and self._in_log_file:  # else the log has said so on stderr
            print(f"mlx-spec: {self.problem}", file=sys.stderr)
        self.should_exit = True


def _bind(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises InvalidValue."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, socket.SOCK_STREAM)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(BACKLOG)
        except BaseException:
            found.close()
            raise
    except OSError as error:
        problem = (error.strerror or str(error)).lower()
        raise InvalidValue(
            f"{CANNOT_LISTEN} {host}, port {port}: {problem}; choose another --port"
        ) from error
    return found


def _url(host: str, listening: socket.socket) -> str:
    port = listening.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
