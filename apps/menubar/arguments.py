"""The options of `mlx-spec menubar`; those it does not know are the server's."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_spec.apps.command import Parser
from mlx_spec.apps.menubar.client import Address
from mlx_spec.apps.menubar.control import Plan
from mlx_spec.apps.menubar.state import Choice
from mlx_spec.apps.menubar.supervisor import Wish
from mlx_spec.apps.server.arguments import parse as parse_server


@dataclass(frozen=True)
class Options:
    """A command line."""

    plan: Plan
    installs: bool = False
    removes: bool = False


def parse(arguments: Sequence[str] | None) -> Options:
    """Options from a command line. Leaves with status 2 and one line on stderr when it makes no sense."""
    given, passed = parser().parse_known_args(arguments)
    return Options(_plan(passed), given.install_login_item, given.remove_login_item)


def parser() -> Parser:
    """The options, but for those of the server. Parsing raises SystemExit when they make no sense."""
    parser = Parser(
        "menubar",
        "Keep the local endpoint running, with a menu that says how it is. "
        "Options of `mlx-spec serve` are passed on.",
        usage="%(prog)s [options] [options of mlx-spec serve]",
    )
    login = parser.add_mutually_exclusive_group()
    login.add_argument("--install-login-item", action="store_true", help="start it now and at every login")
    login.add_argument("--remove-login-item", action="store_true", help="start it at login no longer")
    return parser


def _plan(passed: list[str]) -> Plan:
    settings = parse_server(passed)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--target", "--drafter", "--port"):
        parser.add_argument(option)
    chosen, rest = parser.parse_known_args(passed)
    named = any(word.split("=")[0] == "--model" for word in rest)
    return Plan(
        Wish(Address(settings.host, settings.port), settings.api_key, tuple(rest)),
        Choice(chosen.target, chosen.drafter),
        fixed=named and chosen.target is None,
        passed=tuple(passed),
    )
