"""The `mlx-spec` command: picks a program and hands it the rest of the line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mlx_spec import __version__
from mlx_spec.apps.programs import PROGRAMS, run
from mlx_spec.errors import SpecError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one program. Returns its exit status; an error of ours is one line on stderr and status 1."""
    options = parser().parse_args(arguments)
    try:
        return run(options.program, options.arguments)
    except SpecError as error:
        print(f"mlx-spec: {error}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    """Of the command itself, whose first argument is a program."""
    parser = argparse.ArgumentParser(
        prog="mlx-spec",
        description="Lossless speculative decoding on MLX.",
        usage="%(prog)s PROGRAM [options]",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mlx-spec {__version__}")
    parser.add_argument("program", choices=PROGRAMS, metavar="PROGRAM", help="one of " + ", ".join(PROGRAMS))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser
