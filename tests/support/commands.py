"""Run commands of mlx-spec in this process."""

from __future__ import annotations

from mlx_spec.apps import cli


def run(*arguments: str) -> int:
    """Return the exit status of a command."""
    try:
        return cli.main(list(arguments))
    except SystemExit as error:
        return int(error.code or 0)
