"""Keeps one server running: starts or adopts it, looks after it, starts it again after a crash, ends it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date

from mlx_spec.apps.menubar import child, logs, ports
from mlx_spec.apps.menubar.child import Child
from mlx_spec.apps.menubar.client import Address, Client
from mlx_spec.apps.menubar.figures import NO_COUNTERS, Watch
from mlx_spec.apps.menubar.places import Places, told
from mlx_spec.apps.menubar.savings import Savings
from mlx_spec.apps.menubar.state import (
    Answered,
    Choice,
    Crashed,
    Ended,
    Event,
    GaveUp,
    Launched,
    Leaving,
    Measured,
    Named,
    Unanswered,
)
from mlx_spec.apps.server.settings import CANNOT_LISTEN

REFUSALS = (1, 2)  # exit statuses of a server that says what is wrong


@dataclass(frozen=True)
class Patience:
    """Seconds."""

    first: float = 1.0  # before the first restart; twice as long before each that follows
    most: float = 60.0
    stable: float = 60.0  # of answering after which a crash counts as the first
    leaving: float = 10.0  # for requests to end


@dataclass(frozen=True)
class Wish:
    """The server that is wanted."""

    address: Address  # its port, or one of those behind it
    key: str | None = None
    options: tuple[str, ...] = ()  # of `mlx-spec serve`, without target, drafter and port

    def line(self, choice: Choice) -> tuple[str, ...]:
        """The options with those of a choice."""
        target = () if choice.target is None else ("--target", choice.target)
        drafter = () if choice.drafter is None else ("--drafter", choice.drafter)
        return (*self.options, *target, *drafter)

    def allows(self, address: Address) -> bool:
        """Whether it may listen there."""
        first = self.address.port
        here = first == 0 or first <= address.port < first + ports.TRIED
        return here and address.host == self.address.host


class Supervisor:
    """Of one server. All methods belong to one thread; what happens is told to `tell`."""

    def __init__(
        self, wish: Wish, places: Places, tell: Callable[[Event], None], patience: Patience | None = None
    ) -> None:
        self._wish, self._places, self._tell = wish, places, tell
        self._patience = patience or Patience()
        self._savings = Savings(places.savings)
        self._choice = Choice()
        self._child: Child | None = None  # None: nothing runs, or what runs is somebody else's
        self._address: Address | None = None
        self._watch = Watch(None)
        self._answered_at: float | None = None  # first "ok"
        self._crashes = 0
        self._due: float | None = None  # when to start it again
        self._log_begin = 0  # bytes

    def start(self, choice: Choice) -> None:
        """Have a server run: the one that an earlier menu left, one that is at its port, or a new one."""
        if self._child is not None and self._child.is_alive():
            return
        self._choice, self._due, self._answered_at = choice, None, None
        if self._adopt() or self._join():
            return
        port, addresses = self._wish.address.port, ports.candidates(self._wish.address)
        # Of port 0 all may seem taken: a program that is started meanwhile holds them too, for a moment.
        address = next(filter(ports.is_free, addresses), addresses[0] if port == 0 else None)
        if address is None:
            self._tell(GaveUp(f"ports {port} and those behind it are taken: choose another --port"))
        else:
            self._launch(address)

    def stop(self) -> None:
        """Have none run, but for somebody else's. Returns when it has ended."""
        self._due, self._crashes = None, 0
        if self._child is not None:
            self._tell(Leaving())
            self._end(self._child)
        self._child = self._address = None
        self._tell(Ended())

    def tick(self) -> None:
        """Look after it: to be called every second or so."""
        if self._due is not None and time.monotonic() >= self._due:
            self._start_again()
        elif self._child is not None and not self._child.is_alive():
            self._ended(self._child)
        elif self._address is not None:
            logs.rotate(self._places.log)
            self._ask(self._address)

    def _start_again(self) -> None:
        try:
            self.start(self._choice)
        except OSError as error:  # such as a full disk, which may have room later
            self._wait(told(error))

    def _wait(self, cause: str) -> None:
        """Start it again, later each time."""
        delay = min(self._patience.first * 2**self._crashes, self._patience.most)
        self._crashes += 1
        self._due = time.monotonic() + delay
        self._tell(Crashed(cause, delay))

    def _adopt(self) -> bool:
        """Whether an earlier menu left the server that is wanted; another one is ended."""
        record = child.recorded(self._places.server)
        if record is None:
            return False
        found = Child(record)
        if record.options != self._wish.line(self._choice) or not self._wish.allows(record.address):
            self._end(found)
            return False
        self._child = found
        self._follow(record.address, own=True)
        return True

    def _join(self) -> bool:
        """Whether somebody else runs a server of ours at the wanted port."""
        address = self._wish.address
        if address.port == 0 or ports.holder(address) is not ports.Holder.OURS:
            return False
        self._follow(address, own=False)
        return True

    def _launch(self, address: Address) -> None:
        options = self._wish.line(self._choice)
        logs.rotate(self._places.log)
        self._log_begin = logs.size(self._places.log)
        started = child.start(address, options, options, self._places.log)
        try:
            started.record.keep(self._places.server)
        except OSError:  # one that no later menu would find must not be left running
            started.end(self._patience.leaving)
            raise
        self._child = started
        self._follow(address, own=True)
        self._watch = Watch(NO_COUNTERS)

    def _follow(self, address: Address, *, own: bool) -> None:
        self._address, self._watch = address, Watch(None)
        self._tell(Launched(address.url, own))

    def _end(self, running: Child) -> None:
        running.end(self._patience.leaving)
        self._forget()

    def _forget(self) -> None:
        """Remove the record of a server. One that stays names a process that is gone: it does no harm."""
        with contextlib.suppress(OSError):
            self._places.server.unlink()

    def _ended(self, gone: Child) -> None:
        """It has ended by itself."""
        ready_at, status = self._answered_at, gone.status
        self._child = self._address = None
        self._forget()
        words = logs.last_words(self._places.log, self._log_begin)
        # Since it was found free, somebody may have taken the port, and may have left it again.
        refused = words if words and CANNOT_LISTEN in words else None
        taken = bool(refused) or not ports.is_free(gone.record.address)
        if ready_at is None and status in REFUSALS and not taken:
            self._tell(GaveUp(words or f"the server ended with status {status}: the log may say why"))
            return
        if ready_at is not None and time.monotonic() - ready_at >= self._patience.stable:
            self._crashes = 0
        self._wait(refused or _cause(status))

    def _ask(self, address: Address) -> None:
        client = Client(address, self._wish.key)
        status = client.health()
        if status is None:
            self._tell(Unanswered() if self._child is not None else Ended())
            if self._child is None:
                self._address = None
            return
        self._tell(Answered(status))
        if status != "ok":
            return
        self._answered_at = self._answered_at or time.monotonic()
        names, counters = client.names(), client.counters()
        if names is not None:
            self._tell(Named(names))
        if counters is not None:
            today = date.today()
            self._savings.add(today, self._watch.see(counters))
            self._tell(Measured(self._watch.figures, self._savings.of(today)))


def _cause(status: int | None) -> str:
    if status is None:
        return "the server ended by itself"
    if status < 0:
        return f"the server was ended by signal {-status}"
    return f"the server ended with status {status}"
