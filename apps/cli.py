"""The `mlx-spec` command: picks a program and hands it the rest of the line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pkgutil import resolve_name

from mlx_spec import __version__
from mlx_spec.errors import SpecError

PROGRAMS = {  # imported when they are run
    "chat": "mlx_spec.apps.chat:main",
    "convert": "mlx_spec.convert.command:main",
    "inspect": "mlx_spec.apps.models:inspect_main",
    "models": "mlx_spec.apps.models:models_main",
    "pull": "mlx_spec.apps.models:pull_main",
    "rm": "mlx_spec.apps.models:rm_main",
    "roofline": "mlx_spec.apps.roofline:main",
    "serve": "mlx_spec.apps.server:main",
    "tune": "mlx_spec.apps.tune:main",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one program. Returns its exit status; an error of ours is one line on stderr and status 1."""
    options = _parser().parse_args(arguments)
    try:
        status: int = resolve_name(PROGRAMS[options.program])(options.arguments)
        return status
    except SpecError as error:
        print(f"mlx-spec: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mlx-spec", description="Lossless speculative decoding on MLX.")
    parser.add_argument("--version", action="version", version=f"mlx-spec {__version__}")
    parser.add_argument("program", choices=sorted(PROGRAMS), help="`mlx-spec chat --help` shows its options")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser
