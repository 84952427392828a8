"""The menu bar: keep the local server running and show its state. This package never imports MLX."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

from platformdirs import user_state_path
from typer import Context, Option

from mlx_spec.checkpoint.files import locked
from mlx_spec.cli import command
from mlx_spec.cli.command import ERROR, BadOptions, flag, guarded, tell
from mlx_spec.errors import InvalidValue
from mlx_spec.hub.catalog import DEMO, PairSpec

from ..server.settings import parse as parse_server
from . import macos
from .app import QUIT, App, Folder, MenuPlan
from .server_process import Address, ServerOptions


def parse(arguments: Sequence[str] | None) -> MenuPlan:
    """Return the options of a command line. Raises SystemExit with status 2 if one is wrong."""
    return command.parse(
        options,
        "menubar",
        arguments,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        options_metavar="[OPTIONS] [OPTIONS of mlx-spec serve]",
    )


def options(
    context: Context,
    install_login_item: Annotated[
        bool, flag("--install-login-item", "start it now and at every login")
    ] = False,
    remove_login_item: Annotated[bool, flag("--remove-login-item", "start it at login no longer")] = False,
    target: Annotated[str | None, Option(hidden=True)] = None,
    drafter: Annotated[str | None, Option(hidden=True)] = None,
    port: Annotated[str | None, Option(hidden=True)] = None,
) -> MenuPlan:
    """Keep the local endpoint running, with a menu that shows its state.

    Options of `mlx-spec serve` are passed on.
    """
    if install_login_item and remove_login_item:
        raise BadOptions("--install-login-item and --remove-login-item: give one of them")
    rest = tuple(context.args)
    named = {"--target": target, "--drafter": drafter, "--port": port}
    passed = (*rest, *(word for name, value in named.items() if value is not None for word in (name, value)))
    settings = parse_server(passed)
    return MenuPlan(
        ServerOptions(Address(settings.host, settings.port), settings.api_key, rest),
        None if target is None and drafter is None else PairSpec(DEMO if target is None else target, drafter),
        passed=passed,
        installs=install_login_item,
        removes=remove_login_item,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `mlx-spec menubar`. Returns its exit status. A bad command line raises SystemExit with status 2."""
    plan = parse(arguments)
    if sys.platform != "darwin":
        tell("the menu bar is for macOS: use `mlx-spec serve` and its page")
        return ERROR
    return guarded(lambda: _run(plan, Folder(user_state_path("mlx_spec") / "menubar")))


def _run(plan: MenuPlan, folder: Folder) -> int:
    agent = Path.home() / macos.AGENT
    if plan.installs or plan.removes:
        if plan.installs:
            macos.install_agent(agent, plan.passed, folder.own_log)
            print(f"{agent} starts the menu at login")
        else:
            print("removed" if macos.remove_agent(agent) else "there was none")
        return 0
    with ExitStack() as held:
        try:
            held.enter_context(locked(folder.path))
        except InvalidValue:
            tell("the menu runs already")
            return 0
        return _show(plan, folder, agent)


def _show(plan: MenuPlan, folder: Folder, agent: Path) -> int:
    """Show the menu until the user quits. Raises NotFound that names a missing package."""
    if (problem := macos.framework_problem()) is not None:
        macos.notify(problem)
    from .cocoa import CocoaView

    view = CocoaView(macos.notify)
    app = App(plan, folder, view, agent)
    thread = threading.Thread(target=app.run, name="mlx_spec menu")

    def on_start() -> None:
        _on_signals(lambda: app.post(QUIT))
        thread.start()
        tell("the menu is in the menu bar; Ctrl-C ends it")

    view.run(on_start, app.post)
    if thread.ident is not None:
        app.post(QUIT)  # macOS may have closed the view
        thread.join()
    return ERROR if app.failed else 0


def _on_signals(quit_: Callable[[], None]) -> None:
    """Call `quit_` on a signal, also while the main thread is inside the loop of a toolkit."""
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.detach())  # stays open as long as there are signals
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in ends:
        signal.signal(number, lambda *_: None)  # with a handler, the number is written to the socket at once

    def wait() -> None:
        while True:
            if set(reading.recv(1)) & set(ends):
                quit_()

    threading.Thread(target=wait, name="mlx_spec signals", daemon=True).start()
