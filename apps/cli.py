"""The `mlx-spec` command: it picks a program and gives it the rest of the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pkgutil import resolve_name

import typer
from typer.main import get_command

from .command import INTERRUPTED, STATUSES, Version, guarded, run_app, tell

NAME = "mlx-spec"
COMPLETION = "_MLX_SPEC_COMPLETE"  # set by the scripts of --install-completion
ANSWERS, MODELS, MEASUREMENTS = "Talk to a model", "Get models", "Measure and check"


@dataclass(frozen=True)
class Program:
    """Where a program and its options are: names that are imported when they are needed."""

    main: str  # (arguments) -> exit status
    options: str  # what typer reads help and completion from
    panel: str  # of the help page


PROGRAMS = {
    "chat": Program("mlx_spec.apps.chat:main", "mlx_spec.apps.chat.arguments:Options", ANSWERS),
    "serve": Program("mlx_spec.apps.server:main", "mlx_spec.apps.server.settings:Options", ANSWERS),
    "launch": Program("mlx_spec.apps.launch:main", "mlx_spec.apps.launch:Options", ANSWERS),
    "menubar": Program("mlx_spec.apps.menubar:main", "mlx_spec.apps.menubar:options", ANSWERS),
    "convert": Program(
        "mlx_spec.convert.command:convert_main", "mlx_spec.convert.options:ConversionOptions", MODELS
    ),
    "train": Program(
        "mlx_spec.convert.command:train_main", "mlx_spec.convert.options:TrainingOptions", MODELS
    ),
    "inspect": Program("mlx_spec.apps.models:inspect_main", "mlx_spec.apps.models:Inspect", MODELS),
    "models": Program("mlx_spec.apps.models:models_main", "mlx_spec.apps.models:ListOptions", MODELS),
    "pull": Program("mlx_spec.apps.models:pull_main", "mlx_spec.apps.models:Pull", MODELS),
    "rm": Program("mlx_spec.apps.models:rm_main", "mlx_spec.apps.models:Remove", MODELS),
    "tune": Program("mlx_spec.apps.tune:main", "mlx_spec.apps.tune:Options", MEASUREMENTS),
    "roofline": Program("mlx_spec.apps.roofline:main", "mlx_spec.apps.roofline:Options", MEASUREMENTS),
    "bench": Program("mlx_spec.apps.bench:main", "mlx_spec.apps.bench:Options", MEASUREMENTS),
    "doctor": Program("mlx_spec.apps.doctor:main", "mlx_spec.apps.doctor:Options", MEASUREMENTS),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one program, or show the help of all. Returns the exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    return guarded(lambda: _run(words))


def _run(words: list[str]) -> int:
    try:
        if COMPLETION in os.environ:
            get_command(app()).main(prog_name=NAME)  # answers the shell and exits
        if words and words[0] in PROGRAMS:
            status: int = resolve_name(PROGRAMS[words[0]].main)(words[1:])
            return status
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
        made.command(name, rich_help_panel=program.panel)(resolve_name(program.options))
    return made
