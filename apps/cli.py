"""Run the `mlx-spec` command: pick a program and give it the rest of the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Literal

import typer
from typer.main import get_command

from mlx_spec.cli.command import INTERRUPTED, STATUSES, Version, guarded, run_app, tell

NAME = "mlx-spec"
Panel = Literal["Talk to a model", "Get models", "Measure and check"]  # of the help page


@dataclass(frozen=True)
class Program:
    """The names of a program and of its options within mlx_spec; imported only when they are needed."""

    main: str  # a function: arguments -> exit status
    options: str  # a class or function from which typer reads help and completion
    panel: Panel


PROGRAMS = {
    "chat": Program("apps.chat:main", "apps.chat.arguments:Options", "Talk to a model"),
    "serve": Program("apps.server:main", "apps.server.settings:Options", "Talk to a model"),
    "launch": Program("apps.launch:main", "apps.launch:Options", "Talk to a model"),
    "menubar": Program("apps.menubar:main", "apps.menubar:options", "Talk to a model"),
    "convert": Program("convert.command:convert_main", "convert.options:ConversionOptions", "Get models"),
    "train": Program("convert.command:train_main", "convert.options:TrainingOptions", "Get models"),
    "inspect": Program("apps.models:inspect_main", "apps.models:Inspect", "Get models"),
    "models": Program("apps.models:models_main", "apps.models:ListOptions", "Get models"),
    "pull": Program("apps.models:pull_main", "apps.models:Pull", "Get models"),
    "rm": Program("apps.models:rm_main", "apps.models:Remove", "Get models"),
    "tune": Program("apps.tune:main", "apps.tune:Options", "Measure and check"),
    "roofline": Program("apps.roofline:main", "apps.roofline:Options", "Measure and check"),
    "bench": Program("apps.bench:main", "apps.bench:Options", "Measure and check"),
    "race": Program("apps.race:main", "apps.race:Options", "Measure and check"),
    "doctor": Program("apps.doctor:main", "apps.doctor:Options", "Measure and check"),
    "report": Program("apps.report:main", "apps.report:Options", "Measure and check"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one program, or show the help of all. Returns the exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    return guarded(lambda: _run(words))


def _run(words: list[str]) -> int:
    try:
        # A shell sets this variable, by the script that --install-completion wrote.
        if "_MLX_SPEC_COMPLETE" in os.environ:
            get_command(app()).main(prog_name=NAME)  # answers the shell and exits
        if words and words[0] in PROGRAMS:
            return int(resolve_name(f"mlx_spec.{PROGRAMS[words[0]].main}")(words[1:]))
        run_app(app(), NAME, words or ["--help"])
        return 0
    except KeyboardInterrupt:  # while the program was imported; it handles its own
        tell("interrupted")
        return INTERRUPTED


def app() -> typer.Typer:
    """Return the typer app with the options of all programs, for help and completion."""
    made = typer.Typer(epilog=STATUSES, help="Lossless speculative decoding on MLX.")

    @made.callback()
    def options(version: Version = False) -> None:
        pass

    for name, program in PROGRAMS.items():
        made.command(name, rich_help_panel=program.panel)(resolve_name(f"mlx_spec.{program.options}"))
    return made
