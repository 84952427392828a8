"""Run the thread behind the menu: it handles clicks, watches the server, and updates the view."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import traceback
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_spec.checkpoint.files import read_pair, write_atomically
from mlx_spec.errors import InvalidValue, SpecError
from mlx_spec.hub.catalog import DEMO, LOOKUP, NONE, PairSpec

from . import macos
from .menu import Action, Click, Menu, Phase, State, environment_example, menu
from .server_process import ServerOptions, ServerProcess, Times

if TYPE_CHECKING:
    from .cocoa import CocoaView

QUIT = Click(Action.QUIT)


@dataclass(frozen=True)
class MenuPlan:
    """The parsed command line."""

    server: ServerOptions
    selection: PairSpec | None  # None: serve the pair that was selected last
    passed: tuple[str, ...]  # options of the server, for the next login
    installs: bool = False
    removes: bool = False


class Folder:
    """The files of the menu, all in one folder."""

    def __init__(self, path: Path) -> None:
        """Make the folder. Raises InvalidValue if that is impossible."""
        self.path = path
        self.log = path / "logs" / "server.log"
        self.own_log = path / "logs" / "menubar.log"  # of a menu that was started at login
        self.selection = path / "choice.json"  # the pair selected last
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            path.chmod(0o700)
        except OSError as error:
            raise InvalidValue(f"{path} cannot be used: {error.strerror}; make it writable") from error


class App:
    """Owns the state of the menu."""

    def __init__(
        self, plan: MenuPlan, folder: Folder, view: CocoaView, agent: Path, times: Times | None = None
    ) -> None:
        """Take `agent` as the file that starts the menu at login."""
        self._plan, self._folder, self._view, self._agent = plan, folder, view, agent
        self._times = times or Times()
        self._inbox: queue.Queue[Click | dict[str, int]] = queue.Queue()
        self._server = ServerProcess(plan.server, folder.log, self._update, self._times)
        selection = plan.selection
        if selection is None and (last := read_pair(folder.selection)) is not None:
            selection = PairSpec(last[0] or DEMO, last[1])
        self._state = State(selection=selection)
        self._shown: Menu | None = None
        self._listing = threading.Thread(target=self._list_models, name="mlx_spec models", daemon=True)
        self.failed = False

    def post(self, message: Click | dict[str, int]) -> None:
        """Handle a click, or the sizes of the models on this disk; may be called from any thread."""
        self._inbox.put(message)

    def run(self) -> None:
        """Run until a click on Quit. Then end the server and close the view."""
        try:
            self._listing.start()
            self._update(login=self._agent.exists())
            self._attempt(lambda: self._server.start(self._state.selection))
            while self._step():
                pass
            self._server.stop()
        except Exception:  # a menu that no longer reacts would be worse than no menu
            traceback.print_exc()
            self.failed = True
        finally:
            self._view.close()

    def _step(self) -> bool:
        """Handle one message, or check the server after a pause without one. Return False on Quit."""
        busy = self._state.phase in (Phase.STARTING, Phase.LOADING, Phase.CRASHED)
        try:
            message = self._inbox.get(timeout=self._times.busy_poll if busy else self._times.idle_poll)
        except queue.Empty:
            self._attempt(self._server.tick)
            return True
        if not isinstance(message, Click):
            self._update(models=message)
            return True
        if message.action is Action.QUIT:
            return False
        if message.action is Action.OPENED:
            self._list_again()
            return True
        self._update(note=None)
        self._attempt(lambda: self._handle(message))
        self._attempt(self._server.tick)
        return True

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do some work; show a SpecError or OSError in the menu."""
        try:
            work()
        except SpecError as error:
            self._update(note=str(error))
        except OSError as error:  # such as a full disk
            self._update(note=f"{error.filename or 'a file'}: {error.strerror or error}")

    def _update(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)
        if (shown := menu(self._state)) != self._shown:
            self._shown = shown
            self._view.show(shown)

    def _handle(self, click: Click) -> None:
        url = self._state.url
        match click.action:
            case Action.START:
                self._server.start(self._state.selection)
            case Action.STOP:
                self._server.stop()
            case Action.RESTART:
                self._restart()
            case Action.TARGET | Action.DRAFTER:
                self._select(click)
            case Action.LOGIN:
                if self._agent.exists():
                    self._agent.unlink()
                else:
                    macos.write_agent(self._agent, self._plan.passed, self._folder.own_log)
                self._update(login=self._agent.exists())
            case Action.OPEN_LOGS:
                macos.spawn("open", str(self._folder.log.parent))
            case Action.COPY_URL if url is not None:
                self._view.copy(f"{url}/v1")
            case Action.COPY_ENVIRONMENT if url is not None:
                self._view.copy(environment_example(url, key=self._plan.server.key is not None))
            case Action.OPEN_PAGE if url is not None:
                webbrowser.open(url)
            case Action.GET_MODEL if url is not None:
                webbrowser.open(f"{url}/#models")

    def _restart(self) -> None:
        self._server.stop()
        self._server.start(self._state.selection)

    def _select(self, click: Click) -> None:
        """Select another pair. Restart the server with it, unless it is stopped."""
        now = self._state.selection or PairSpec(DEMO)
        if click.action is Action.TARGET:
            keeps = now.drafter in (NONE, LOOKUP)  # other drafters were made for one target
            selection = PairSpec(click.value, now.drafter if keeps else None)
        else:
            selection = PairSpec(now.target, click.value or None)
        if selection == now or not self._state.is_ours:
            return
        self._update(selection=selection)
        names = {"target": selection.target, "drafter": selection.drafter}
        try:
            write_atomically(self._folder.selection, json.dumps(names))
        finally:  # serve the pair that the menu marks, also if the disk is full
            if self._state.phase is not Phase.STOPPED:
                self._restart()

    def _list_again(self) -> None:
        """List the models in the background, unless that goes on already."""
        if not self._listing.is_alive():
            self._listing = threading.Thread(target=self._list_models, name="mlx_spec models", daemon=True)
            self._listing.start()

    def _list_models(self) -> None:
        """List models in a separate process, because reading checkpoints imports much."""
        done = subprocess.run(
            [sys.executable, "-P", "-m", "mlx_spec", "models", "--json"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        self.post(listed_models(done.stdout))


def listed_models(listing: str) -> dict[str, int]:
    """Return target -> bytes from the output of `mlx-spec models --json`; {} if that is not valid."""
    try:
        return {
            row["name"]: row["size"]
            for row in json.loads(listing)
            if row["problem"] is None and row["found"] is not None and not row["found"].get("kind")
        }
    except (ValueError, TypeError, KeyError):
        return {}
