"""The `mlx-spec` command: picks a program and hands it the rest of the line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from mlx_spec import __version__
from mlx_spec.apps.command import BAD_OPTION, ERROR, INTERRUPTED
from mlx_spec.apps.programs import PROGRAMS, run
from mlx_spec.errors import SpecError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one program, or list them all. Returns the exit status; an error of ours is a line and status 1."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        options = parser().parse_args(words or ["--help"])
        return run(options.program, options.arguments)
    except SpecError as error:
        print(f"mlx-spec: {error}", file=sys.stderr)
        return ERROR
    except KeyboardInterrupt:  # while the program was imported; then it is its own
        print("mlx-spec: interrupted", file=sys.stderr)
        return INTERRUPTED


class _Command(argparse.ArgumentParser):
    def format_help(self) -> str:
        """All programs, a line each."""
        from mlx_spec.apps.manual import overview  # which reads the options of them all

        return "\n".join([*overview(), ""])

    def error(self, message: str) -> NoReturn:
        """Say where help is, and leave."""
        self.exit(BAD_OPTION, f"mlx-spec: {' '.join(message.split())} (see mlx-spec --help)\n")


def parser() -> argparse.ArgumentParser:
    """Of the command itself, whose first argument is a program."""
    parser = _Command(
        prog="mlx-spec",
        description="Lossless speculative decoding on MLX.",
        usage="%(prog)s PROGRAM [options]",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mlx-spec {__version__}")
    parser.add_argument("program", choices=PROGRAMS, metavar="PROGRAM", help="one of " + ", ".join(PROGRAMS))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser
