"""The menu's thread and the server process it keeps, with the real server and the demo pair."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.forked import start_servers_as_forks
from support.ports import free_ports
from support.waiting import LIMIT, wait_until

from mlx_spec.apps.menubar import macos, parse, server_process
from mlx_spec.apps.menubar.app import QUIT, App, Folder
from mlx_spec.apps.menubar.menu import Action, Click, Item, Menu, Phase, State
from mlx_spec.apps.menubar.server_process import (
    Address,
    ServerOptions,
    ServerProcess,
    Times,
    all_taken,
    candidates,
    end,
    first_free,
    health,
    is_free,
    last_words,
)
from mlx_spec.apps.server.settings import CANNOT_LISTEN
from mlx_spec.hub.catalog import PairSpec

HOST = "127.0.0.1"
QUICK = Times(
    first_retry=0.1, longest_retry=0.3, stable=600.0, patience=LIMIT, idle_poll=0.02, busy_poll=0.02
)


class Watched:
    """A server process, driven by the test, and the states it reported."""

    def __init__(self, folder: Path, port: int, times: Times = QUICK) -> None:
        self.state, self.states = State(), list[State]()
        wanted = ServerOptions(Address(HOST, port))
        self.server = ServerProcess(wanted, folder / "server.log", self._update, times)

    def _update(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)
        self.states.append(self.state)

    @property
    def pid(self) -> int:
        assert self.server._process is not None
        return self.server._process.pid

    @property
    def retries(self) -> list[float]:
        return [state.retry_s for state in self.states if state.phase is Phase.CRASHED]

    def until(self, holds: Callable[[], bool]) -> None:
        wait_until(lambda: holds() or self.server.tick(), pause=0.05)

    def reach(self, phase: Phase) -> None:
        self.until(lambda: self.state.phase is phase)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    made: list[Watched] = []

    def make(port: int, **times: float) -> Watched:
        made.append(Watched(tmp_path, port, replace(QUICK, **times)))
        return made[-1]

    yield make
    for one in made:
        one.server.stop()


@pytest.fixture
def port() -> int:
    """Return a port with a free one behind it."""
    while True:
        (found,) = free_ports(1)
        if is_free(Address(HOST, found + 1)):
            return found


STAND_IN = """
import http.server, json, os, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"service": "mlx_spec", "status": "ok"}).encode())

try:
    if "/nowhere" in sys.argv:
        sys.exit("mlx-spec: there is no folder /nowhere")
    if os.path.exists("LATE"):  # another program takes the port once
        os.remove("LATE")
        raise OSError
    server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler)
except OSError:
    sys.exit("mlx-spec: CANNOT_LISTEN there")
server.serve_forever()
""".replace("CANNOT_LISTEN", CANNOT_LISTEN)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Processes of this test find a server that loads no model: a real one takes seconds to start.

    Return the file that lets the next one find its port taken.
    """
    package = tmp_path / "stand_in" / "mlx_spec"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(STAND_IN.replace("LATE", str(tmp_path / "late")))
    path = [str(package.parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    return tmp_path / "late"


def ask(port: int) -> None:
    body = {"messages": [{"role": "user", "content": "What does os.path.join do?"}], "max_tokens": 48}
    with closing(http.client.HTTPConnection(HOST, port, timeout=LIMIT)) as connection:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        response.read()


def test_a_port_that_is_taken_for_a_moment_is_tried_again(watched, stand_in):
    stand_in.touch()
    one = watched(0)
    one.server.start(None)
    one.reach(Phase.RUNNING)
    assert one.retries == [0.1] and Phase.FAILED not in {state.phase for state in one.states}
    assert any(CANNOT_LISTEN in (state.problem or "") for state in one.states)


def test_it_runs_shows_figures_and_comes_back_after_a_crash(watched, port, monkeypatch):
    start_servers_as_forks(server_process, monkeypatch)
    one = watched(port)
    one.server.start(PairSpec("demo", "none"))
    one.reach(Phase.RUNNING)
    assert one.state.url == f"http://{HOST}:{port}"
    one.until(lambda: one.state.names == ("demo",))  # another request says so, which may be late
    ask(port)
    one.until(lambda: one.state.figures.tokens_per_second is not None)
    assert one.state.figures.memory_bytes > 0
    assert one.state.figures.off_reason == "switched off"  # the selection has reached it

    os.kill(one.pid, signal.SIGKILL)
    one.reach(Phase.CRASHED)
    assert one.state.problem == "the server was ended by signal 9"
    assert one.state.figures.tokens_per_second is None
    one.reach(Phase.STARTING)
    assert one.retries == [0.1]
    one.server.stop()  # while it starts
    assert one.state.phase is Phase.STOPPED and is_free(Address(HOST, port))
    time.sleep(0.2)
    one.server.tick()
    assert one.state.phase is Phase.STOPPED  # a stopped server is not started again


@pytest.mark.usefixtures("stand_in")
def test_a_port_of_another_program_is_left_to_it(watched, port):
    with socket.create_server((HOST, port)):
        one = watched(port, patience=0.1)
        one.server.start(None)
        assert one.state.url != f"http://{HOST}:{port}" and one.state.is_ours
        one.reach(Phase.RUNNING)


@pytest.mark.usefixtures("stand_in")
def test_a_disk_that_refuses_a_restart_is_tried_again(watched, port, tmp_path):
    one = watched(port)
    one.server.start(PairSpec("demo", "none"))
    one.reach(Phase.RUNNING)
    os.kill(one.pid, signal.SIGKILL)
    one.until(lambda: bool(one.retries))
    (tmp_path / "server.1.log").mkdir()
    one.until(lambda: len(one.retries) >= 3)
    assert "server.log" in one.state.problem and one.state.phase is Phase.CRASHED
    (tmp_path / "server.1.log").rmdir()
    one.reach(Phase.RUNNING)


@pytest.mark.usefixtures("stand_in")
def test_a_server_started_elsewhere_is_watched_and_never_ended(watched, port):
    command = [sys.executable, "-P", "-m", "mlx_spec", "serve", "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: health(Address(HOST, port), LIMIT))
            one = watched(port, silence=0.2)
            one.server.start(PairSpec("demo", "none"))
            one.reach(Phase.RUNNING)
            assert not one.state.is_ours
            process.send_signal(signal.SIGSTOP)
            one.reach(Phase.SILENT)
            process.send_signal(signal.SIGCONT)
            one.reach(Phase.RUNNING)  # it was busy: nothing was given up
            one.server.stop()
            assert process.poll() is None and one.state.phase is Phase.STOPPED
            one.server.start(None)
            one.reach(Phase.RUNNING)
        finally:
            process.kill()
    one.reach(Phase.STOPPED)


@pytest.mark.usefixtures("stand_in")
def test_a_refusal_is_shown_and_not_tried_again(watched, port):
    one = watched(port)
    one.server.start(PairSpec(target="/nowhere"))
    one.reach(Phase.FAILED)
    assert "there is no folder /nowhere" in one.state.problem
    one.server.tick()
    assert one.state.phase is Phase.FAILED and not one.retries


def test_a_port_is_not_free_if_somebody_answers_though_it_can_be_bound(port, monkeypatch):
    """BSD lets 127.0.0.1 be bound beside all addresses; Linux does not, so the bind is left out here."""
    with socket.create_server(("0.0.0.0", port)), monkeypatch.context() as bsd:
        bsd.setattr(socket, "create_server", lambda *_, **__: socket.socket())
        assert not is_free(Address(HOST, port)) and not is_free(Address("0.0.0.0", port))
        assert is_free(Address(HOST, port + 1))


@pytest.mark.usefixtures("stand_in")
def test_a_folder_of_the_same_name_is_not_run(watched, port, tmp_path, monkeypatch):
    """`python -m` would look in the working folder first."""
    (tmp_path / "mlx_spec").mkdir()
    (tmp_path / "mlx_spec" / "__init__.py").write_text("raise SystemExit('mlx-spec: the wrong one')")
    monkeypatch.chdir(tmp_path)
    one = watched(port)
    one.server.start(None)
    one.reach(Phase.RUNNING)


def test_an_address_of_another_machine_is_not_called_taken(port):
    assert is_free(Address("192.0.2.1", port))


def test_no_free_port_is_shown(watched):
    with socket.create_server((HOST, 2**16 - 1)):  # the last port has no other after it
        one = watched(2**16 - 1, patience=0.1)
        one.server.start(None)
    assert one.state.phase is Phase.FAILED and one.state.problem == all_taken(2**16 - 1)
    assert all_taken(8080) == "ports 8080 and those after it are taken: choose another --port"
    assert all_taken(0) == "the free ports found are taken: choose another --port"


def test_a_free_port_that_is_lost_at_once_is_not_the_only_one():
    """A connection of another program may take the first one before it is looked at."""
    first, second, *others = candidates(Address(HOST, 0))
    with socket.create_server((HOST, first.port)):
        assert first_free([first, second, *others]) == second


def test_a_process_that_ignores_the_request_is_killed():
    ignore = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: None)"
    code = f"{ignore}; print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        end(process, shutdown_s=0.3)
        assert process.returncode == -signal.SIGKILL


# --- the thread behind the menu


class Notepad:
    """A view that draws nothing."""

    def __init__(self) -> None:
        self.menus: list[Menu] = []
        self.copied: list[str] = []
        self.closed = threading.Event()

    def show(self, menu: Menu) -> None:
        self.menus.append(menu)

    def copy(self, text: str) -> None:
        self.copied.append(text)

    def close(self) -> None:
        self.closed.set()

    def items(self) -> list[Item]:
        entries = self.menus[-1].entries if self.menus else ()
        inner = [entry for one in entries if isinstance(one, Menu) for entry in one.entries]
        return [one for one in (*entries, *inner) if isinstance(one, Item)]

    def says(self, text: str) -> bool:
        return any(text in item.label for item in self.items())

    def offers(self, action: Action) -> bool:
        return any(item.click is not None and item.click.action is action for item in self.items())


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "menubar")


def command_line(app: App) -> str:
    process = app._server._process
    return "" if process is None or process.poll() is not None else " ".join(process.args)


@pytest.mark.usefixtures("stand_in")
def test_clicks(folder, tmp_path):
    view, agent = Notepad(), tmp_path / macos.AGENT
    app = App(parse(["--port", "0", "--parallel", "2"]), folder, view, agent, QUICK)
    thread = threading.Thread(target=app.run)
    thread.start()
    try:
        wait_until(lambda: view.offers(Action.OPEN_PAGE))
        assert "--parallel 2" in command_line(app) and "--drafter" not in command_line(app)
        url = view.items()[0].label.rsplit(" ", 1)[-1]
        app.post(Click(Action.COPY_URL))
        app.post(Click(Action.COPY_ENVIRONMENT))
        wait_until(lambda: len(view.copied) == 2)
        assert view.copied[0] == f"http://{url}/v1" and view.copied[1].count(view.copied[0]) == 1

        app.post(Click(Action.LOGIN))
        wait_until(lambda: [item.checked for item in view.items() if "login" in item.label] == [True])
        assert agent.exists()
        app.post(Click(Action.LOGIN))
        wait_until(lambda: not agent.exists())

        app.post(Click(Action.DRAFTER, "none"))  # another selection is another server
        wait_until(lambda: "--drafter none" in command_line(app))
        assert json.loads(folder.selection.read_text()) == {"target": "demo", "drafter": "none"}
        app.post(Click(Action.STOP))
        wait_until(lambda: view.says("Stopped"))
        app.post(Click(Action.TARGET, "demo"))  # while it is stopped, it stays so
        wait_until(lambda: json.loads(folder.selection.read_text()) == {"target": "demo", "drafter": "none"})
        assert command_line(app) == "" and view.says("Stopped")
        app.post(Click(Action.START))
        wait_until(lambda: "--target demo --drafter none" in command_line(app))
    finally:
        print([item.label for item in view.items()], last_words(folder.log))  # shown if it fails
        app.post(QUIT)
        thread.join(LIMIT)
    assert not thread.is_alive() and view.closed.is_set() and not app.failed
    assert command_line(app) == ""


@pytest.mark.usefixtures("stand_in")
def test_a_problem_is_shown_and_the_menu_goes_on(folder, tmp_path):
    view, agent = Notepad(), tmp_path / macos.AGENT
    app = App(parse(["--port", "0", "--api-key", "secret"]), folder, view, agent, QUICK)
    folder.selection.mkdir()  # so that no file can take its place
    for message in (Click(Action.LOGIN), Click(Action.DRAFTER, "none"), Click(Action.STOP), QUIT):
        app.post(message)
    app.run()
    assert app._server._selection.drafter == "none"  # the one that is marked was started
    assert any("use --api-key-file" in item.label for menu in view.menus for item in menu.entries if item)
    assert not view.says("use --api-key-file") and not agent.exists() and not app.failed


@pytest.mark.parametrize(
    ("given", "kept", "drafter"),
    [
        ((), '{"target": "demo", "drafter": "lookup"}', "lookup"),
        ((), '{"target": 1, "drafter": "lookup"}', None),
        ((), "", None),
        (("--drafter", "none"), '{"target": "demo", "drafter": "lookup"}', "none"),
        (("--model", "more=demo"), '{"target": "demo", "drafter": "lookup"}', "lookup"),
        (("--model", "more=demo"), "", None),
    ],
)
@pytest.mark.usefixtures("stand_in")
def test_the_last_selection_is_remembered_but_the_command_line_wins(folder, given, kept, drafter):
    folder.selection.write_text(kept)
    view = Notepad()
    app = App(parse(list(given)), folder, view, folder.path / macos.AGENT, QUICK)
    app.post(QUIT)
    app.run()
    drafters = [item for item in view.items() if item.click and item.click.action is Action.DRAFTER]
    assert [item.click.value for item in drafters if item.checked] == [drafter or ""]
