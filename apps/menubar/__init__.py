"""The menu bar: keeps the local endpoint running, and says how it is. MLX is never imported here."""

from __future__ import annotations

import fcntl
import os
import platform
import signal
import socket
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mlx_spec.apps.command import ERROR, guarded
from mlx_spec.apps.menubar import desktop, login
from mlx_spec.apps.menubar.arguments import Options, parse
from mlx_spec.apps.menubar.control import QUIT, Control
from mlx_spec.apps.menubar.model import View
from mlx_spec.apps.menubar.places import Places, users
from mlx_spec.errors import InvalidValue

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str] | None = None) -> int:
    """`mlx-spec menubar`. Returns its exit status: 0 when it was quit, 1 on an error of ours.

    A command line that makes no sense raises SystemExit with status 2.
    """
    options = parse(arguments)
    return guarded(lambda: _run(options, users()))


def _run(options: Options, places: Places) -> int:
    places.make()
    agent = login.agent_file(Path.home()) if desktop.IS_MAC else None
    if options.installs or options.removes:
        if agent is None:
            raise InvalidValue("login items are of macOS: let your desktop start `mlx-spec menubar`")
        return _change_login(options, agent, places)
    with _alone(places.lock) as alone:
        if not alone:
            print("mlx-spec: the menu runs already", file=sys.stderr)
            return 0
        return _show(options, places, agent)


def _change_login(options: Options, agent: Path, places: Places) -> int:
    if options.installs:
        login.install(agent, options.plan.passed, places.own_log)
        print(f"{agent} starts the menu at login")
    else:
        print("removed" if login.remove(agent) else "there was none")
    return 0


def _show(options: Options, places: Places, agent: Path | None) -> int:
    view = _view()
    control = Control(options.plan, places, view, agent)
    thread = threading.Thread(target=control.run, name="mlx_spec menu")

    def begun() -> None:
        _on_signals(lambda: control.post(QUIT))
        thread.start()

    view.run(begun, control.post)
    if thread.ident is not None:
        control.post(QUIT)  # where the view went by itself
        thread.join()
    return ERROR if control.failed else 0


def _view() -> View:
    """What draws the menu here. Raises NotFound with what has to be installed."""
    if not desktop.IS_MAC:
        from mlx_spec.apps.menubar.gtk import GtkView

        return GtkView()
    problem = desktop.framework_problem(
        platform.mac_ver()[0], sysconfig.get_config_var("PYTHONFRAMEWORK") or ""
    )
    if problem is not None:
        desktop.say(problem)
    from mlx_spec.apps.menubar.cocoa import CocoaView

    return CocoaView(desktop.say)


@contextmanager
def _alone(lock: Path) -> Iterator[bool]:
    """Whether no other menu of this user runs; it holds as long as the context does."""
    handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(handle)


def _on_signals(leave: Callable[[], None]) -> None:
    """Call `leave` on a signal, also while the main thread is in the loop of a toolkit, out of reach."""
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.detach())  # kept open as long as there are signals
    for number in ENDING:
        signal.signal(number, lambda *_: None)  # with a handler, its number is written there at once

    def wait() -> None:
        while True:
            if set(reading.recv(1)) & set(ENDING):
                leave()

    threading.Thread(target=wait, name="mlx_spec signals", daemon=True).start()
