"""The options of `mlx-spec menubar`; those it does not know are the server's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from typer import Context, Option

from mlx_spec.apps.command import Parser
from mlx_spec.apps.menubar.app import Plan
from mlx_spec.apps.menubar.menu import Selection
from mlx_spec.apps.menubar.server_process import Address, ServerOptions
from mlx_spec.apps.server.arguments import parse as parse_server


@dataclass(frozen=True)
class Options:
    """A parsed command line."""

    plan: Plan
    installs: bool = False
    removes: bool = False


def parse(arguments: Sequence[str] | None) -> Options:
    """Return the options. Leaves with status 2 and one line on stderr if they make no sense."""
    given, passed = parser().parse_known_args(arguments)
    return Options(_plan(passed), given.install_login_item, given.remove_login_item)


def parser() -> Parser:
    """Return the parser of the options that are not the server's."""
    parser = Parser(
        "menubar",
        words,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        options_metavar="[OPTIONS] [OPTIONS of mlx-spec serve]",
    )
    settings = parse_server(passed)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--target", "--drafter", "--port"):
        parser.add_argument(option)
    chosen, rest = parser.parse_known_args(passed)
    named = any(word.split("=")[0] == "--model" for word in rest)
    return Plan(
        ServerOptions(Address(settings.host, settings.port), settings.api_key, tuple(rest)),
        Selection(chosen.target, chosen.drafter),
        fixed=named and chosen.target is None,
        passed=tuple(passed),
    )
    return Options(plan, installs=INSTALL in words, removes=REMOVE in words)


def options(
    context: Context,
    install_login_item: Annotated[bool, flag(INSTALL, "start it now and at every login")] = False,
    remove_login_item: Annotated[bool, flag(REMOVE, "start it at login no longer")] = False,
    target: Annotated[str | None, Option(hidden=True)] = None,
    drafter: Annotated[str | None, Option(hidden=True)] = None,
    port: Annotated[str | None, Option(hidden=True)] = None,
) -> tuple[Choice, tuple[str, ...]]:
    """Keep the local endpoint running, with a menu that shows its state.

    Options of `mlx-spec serve` are passed on.
    """
    if install_login_item and remove_login_item:
        raise BadOptions(f"{INSTALL} and {REMOVE}: give one of them")
    return Choice(target, drafter), tuple(context.args)
