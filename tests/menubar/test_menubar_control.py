"""Clicks and what becomes of them: the thread behind the menu with the real server."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_spec.apps.menubar import login
from mlx_spec.apps.menubar.arguments import parse
from mlx_spec.apps.menubar.child import recorded
from mlx_spec.apps.menubar.control import QUIT, Control
from mlx_spec.apps.menubar.logs import last_words
from mlx_spec.apps.menubar.model import Action, Command, Entry, Item, Menu, Submenu
from mlx_spec.apps.menubar.places import Places

LIMIT = 60  # seconds until something counts as never to come


class Notepad:
    """A view that draws nothing."""

    def __init__(self) -> None:
        self.menus: list[Menu] = []
        self.copied: list[str] = []
        self.closed = threading.Event()

    def run(self, begun: Callable[[], None], click: Callable[[Command], None]) -> None:
        raise AssertionError("it has no loop")

    def show(self, menu: Menu) -> None:
        self.menus.append(menu)

    def copy(self, text: str) -> None:
        self.copied.append(text)

    def close(self) -> None:
        self.closed.set()

    def items(self) -> list[Item]:
        def within(entries: tuple[Entry, ...]) -> list[Item]:
            found = []
            for entry in entries:
                found += within(entry.entries) if isinstance(entry, Submenu) else [entry]
            return [one for one in found if isinstance(one, Item)]

        return within(self.menus[-1].entries) if self.menus else []

    def labels(self) -> list[str]:
        return [item.label for item in self.items()]

    def says(self, text: str) -> bool:
        return any(text in label for label in self.labels())

    def offers(self, action: Action) -> bool:
        return any(item.command is not None and item.command.action is action for item in self.items())


def eventually(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    found = Places(tmp_path / "menubar")
    found.make()
    return found


def command_line(places: Places) -> str:
    record = recorded(places.server)
    if record is None:
        return ""
    asked = ["ps", "-ww", "-o", "command=", "-p", str(record.pid)]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout


def test_clicks(places, tmp_path):
    view, agent = Notepad(), login.agent_file(tmp_path)
    control = Control(parse(["--port", "0", "--max-running", "2"]).plan, places, view, agent)
    thread = threading.Thread(target=control.run)
    thread.start()
    try:
        eventually(lambda: view.offers(Action.OPEN_PAGE))
        assert "--max-running 2" in command_line(places) and "--drafter" not in command_line(places)
        url = next(item.label for item in view.items()).rsplit(" ", 1)[-1]
        control.post(Command(Action.COPY_URL))
        control.post(Command(Action.COPY_ENVIRONMENT))
        eventually(lambda: len(view.copied) == 2)
        assert view.copied[0] == f"http://{url}/v1" and view.copied[1].count(view.copied[0]) == 1

        control.post(Command(Action.LOGIN))
        eventually(agent.exists)
        eventually(lambda: [item.checked for item in view.items() if "login" in item.label] == [True])
        control.post(Command(Action.LOGIN))
        eventually(lambda: not agent.exists())

        control.post(Command(Action.DRAFTER, "none"))  # another choice is another server
        eventually(lambda: "--drafter none" in command_line(places))
        assert json.loads(places.choice.read_text()) == {"target": None, "drafter": "none"}
        control.post(Command(Action.STOP))
        eventually(lambda: view.says("Stopped"))
        control.post(Command(Action.TARGET, "demo"))  # while it is stopped, it stays so
        eventually(lambda: json.loads(places.choice.read_text()) == {"target": "demo", "drafter": "none"})
        assert command_line(places) == "" and view.says("Stopped")
        control.post(Command(Action.START))
        eventually(lambda: "--target demo --drafter none" in command_line(places))
    finally:
        print(view.labels(), last_words(places.log, 0))  # shown if it fails
        control.post(QUIT)
        thread.join(LIMIT)
    assert not thread.is_alive() and view.closed.is_set() and not control.failed
    assert command_line(places) == ""


def test_what_cannot_be_done_is_said_and_the_menu_goes_on(places, tmp_path):
    view, agent = Notepad(), login.agent_file(tmp_path)
    plan = parse(["--target", "/nowhere/at/all", "--api-key", "secret"]).plan
    control = Control(plan, places, view, agent)
    thread = threading.Thread(target=control.run)
    thread.start()
    try:
        eventually(lambda: view.says("Could not start"))
        control.post(Command(Action.LOGIN))
        eventually(lambda: view.says("use --api-key-file"))
        control.post(Command(Action.COPY_URL))  # there is none
        eventually(lambda: not view.says("use --api-key-file"))
        assert not agent.exists() and view.copied == []
    finally:
        control.post(QUIT)
        thread.join(LIMIT)
    assert not control.failed


@pytest.mark.parametrize(
    ("given", "kept", "drafter"),
    [
        ((), '{"target": "demo", "drafter": "lookup"}', "lookup"),
        ((), '{"target": 1, "drafter": "lookup"}', None),
        ((), "", None),
        (("--drafter", "none"), '{"target": "demo", "drafter": "lookup"}', "none"),
    ],
)
def test_the_last_choice_is_remembered_but_the_command_line_wins(places, given, kept, drafter):
    places.choice.write_text(kept)
    view = Notepad()
    control = Control(parse(list(given)).plan, places, view, None)
    control.post(QUIT)
    control.run()
    marked = [
        item.command.value for item in view.items() if item.checked and item.command.action is Action.DRAFTER
    ]
    assert marked == [drafter or ""]
