"""The real menu on a real, if invisible, desktop: it is shown, and clicks start and stop the real server."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from free_port import HOST, free_port

from mlx_spec.apps.menubar.server_process import Address, StatusClient, is_free

Image = pytest.importorskip("PIL.Image")

ROOT = Path(__file__).parents[2]
TOOLS = "Xvfb openbox trayer xdotool import convert dbus-run-session".split()
DEBIAN = Path("/usr/lib/python3/dist-packages")  # where apt puts what a virtual environment does not see
BORROWED = ("gi", "pystray", "six.py", "Xlib")
LIMIT = 60  # seconds
WIDTH, HEIGHT, ICON = 560, 390, 28  # pixels
RIGHT = 3  # mouse button
START, STOP, DRAFT, QUIT = -10, -9, -6, -1  # lines of the menu from its end
TRAY = ["trayer", "--edge", "top", "--align", "right", "--widthtype", "request", "--height", str(ICON)]
SILENT: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def borrowed(folder: Path) -> Path:
    """A folder with the system's modules that are missing here, and with nothing else of the system's."""
    for name in BORROWED:
        if importlib.util.find_spec(name.removesuffix(".py")) is None:
            (folder / name).symlink_to(DEBIAN / name)
    return folder


def problem(folder: Path) -> str | None:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    code = "import gi, PIL; gi.require_version('Gtk', '3.0'); from gi.repository import Gtk"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    has_pystray = any((place / "pystray").is_dir() for place in (DEBIAN, folder))
    if done.returncode == 0 and has_pystray:
        return None
    return f"no pystray with GTK 3 for this Python: {done.stderr.strip().splitlines()[-1:]}"


@dataclass(frozen=True)
class Window:
    """A window of the menu's process, in pixels."""

    x: int
    y: int
    width: int
    height: int


class Desktop:
    """A screen with a tray, and a mouse on it."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        reading, writing = os.pipe()
        stack.callback(os.close, reading)
        screen = f"{WIDTH}x{HEIGHT}x24"
        server = ["Xvfb", "-displayfd", str(writing), "-screen", "0", screen, "-nolisten", "tcp"]
        ended_with(stack, subprocess.Popen(server, pass_fds=[writing], **SILENT))
        os.close(writing)
        display = os.read(reading, 16).decode().strip()
        self.environment = {
            **os.environ,
            "DISPLAY": f":{display}",
            "GDK_BACKEND": "x11",
            "NO_AT_BRIDGE": "1",
            "PYSTRAY_BACKEND": "gtk",
            "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", str(ROOT))]),
            "XDG_STATE_HOME": str(folder / "state"),
        }
        for command in (["openbox"], TRAY):
            ended_with(stack, subprocess.Popen(command, env=self.environment, **SILENT))

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    def windows(self) -> list[Window]:
        """Those of the menu's process, the tray icon first, then menus from the outer to the inner."""
        named = subprocess.run(
            ["xdotool", "search", "--onlyvisible", "--class", "menubar"],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,  # it finds none, or one that is gone a moment later
        )
        found = [self._geometry(name) for name in named.stdout.split()]
        return sorted(filter(None, found), key=lambda one: one.width * one.height > ICON**2 * 2)

    def _geometry(self, name: str) -> Window | None:
        command = ["xdotool", "getwindowgeometry", "--shell", name]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        values = dict(line.split("=") for line in done.stdout.split())
        if done.returncode != 0 or int(values["WIDTH"]) <= ICON / 2:
            return None
        return Window(*(int(values[key]) for key in ("X", "Y", "WIDTH", "HEIGHT")))

    def menus(self) -> list[Window]:
        return [one for one in self.windows() if one.height > 2 * ICON]

    def press(self, x: int, y: int, button: int = 1) -> None:
        self.run("xdotool", "mousemove", str(x), str(y), "sleep", "0.3", "click", str(button))

    def picture(self, file: Path) -> Any:
        self.run("import", "-window", "root", str(file))
        with Image.open(file) as image:
            return image.convert("L")

    def ink(self, menu: Window, file: Path) -> Any:
        """Which pixels of an open menu, without its frame of 3, are not paper."""
        box = (menu.x + 3, menu.y + 3, menu.x + menu.width - 3, menu.y + menu.height - 3)
        pixels = np.asarray(self.picture(file).crop(box)).astype(int)
        return np.abs(pixels - np.median(pixels)) > 40

    def rows(self, menu: Window, file: Path) -> list[int]:
        """Where the lines of text of an open menu are: y of the middle of each, from the top."""
        inked = self.ink(menu, file).any(axis=1)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], inked, [False]]).astype(int)))
        runs = zip(edges[::2], edges[1::2], strict=True)
        return [int(menu.y + 3 + (begin + end) // 2) for begin, end in runs if end - begin > 4]

    def open(self, file: Path) -> tuple[Window, list[int]]:
        """Open the menu with a click on the icon. Returns it and its lines, once it is painted."""
        eventually(self.windows, "there is no icon in the tray")
        icon = self.windows()[0]
        self.press(icon.x + icon.width // 2, icon.y + icon.height // 2, RIGHT)
        eventually(self.menus, "no menu opens")
        return self.painted(0, file)

    def painted(self, depth: int, file: Path) -> tuple[Window, list[int]]:
        """An open menu and its lines: two looks at it have found the same ones."""
        looks: list[tuple[Window, list[int]]] = []

        def is_painted() -> bool:
            menu = self.menus()[depth]
            looks.append((menu, self.rows(menu, file)))
            return len(looks) > 1 and looks[-1] == looks[-2] and len(looks[-1][1]) > 2

        eventually(is_painted, "the menu stays empty")
        return looks[-1]

    def close(self) -> None:
        """Close the menu with a click beside it."""
        if self.menus():
            self.press(10, HEIGHT - 10)
            eventually(lambda: not self.menus(), "the menu stays open")

    def shows_figures(self, file: Path) -> bool:
        """Whether there is more on the second line of the menu than how much memory is taken."""
        menu, lines = self.open(file)
        middle = lines[1] - menu.y - 3
        columns = np.flatnonzero(self.ink(menu, file)[middle - 5 : middle + 5].any(axis=0))
        self.close()
        return bool(columns[-1] - columns[0] > 120)

    def choose(self, line: int, file: Path, holds: Callable[[], bool], what: str) -> None:
        """Click on a line, counted from the end, until that has its effect: menus change a little later."""
        end = time.monotonic() + LIMIT
        while not holds():
            assert time.monotonic() < end, what
            menu, lines = self.open(file)
            self.press(menu.x + 40, lines[line])
            again = time.monotonic() + LIMIT / 6
            while not holds() and time.monotonic() < again:
                time.sleep(0.1)
            self.close()


def ended_with(stack: ExitStack, process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    stack.enter_context(process)
    stack.callback(process.kill)
    return process


def eventually(holds: Callable[[], object], what: str) -> None:
    end = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.1)


def end_group(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def ask(address: Address) -> None:
    body = {"messages": [{"role": "user", "content": "What does os.path.join do?"}], "max_tokens": 64}
    with closing(http.client.HTTPConnection(address.host, address.port, timeout=LIMIT)) as connection:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        assert connection.getresponse().status == 200


@pytest.mark.parametrize("display", ["", ":99999"], ids=["none", "gone"])
def test_with_gtk_but_no_display_it_says_so(display, tmp_path):
    if reason := problem(borrowed(tmp_path)):
        pytest.skip(reason)
    done = subprocess.run(
        ["dbus-run-session", "--", sys.executable, "-m", "mlx_spec.menubar"],
        cwd=ROOT,
        env={
            **os.environ,
            "DISPLAY": display,
            "WAYLAND_DISPLAY": "",
            "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", str(ROOT))]),
            "XDG_STATE_HOME": str(tmp_path / "state"),
        },
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    ours = [line for line in done.stderr.splitlines() if not line.startswith("dbus-daemon")]
    assert (done.returncode, done.stdout, len(ours)) == (1, "", 1), done.stderr
    assert "there is no display" in ours[0]


def test_clicks_start_and_stop_the_real_server(tmp_path):
    """The picture in benchmarks/results is menu.png of this test's folder."""
    if reason := problem(borrowed(tmp_path)):
        pytest.skip(reason)
    address = Address(HOST, free_port())
    client = StatusClient(address)
    shot = tmp_path / "shot.png"
    with ExitStack() as stack:
        desktop = Desktop(stack, tmp_path)
        command = ["dbus-run-session", "--", sys.executable, "-m", "mlx_spec.menubar"]
        errors = stack.enter_context((tmp_path / "errors").open("wb"))
        program = subprocess.Popen(
            [*command, "--port", str(address.port)],
            cwd=ROOT,
            env=desktop.environment,
            stderr=errors,
            start_new_session=True,
        )
        stack.enter_context(program)
        stack.callback(end_group, program)

        eventually(lambda: client.health() == "ok", "the server does not start")
        for _ in range(3):
            ask(address)
        eventually(lambda: desktop.shows_figures(shot), "the menu shows no figures")
        menu, lines = desktop.open(shot)
        assert len(lines) >= 12  # two of its status at least, and the ten that never change
        desktop.run("xdotool", "mousemove", str(menu.x + 40), str(lines[DRAFT]))
        eventually(lambda: len(desktop.menus()) == 2, "no submenu opens")
        desktop.painted(1, shot)
        desktop.picture(tmp_path / "whole.png")
        desktop.run("convert", str(tmp_path / "whole.png"), "-colors", "64", str(tmp_path / "menu.png"))
        assert 1000 < (tmp_path / "menu.png").stat().st_size < 100_000
        desktop.close()

        stopped = "a click on Stop does not stop the server"
        desktop.choose(STOP, shot, lambda: client.health() is None, stopped)
        assert is_free(address)
        started = "a click on Start does not start the server"
        desktop.choose(START, shot, lambda: client.health() == "ok", started)
        menu, lines = desktop.open(shot)
        desktop.press(menu.x + 40, lines[QUIT])
        assert program.wait(LIMIT) == 0, (tmp_path / "errors").read_text()
    assert is_free(address)
