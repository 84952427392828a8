"""The supervisor with the real server and the demo pair."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from free_port import HOST, free_port

from mlx_spec.apps.menubar import child as children
from mlx_spec.apps.menubar import ports
from mlx_spec.apps.menubar.child import Child, Record, recorded
from mlx_spec.apps.menubar.client import Address, Client
from mlx_spec.apps.menubar.places import Places
from mlx_spec.apps.menubar.ports import Holder, holder
from mlx_spec.apps.menubar.state import (
    Choice,
    Crashed,
    Event,
    GaveUp,
    Launched,
    Leaving,
    Measured,
    Phase,
    State,
    reduce,
)
from mlx_spec.apps.menubar.supervisor import Patience, Supervisor, Wish

ROOT = Path(__file__).parents[2]
LIMIT = 60  # seconds until something counts as never to come
QUICK = Patience(first=0.1, most=0.3, stable=600.0, leaving=20.0)


class Kept:
    """A supervisor, driven by the test, and what it told."""

    def __init__(self, places: Places, port: int, patience: Patience = QUICK, *options: str) -> None:
        self.events: list[Event] = []
        self.state = State()
        self.supervisor = Supervisor(Wish(Address(HOST, port), None, options), places, self._told, patience)

    def _told(self, event: Event) -> None:
        self.events.append(event)
        self.state = reduce(self.state, event)

    def until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT
        while not holds():
            assert time.monotonic() < end, self.state
            time.sleep(0.05)
            self.supervisor.tick()

    def reach(self, phase: Phase) -> None:
        self.until(lambda: self.state.phase is phase)

    def told(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def places(tmp_path: Path) -> Places:
    found = Places(tmp_path / "menubar")
    found.make()
    return found


@pytest.fixture
def kept(places: Places) -> Iterator[Callable[..., Kept]]:
    made: list[Kept] = []

    def make(port: int, patience: Patience = QUICK, *options: str) -> Kept:
        made.append(Kept(places, port, patience, *options))
        return made[-1]

    yield make
    for one in made:
        one.supervisor.stop()
    assert recorded(places.server) is None


@pytest.fixture
def port() -> int:
    return free_port()


def pid_of(places: Places) -> int:
    record = recorded(places.server)
    assert record is not None
    return record.pid


def is_running(pid: int) -> bool:
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return found.stdout.strip()[:1] not in ("", "Z")  # a zombie has ended; nobody may have asked how


def ask(port: int) -> None:
    body = {"messages": [{"role": "user", "content": "What does zip do?"}], "max_tokens": 32}
    with closing(http.client.HTTPConnection(HOST, port, timeout=LIMIT)) as connection:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"}
        )
        response = connection.getresponse()
        assert response.status == 200, response.read()
        response.read()


def test_runs_measures_and_comes_back_after_a_crash(places, kept, port):
    one = kept(port)
    one.supervisor.start(Choice())
    one.reach(Phase.RUNNING)
    assert one.state.url == f"http://{HOST}:{port}" and one.state.names == ("demo",)
    ask(port)
    one.until(lambda: one.state.figures.speed is not None)
    assert one.state.figures.speed > 0 and one.state.figures.memory > 0 and one.state.figures.reason
    first = pid_of(places)

    os.kill(first, signal.SIGKILL)
    one.reach(Phase.WAITING)
    assert one.state.problem == "the server was ended by signal 9" and one.state.figures.speed is None
    one.reach(Phase.RUNNING)
    assert pid_of(places) != first

    os.kill(pid_of(places), signal.SIGKILL)
    one.reach(Phase.STARTING)
    assert [event.retry for event in one.told(Crashed)] == [0.1, 0.2]
    one.supervisor.stop()  # while it starts
    assert one.state.phase is Phase.STOPPED and holder(Address(HOST, port)) is Holder.NOBODY
    time.sleep(0.5)
    one.supervisor.tick()
    assert one.state.phase is Phase.STOPPED  # what was stopped is not started again


def test_restarts_take_longer_and_longer(places, kept, port, monkeypatch):
    def stillborn(address: Address, options: object, remembered: object, log: Path) -> Child:
        code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
        process = subprocess.Popen([sys.executable, "-S", "-c", code])
        return Child(Record(process.pid, address, ()), process)

    monkeypatch.setattr(children, "start", stillborn)
    one = kept(port)
    one.supervisor.start(Choice())
    one.until(lambda: len(one.told(Crashed)) == 4)
    assert [event.retry for event in one.told(Crashed)] == [0.1, 0.2, 0.3, 0.3]


def test_a_strangers_port_is_left_to_it(places, kept, port):
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind((HOST, port))
        stranger.listen(1)
        stranger.settimeout(0)
        one = kept(port)
        one.supervisor.start(Choice(drafter="none"))
        (launched,) = one.told(Launched)
        assert launched.url != f"http://{HOST}:{port}" and launched.own
        one.reach(Phase.RUNNING)
        ask(recorded(places.server).address.port)
        one.until(lambda: one.state.figures.reason is not None)
        assert one.state.figures.reason == "disabled by user"  # the choice has come to it


def test_a_port_that_was_taken_only_for_a_moment_is_not_given_up(places, kept, port, monkeypatch):
    addresses = [Address(HOST, port), Address(HOST, free_port())]
    monkeypatch.setattr(ports, "candidates", lambda wanted: [addresses.pop(0)])
    monkeypatch.setattr(ports, "is_free", lambda address: True)  # before, and again behind the crash
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind((HOST, port))
        stranger.listen(1)
        one = kept(0)
        one.supervisor.start(Choice(drafter="none"))
        one.reach(Phase.RUNNING)
    assert one.told(Crashed) and not one.told(GaveUp)


def test_of_any_port_several_are_tried(places, kept, monkeypatch):
    found = ports.candidates(Address(HOST, 0))
    assert len({address.port for address in found}) == len(found) == ports.TRIED
    monkeypatch.setattr(ports, "candidates", lambda wanted: found)
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind((HOST, found[0].port))
        stranger.listen(1)
        one = kept(0)
        one.supervisor.start(Choice())
        (launched,) = one.told(Launched)
    assert launched.url == found[1].url and not one.told(GaveUp)


def test_free_ports_that_a_forked_process_holds_for_a_moment_are_not_taken(places, kept, monkeypatch):
    """Between fork and exec a child of any thread has our open sockets, those that seek free ports, too."""
    with ExitStack() as held:

        def candidates(wanted: Address) -> list[Address]:
            copies = [held.enter_context(socket.socket()) for _ in range(3)]
            for copy in copies:
                copy.bind((HOST, 0))
            return [Address(HOST, copy.getsockname()[1]) for copy in copies]

        monkeypatch.setattr(ports, "candidates", candidates)
        one = kept(0)
        one.supervisor.start(Choice(drafter="none"))
    assert one.told(Launched) and not one.told(GaveUp)
    one.reach(Phase.RUNNING)


@pytest.mark.parametrize("refused_file", [lambda places: places.log, lambda places: places.server])
def test_a_disk_that_refuses_a_restart_is_asked_again(places, kept, port, refused_file):
    one = kept(port)
    one.supervisor.start(Choice(drafter="none"))
    one.reach(Phase.RUNNING)
    os.kill(recorded(places.server).pid, signal.SIGKILL)
    one.until(lambda: one.told(Crashed))
    file = refused_file(places)
    file.unlink(missing_ok=True)
    file.mkdir()
    one.until(lambda: len(one.told(Crashed)) >= 3)
    killed, *refused = one.told(Crashed)
    assert "signal 9" in killed.problem
    assert all(file.name in event.problem for event in refused)
    assert ports.is_free(Address(HOST, port)) and one.state.phase is Phase.WAITING
    file.rmdir()
    one.reach(Phase.RUNNING)


UI = """
import sys, time
from pathlib import Path
from mlx_spec.apps.menubar.client import Address
from mlx_spec.apps.menubar.places import Places
from mlx_spec.apps.menubar.state import Choice
from mlx_spec.apps.menubar.supervisor import Supervisor, Wish
wish = Wish(Address("127.0.0.1", int(sys.argv[2])))
supervisor = Supervisor(wish, Places(Path(sys.argv[1])), lambda event: None)
supervisor.start(Choice())
print("started", flush=True)
while True:
    time.sleep(0.1)
    supervisor.tick()
"""


def test_a_killed_menu_leaves_a_server_that_the_next_one_adopts_and_ends(places, kept, port):
    killed = subprocess.Popen(
        [sys.executable, "-c", UI, str(places.folder), str(port)], cwd=ROOT, stdout=subprocess.PIPE
    )
    with killed:
        assert killed.stdout is not None and killed.stdout.readline() == b"started\n"
        server = pid_of(places)
        client = Client(Address(HOST, port))
        end = time.monotonic() + LIMIT
        while client.health() != "ok":
            assert time.monotonic() < end
            time.sleep(0.05)
        killed.send_signal(signal.SIGKILL)
    assert is_running(server) and client.health() == "ok"

    one = kept(port)
    one.supervisor.start(Choice())
    assert pid_of(places) == server and one.told(Launched) == [Launched(f"http://{HOST}:{port}", own=True)]
    one.reach(Phase.RUNNING)
    one.supervisor.stop()
    assert client.health() is None
    end = time.monotonic() + LIMIT
    while is_running(server):  # its memory is given back first
        assert time.monotonic() < end
        time.sleep(0.05)
    assert not places.server.exists() and one.told(Leaving)


def test_an_adopted_server_that_dies_is_started_again(places, kept, port):
    orphan = subprocess.Popen(command_of(port), cwd=ROOT, stdout=subprocess.DEVNULL)
    with orphan:
        Record(orphan.pid, Address(HOST, port), ()).keep(places.server)
        one = kept(port)
        one.supervisor.start(Choice())
        orphan.kill()
        orphan.wait(LIMIT)
        one.reach(Phase.WAITING)
        assert one.state.problem == "the server ended by itself"
    one.reach(Phase.STARTING)
    assert pid_of(places) != orphan.pid


def test_a_left_server_with_other_options_is_replaced(places, kept, port):
    orphan = subprocess.Popen(command_of(port), cwd=ROOT, stdout=subprocess.DEVNULL)
    with orphan:
        Record(orphan.pid, Address(HOST, port), ("--drafter", "none")).keep(places.server)
        one = kept(port)
        one.supervisor.start(Choice())
        orphan.wait(LIMIT)
        assert pid_of(places) != orphan.pid
        assert one.told(Launched) == [Launched(f"http://{HOST}:{port}", own=True)]


def test_somebody_elses_server_is_watched_and_never_ended(places, kept, port):
    other = subprocess.Popen(command_of(port), cwd=ROOT, stdout=subprocess.DEVNULL)
    with other:
        client = Client(Address(HOST, port))
        end = time.monotonic() + LIMIT
        while client.health() != "ok":  # one that is loading may answer too late
            assert time.monotonic() < end
            time.sleep(0.05)
        one = kept(port)
        one.supervisor.start(Choice(drafter="none"))
        assert one.told(Launched) == [Launched(f"http://{HOST}:{port}", own=False)]
        one.reach(Phase.RUNNING)
        one.until(lambda: bool(one.told(Measured)))
        one.supervisor.stop()
        assert other.poll() is None and client.health() == "ok"
        one.supervisor.start(Choice())
        other.terminate()
        other.wait(LIMIT)
        one.reach(Phase.STOPPED)
        assert not one.told(Crashed)


def test_what_the_server_refuses_is_said_and_not_tried_again(places, kept, port):
    one = kept(port)
    one.supervisor.start(Choice(target="/nowhere/at/all"))
    one.reach(Phase.FAILED)
    (gave_up,) = one.told(GaveUp)
    assert "/nowhere/at/all" in gave_up.problem
    one.supervisor.tick()
    assert one.state.phase is Phase.FAILED and not one.told(Crashed) and not places.server.exists()


def command_of(port: int) -> list[str]:
    return [sys.executable, "-m", "mlx_spec", "serve", "--port", str(port)]


def test_no_port_is_said(kept, port, monkeypatch):
    monkeypatch.setattr("mlx_spec.apps.menubar.ports.is_free", lambda address: False)
    one = kept(port)
    one.supervisor.start(Choice())
    (gave_up,) = one.told(GaveUp)
    assert str(port) in gave_up.problem and "--port" in gave_up.problem


STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, lambda *_: None); print(flush=True); time.sleep(60)"
)


def test_one_that_does_not_leave_is_made_to():
    with subprocess.Popen([sys.executable, "-S", "-c", STUBBORN], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        child = Child(Record(process.pid, Address(HOST, 1), ()), process)
        began = time.monotonic()
        child.end(0.3)
        assert child.status == -signal.SIGKILL and time.monotonic() - began >= 0.3


@pytest.mark.parametrize("content", ["", "[]", '{"pid": 1, "host": "127.0.0.1", "port": 1, "options": []}'])
def test_no_process_is_taken_for_a_server_that_is_none(places, content):
    places.server.write_text(content)
    assert recorded(places.server) is None


def test_a_process_id_that_was_given_anew_is_not_adopted(places):
    Record(os.getpid(), Address(HOST, 8080), ()).keep(places.server)
    assert recorded(places.server) is None


def test_a_server_that_is_not_ours_is_a_stranger(tmp_path):
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", HOST, "--directory", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().split()[5])
        try:
            assert holder(Address(HOST, port)) is Holder.STRANGER
            assert Client(Address(HOST, port)).counters() is None
        finally:
            process.terminate()
