"""The options of `mlx-spec menubar`; those it does not know are the server's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from typer import Context, Option

from .. import command
from ..command import BadOptions, flag
from ..server.settings import parse as parse_server
from .menu import Selection
from .server_process import Address, ServerOptions

INSTALL, REMOVE = "--install-login-item", "--remove-login-item"


@dataclass(frozen=True)
class MenuPlan:
    """The parsed command line."""

    server: ServerOptions
    selection: Selection  # empty if the pair selected last is to be served
    fixed: bool  # the models are named by --model
    passed: tuple[str, ...]  # options of the server, for the next login
    installs: bool = False
    removes: bool = False


def parse(arguments: Sequence[str] | None) -> MenuPlan:
    """Return the options of a command line. Raises SystemExit with status 2 if one is wrong."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    passed = tuple(word for word in words if word not in (INSTALL, REMOVE))
    choice, rest = command.parse(
        options,
        "menubar",
        words,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        options_metavar="[OPTIONS] [OPTIONS of mlx-spec serve]",
    )
    settings = parse_server(passed)
    is_named = any(word.split("=")[0] == "--model" for word in rest)
    return MenuPlan(
        ServerOptions(Address(settings.host, settings.port), settings.api_key, rest),
        choice,
        fixed=is_named and choice.target is None,
        passed=passed,
        installs=INSTALL in words,
        removes=REMOVE in words,
    )


def options(
    context: Context,
    install_login_item: Annotated[bool, flag(INSTALL, "start it now and at every login")] = False,
    remove_login_item: Annotated[bool, flag(REMOVE, "start it at login no longer")] = False,
    target: Annotated[str | None, Option(hidden=True)] = None,
    drafter: Annotated[str | None, Option(hidden=True)] = None,
    port: Annotated[str | None, Option(hidden=True)] = None,
) -> tuple[Selection, tuple[str, ...]]:
    """Keep the local endpoint running, with a menu that shows its state.

    Options of `mlx-spec serve` are passed on.
    """
    if install_login_item and remove_login_item:
        raise BadOptions(f"{INSTALL} and {REMOVE}: give one of them")
    return Selection(target, drafter), tuple(context.args)
