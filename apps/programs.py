"""The programs of the `mlx-spec` command and the options of their parsers, imported when they are needed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name


@dataclass(frozen=True)
class Program:
    """Where a program and its parser are, as names to resolve when they are needed."""

    main: str
    parser: str  # a function that makes it


@dataclass(frozen=True)
class Option:
    """One option or argument of a program."""

    names: tuple[str, ...]  # as typed, such as "-o" and "--out"; empty for an argument without a dash
    value: str | None  # what follows it, as help shows it; None: nothing does
    choices: tuple[str, ...]  # the values there are; empty: any
    is_path: bool  # whether the value may be a file or a folder
    repeats: bool  # whether it may be given more than once
    required: bool
    help: str


@dataclass(frozen=True)
class Group:
    """Options that belong together."""

    title: str
    description: str
    options: tuple[Option, ...]


PROGRAMS = {
    "chat": Program("mlx_spec.apps.chat:main", "mlx_spec.apps.chat.arguments:parser"),
    "serve": Program("mlx_spec.apps.server:main", "mlx_spec.apps.server.arguments:parser"),
    "menubar": Program("mlx_spec.apps.menubar:main", "mlx_spec.apps.menubar.arguments:parser"),
    "convert": Program("mlx_spec.convert.command:main", "mlx_spec.convert.command:parser"),
    "inspect": Program("mlx_spec.apps.models:inspect_main", "mlx_spec.apps.models:inspect_parser"),
    "models": Program("mlx_spec.apps.models:models_main", "mlx_spec.apps.models:models_parser"),
    "pull": Program("mlx_spec.apps.models:pull_main", "mlx_spec.apps.models:pull_parser"),
    "rm": Program("mlx_spec.apps.models:rm_main", "mlx_spec.apps.models:rm_parser"),
    "tune": Program("mlx_spec.apps.tune:main", "mlx_spec.apps.tune:parser"),
    "roofline": Program("mlx_spec.apps.roofline:main", "mlx_spec.apps.roofline.arguments:parser"),
    "bench": Program("mlx_spec.apps.bench:main", "mlx_spec.apps.bench:parser"),
    "doctor": Program("mlx_spec.apps.doctor:main", "mlx_spec.apps.doctor.arguments:parser"),
    "completion": Program("mlx_spec.apps.completion:main", "mlx_spec.apps.completion:parser"),
    "help": Program("mlx_spec.apps.manual:help_main", "mlx_spec.apps.manual:help_parser"),
}

PATHS = ("FILE", "FOLDER", "PATH", "OUT")  # in the name of a value


def run(name: str, arguments: list[str]) -> int:
    """Run a program. Returns its exit status."""
    status: int = resolve_name(PROGRAMS[name].main)(arguments)
    return status


def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser of a program."""
    parser: argparse.ArgumentParser = resolve_name(PROGRAMS[name].parser)()
    return parser


def groups(parser: argparse.ArgumentParser) -> Iterator[Group]:
    """The options of a parser in the order of its help. Those without help text are left out."""
    for group in parser._action_groups:
        shown = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        options = tuple(_option(action, parser.prog) for action in shown)
        if options:
            yield Group(group.title or "", group.description or "", options)


def options(parser: argparse.ArgumentParser) -> list[Option]:
    """The same without groups."""
    return [option for group in groups(parser) for option in group.options]


def _option(action: argparse.Action, program: str) -> Option:
    value = None if action.nargs == 0 else _value(action)
    words = (value or "").replace("_", " ").replace("|", " ").split()
    return Option(
        names=tuple(action.option_strings),
        value=value,
        choices=tuple(str(choice) for choice in action.choices or ()),
        is_path=value is not None and (action.type is Path or any(word in PATHS for word in words)),
        repeats=isinstance(action, argparse._AppendAction) or action.nargs in ("*", "+"),
        required=action.required and action.nargs not in ("?", "*"),
        help=" ".join(((action.help or "") % (vars(action) | {"prog": program})).split()),
    )


def _value(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    if action.choices is not None:
        return "{" + ",".join(str(choice) for choice in action.choices) + "}"
    return action.dest.upper() if action.option_strings else action.dest
