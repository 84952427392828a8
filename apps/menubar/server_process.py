"""Start one server process, watch it over HTTP, start it again after a crash, and end it."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_spec.hub.catalog import PairSpec

from ..server.ports import connect_host, is_answered
from ..server.settings import CANNOT_LISTEN
from .menu import Figures, Phase, State


@dataclass(frozen=True)
class Times:
    """How long the menu waits, in seconds."""

    first_retry: float = 1.0  # before a restart; doubled before each later one
    longest_retry: float = 60.0
    stable: float = 60.0  # a server that was ready this long is stable: its next crash counts as the first
    silence: float = 2.0  # after which a server that does not answer is shown as silent
    patience: float = 10.0  # for a server at the wanted port to answer; else the port is another program's
    idle_poll: float = 2.0  # between two requests to a running server
    busy_poll: float = 0.3  # between two requests to a starting server


@dataclass(frozen=True)
class Address:
    """A host and a port."""

    host: str
    port: int

    @property
    def connect_host(self) -> str:
        return connect_host(self.host)

    @property
    def url(self) -> str:
        host = f"[{self.connect_host}]" if ":" in self.connect_host else self.connect_host
        return f"http://{host}:{self.port}"


def health(address: Address, patience_s: float) -> str | None:
    """Return "ok", "loading", "stuck", "draining" or "failed"; None if no mlx-spec server answers in time."""
    answer = get_json(address, "/health", patience_s=patience_s)
    status = answer.get("status")
    service = "mlx_spec"  # only an mlx-spec server has this name in /health
    return status if answer.get("service") == service and isinstance(status, str) else None


def details(address: Address, key: str | None) -> dict[str, Any]:
    """Return fields of `State`: names of the models and figures, as far as the server answers."""
    changes: dict[str, Any] = {}
    if rows := get_json(address, "/v1/models", key).get("data"):
        models = sorted(rows, key=lambda row: not row["loaded"])
        changes["names"] = tuple(row["id"] for row in models if row["id"] == row["model"])  # without aliases
    if metrics := get_json(address, "/metrics.json", key):
        last, queue = metrics.get("last") or {}, metrics.get("queue") or {}
        changes["figures"] = Figures(
            last.get("tokens_per_second") or None,
            last.get("gain_words"),
            metrics.get("memory_bytes"),
            last.get("reason_words") if last.get("speculation") == "off" else None,
            queue.get("running") or 0,
            queue.get("waiting") or 0,
        )
    return changes


def get_json(
    address: Address, path: str, key: str | None = None, *, patience_s: float = 2.0
) -> dict[str, Any]:
    """Return the JSON object at a path; {} if the server does not answer with one in time."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    host_and_port = address.connect_host, address.port
    try:  # http.client uses no proxy
        with contextlib.closing(http.client.HTTPConnection(*host_and_port, timeout=patience_s)) as connection:
            connection.request("GET", path, headers=headers)
            content = json.loads(connection.getresponse().read(4 * 2**20))
    except (OSError, http.client.HTTPException, ValueError, OverflowError):  # overflow: a port above 65535
        return {}
    return content if isinstance(content, dict) else {}


def is_free(address: Address) -> bool:
    """Return False if another program listens at an address, or if this user may not."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        socket.create_server((address.host, address.port), family=family).close()
    except OSError as error:  # other errors, such as an unknown host, are for the server to report
        return error.errno not in (errno.EADDRINUSE, errno.EACCES)
    return not is_answered(address.host, address.port)


def candidates(address: Address) -> list[Address]:
    """Return addresses to try in order: ten ports from the requested one, or ten free ports for 0."""
    count = 10
    if address.port == 0:  # ten, because another program may take a free port meanwhile
        with contextlib.ExitStack() as probes:
            sockets = [probes.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
            return [Address(address.host, probe.getsockname()[1]) for probe in sockets]
    end = min(address.port + count, 2**16)
    return [Address(address.host, port) for port in range(address.port, end)]


def first_free(addresses: Iterable[Address]) -> Address | None:
    """Return the first address that is free now; None without one."""
    return next(filter(is_free, addresses), None)


def all_taken(port: int) -> str:
    """Return what the user reads if no candidate for a wanted port is free."""
    tried = f"ports {port} and those after it" if port else "the free ports found"
    return f"{tried} are taken: choose another --port"


@dataclass(frozen=True)
class ServerOptions:
    """The server to start."""

    address: Address  # with the first port to try
    key: str | None = None
    options: tuple[str, ...] = ()  # of `mlx-spec serve`, without target, drafter and port


class ServerProcess:
    """Keeps one server running. All methods belong to one thread; `update` receives changes of `State`."""

    def __init__(
        self, wanted: ServerOptions, log: Path, update: Callable[..., None], times: Times | None = None
    ) -> None:
        self._wanted, self._log, self._update = wanted, log, update
        self._times = times or Times()
        self._selection: PairSpec | None = None
        self._process: subprocess.Popen[bytes] | None = None  # None if another program started the server
        self._address: Address | None = None
        self._ready_at: float | None = None  # time of the first "ok"
        self._crashes = 0
        self._retry_at: float | None = None

    def start(self, selection: PairSpec | None) -> None:
        """Watch the mlx-spec server that already runs at the wanted port, or start one."""
        if self._process is not None and self._process.poll() is None:
            return
        self._selection, self._retry_at, self._ready_at = selection, None, None
        wanted = self._wanted.address
        if wanted.port != 0 and health(wanted, self._times.patience) is not None:
            self._watch(wanted, is_ours=False)
            return
        if (address := first_free(candidates(wanted))) is None:
            self._show(Phase.FAILED, problem=all_taken(wanted.port))
        else:
            self._process = launch(self._wanted.options, selection, address.port, self._log)
            self._watch(address, is_ours=True)

    def stop(self) -> None:
        """End the server if this program started it. Returns when it has ended."""
        self._retry_at, self._crashes = None, 0
        if self._process is not None:
            self._update(phase=Phase.STOPPING, problem=None)
            end(self._process)
        self._process = self._address = None
        self._show(Phase.STOPPED)

    def tick(self) -> None:
        """Check the server, and start it again if it crashed. Call this every second or so."""
        if self._retry_at is not None and time.monotonic() >= self._retry_at:
            try:
                self.start(self._selection)
            except OSError as error:  # such as a full disk, which may have room later
                self._retry(f"{error.filename or 'the server'}: {error.strerror or error}")
        elif self._process is not None and self._process.poll() is not None:
            self._ended(self._process)
        elif self._address is not None:
            self._poll(self._address)

    def _watch(self, address: Address, *, is_ours: bool) -> None:
        self._address = address
        self._show(Phase.STARTING, url=address.url, is_ours=is_ours)

    def _retry(self, cause: str) -> None:
        """Start it again, later each time."""
        delay = min(self._times.first_retry * 2**self._crashes, self._times.longest_retry)
        self._crashes += 1
        self._retry_at = time.monotonic() + delay
        self._show(Phase.CRASHED, problem=cause, retry_s=delay)

    def _ended(self, process: subprocess.Popen[bytes]) -> None:
        """Plan a restart after the server ended, or give up if it would be refused again."""
        address, ready_at, status = self._address, self._ready_at, process.returncode
        self._process = self._address = None
        words = last_words(self._log)
        # Another program may have taken the port after `is_free`, and may have left it again.
        no_port = words if words and CANNOT_LISTEN in words else None
        taken = no_port is not None or (address is not None and not is_free(address))
        # With these statuses the server refused to start and said why: a restart would fail again.
        refusals = (1, 2)
        if ready_at is None and status in refusals and not taken:
            problem = words or f"the server ended with status {status}: the log may say why"
            self._show(Phase.FAILED, problem=problem)
            return
        if ready_at is not None and time.monotonic() - ready_at >= self._times.stable:
            self._crashes = 0
        ending = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        self._retry(no_port or f"the server {ending}")

    def _show(self, phase: Phase, **changes: Any) -> None:
        """Report a phase, and forget the figures of an earlier server."""
        fresh = vars(State())
        forgotten = {name: fresh[name] for name in "url is_ours names figures problem retry_s".split()}
        self._update(phase=phase, **forgotten | changes)

    def _poll(self, address: Address) -> None:
        status = health(address, self._times.silence)
        if status is None and self._process is None and is_free(address):
            self._address = None
            self._show(Phase.STOPPED)
        elif status is None:
            if self._ready_at is not None:
                self._update(phase=Phase.SILENT)
        elif status == "ok":
            self._ready_at = self._ready_at or time.monotonic()
            self._update(phase=Phase.RUNNING, **details(address, self._wanted.key))
        elif status == "loading":
            self._update(phase=Phase.LOADING)
        elif status == "draining":  # after "failed" the server ends at once, and its end says more
            self._update(phase=Phase.STOPPING)


def launch(
    options: Sequence[str], selection: PairSpec | None, port: int, log: Path
) -> subprocess.Popen[bytes]:
    """Start `mlx-spec serve` with a new log, in a session that a Ctrl-C for this program does not reach."""
    pair = [] if selection is None else ["--target", selection.target]
    if selection is not None and selection.drafter is not None:
        pair += ["--drafter", selection.drafter]
    if log.exists():  # keep the log of the last start
        log.replace(log.with_suffix(".1.log"))
    with log.open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "mlx_spec", "serve", *options, *pair, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes], shutdown_s: float = 10.0) -> None:
    """Ask a process to end, and kill it if it does not within `shutdown_s`."""
    # A killed process is gone within 5 s.
    for ask, seconds in ((process.terminate, shutdown_s), (process.kill, 5.0)):
        ask()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return


def last_words(log: Path) -> str | None:
    """Return the last line in a server's log that is meant for the user; None without one."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(stream.seek(0, os.SEEK_END) - 4096, 0))  # the end of the log is enough
            lines = stream.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return None
    prefix = "mlx-spec: "  # of lines for the user
    ours = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
    return ours[-1] if ours else None
