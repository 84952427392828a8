"""The thread behind the menu: takes clicks and the time, and tells the view what has become of them."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from mlx_spec.apps.menubar import desktop, login
from mlx_spec.apps.menubar.menu import LOOKUP, NONE, environment_example, menu
from mlx_spec.apps.menubar.model import Action, Command, Menu, View
from mlx_spec.apps.menubar.places import Places, read_object, told
from mlx_spec.apps.menubar.state import (
    Choice,
    Chosen,
    Event,
    Found,
    LocalModel,
    LoginSet,
    Noted,
    Phase,
    State,
    reduce,
)
from mlx_spec.apps.menubar.supervisor import Patience, Supervisor, Wish
from mlx_spec.errors import SpecError
from mlx_spec.hub.files import write_atomically

IDLE, BUSY = 2.0, 0.3  # seconds between two looks at a server, and at one that starts
QUIT = Command(Action.QUIT)

Message: TypeAlias = Command | Event


@dataclass(frozen=True)
class Plan:
    """What the command line asked for."""

    wish: Wish
    choice: Choice  # of the command line; what it leaves open is as it was chosen last
    fixed: bool  # the models are named by --model
    passed: tuple[str, ...]  # options of the server, for the next login


class Control:
    """Owns the state."""

    def __init__(
        self, plan: Plan, places: Places, view: View, agent: Path | None, patience: Patience | None = None
    ) -> None:
        """`agent` is where the file for the login goes; None where there is no such thing."""
        self._plan, self._places, self._view, self._agent = plan, places, view, agent
        self._messages: queue.Queue[Message] = queue.Queue()
        self._supervisor = Supervisor(plan.wish, places, self._tell, patience)
        choice = plan.choice if plan.fixed else _remembered(plan.choice, places.choice)
        self._state = State(choice=choice, fixed=plan.fixed)
        self._shown: Menu | None = None
        self.failed = False

    def post(self, message: Message) -> None:
        """From any thread: something was clicked, or something has happened."""
        self._messages.put(message)

    def run(self) -> None:
        """Until a click on Quit. The server has ended then, and the view is closed."""
        try:
            self._begin()
            while self._turn():
                pass
            self._supervisor.stop()
        except Exception:  # a menu that no longer reacts would be worse than none; its server can be adopted
            traceback.print_exc()
            self.failed = True
        finally:
            self._view.close()

    def _begin(self) -> None:
        threading.Thread(target=self._look_for_models, name="mlx_spec models", daemon=True).start()
        if self._agent is not None:
            self._tell(LoginSet(self._agent.exists()))
        self._attempt(lambda: self._supervisor.start(self._state.choice))

    def _turn(self) -> bool:
        """One message, or a look at the server. Returns whether to go on."""
        busy = self._state.phase in (Phase.STARTING, Phase.LOADING, Phase.WAITING)
        try:
            message = self._messages.get(timeout=BUSY if busy else IDLE)
        except queue.Empty:
            self._attempt(self._supervisor.tick)
            return True
        if not isinstance(message, Command):
            self._tell(message)
            return True
        if message.action is Action.QUIT:
            return False
        self._tell(Noted(None))
        self._attempt(lambda: self._do(message))
        self._attempt(self._supervisor.tick)
        return True

    def _attempt(self, work: Callable[[], None]) -> None:
        """What cannot be done is said, and the menu goes on."""
        try:
            work()
        except SpecError as error:
            self._tell(Noted(str(error)))
        except OSError as error:  # such as a full disk
            self._tell(Noted(told(error)))

    def _tell(self, event: Event) -> None:
        self._state = reduce(self._state, event)
        shown = menu(self._state)
        if shown != self._shown:
            self._shown = shown
            self._view.show(shown)

    def _do(self, command: Command) -> None:
        url = self._state.url
        match command.action:
            case Action.START:
                self._supervisor.start(self._state.choice)
            case Action.STOP:
                self._supervisor.stop()
            case Action.RESTART:
                self._restart()
            case Action.TARGET | Action.DRAFTER:
                self._choose(command)
            case Action.LOGIN:
                self._set_login()
            case Action.OPEN_LOGS:
                desktop.open_file(self._places.log.parent)
            case Action.COPY_URL if url is not None:
                self._view.copy(f"{url}/v1")
            case Action.COPY_ENVIRONMENT if url is not None:
                self._view.copy(environment_example(url, key=self._plan.wish.key is not None))
            case Action.OPEN_PAGE if url is not None:
                desktop.open_page(url)

    def _restart(self) -> None:
        self._supervisor.stop()
        self._supervisor.start(self._state.choice)

    def _choose(self, command: Command) -> None:
        """Serve something else: a server that runs is started again, one that does not is left alone."""
        now = self._state.choice
        if command.action is Action.TARGET:
            keeps = now.drafter in (NONE, LOOKUP)  # others were made for one target
            choice = Choice(command.value, now.drafter if keeps else None)
        else:
            choice = Choice(now.target, command.value or None)
        if choice == now or not self._state.own:
            return
        self._tell(Chosen(choice))
        write_atomically(
            self._places.choice, json.dumps({"target": choice.target, "drafter": choice.drafter})
        )
        if self._state.phase is not Phase.STOPPED:
            self._restart()

    def _set_login(self) -> None:
        if self._agent is None:
            return
        if self._agent.exists():
            self._agent.unlink()
        else:
            login.write_agent(self._agent, self._plan.passed, self._places.own_log)
        self._tell(LoginSet(self._agent.exists()))

    def _look_for_models(self) -> None:
        """In a process of its own, for what reads checkpoints needs much that a menu does not."""
        asked = subprocess.run(
            [sys.executable, "-m", "mlx_spec", "models", "--json"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        self.post(Found(local_models(asked.stdout)))


def local_models(listing: str) -> tuple[LocalModel, ...]:
    """The targets in what `mlx-spec models --json` printed; none if it printed something else."""
    try:
        rows = json.loads(listing)
        return tuple(
            LocalModel(row["name"], row["size"])
            for row in rows
            if row["problem"] is None and row["found"] is not None and not row["found"].get("kind")
        )
    except (ValueError, TypeError, KeyError):
        return ()


def _remembered(given: Choice, file: Path) -> Choice:
    """What the command line leaves open is as it was chosen last."""
    if given != Choice():
        return given
    match read_object(file):
        case {"target": str() | None as target, "drafter": str() | None as drafter}:
            return Choice(target, drafter)
    return given
