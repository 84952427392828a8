"""Run commands of mlx-spec in this process."""

from __future__ import annotations

import os
from pathlib import Path

from mlx_spec.apps import cli


def run(*arguments: str) -> int:
    """Return the exit status of a command."""
    try:
        return cli.main(list(arguments))
    except SystemExit as error:
        return int(error.code or 0)


def file_that_takes_nothing(folder: Path) -> int:
    """Return an open file in which every write fails, on any system: it is open for reading only."""
    return os.open(folder / "nothing", os.O_CREAT | os.O_RDONLY)
