"""The `mlx-spec` command: picks a program and hands it the rest of the line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from mlx_spec import __version__
from mlx_spec.errors import SpecError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one program. Returns its exit status; an error of ours is one line on stderr and status 1."""
    options = _parser().parse_args(arguments)
    try:
        return PROGRAMS[options.program](options.arguments)
    except SpecError as error:
        print(f"mlx-spec: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mlx-spec", description="Lossless speculative decoding on MLX.")
    parser.add_argument("--version", action="version", version=f"mlx-spec {__version__}")
    parser.add_argument("program", choices=sorted(PROGRAMS), help="`mlx-spec chat --help` shows its options")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _chat(arguments: Sequence[str]) -> int:
    from mlx_spec.apps.chat import main as chat

    return chat(arguments)


PROGRAMS: dict[str, Callable[[Sequence[str]], int]] = {"chat": _chat}
