"""What our command lines share: one line for a bad option, one for a refusal, and the exit statuses."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from mlx_spec.errors import SpecError

ERROR, BAD_OPTION, INTERRUPTED = 1, 2, 130  # 128 + SIGINT
STATUSES = (
    "exit status: 0, also where the reader of a pipe has seen enough; 1 on an error, 2 on a bad option, "
    "130 when interrupted"
)


class Parser(argparse.ArgumentParser):
    """Leaves with status 2 and one line on stderr when a command line makes no sense."""

    def __init__(self, program: str, description: str, usage: str | None = "%(prog)s [options]") -> None:
        super().__init__(
            prog=f"mlx-spec {program}",
            usage=usage,
            description=description,
            epilog=STATUSES,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Say where help is, and leave."""
        self.exit(BAD_OPTION, f"mlx-spec: {' '.join(message.split())} (see {self.prog} --help)\n")


def guarded(run: Callable[[], int]) -> int:
    """The exit status of `run`: a refusal is one line on stderr and 1, Ctrl-C is 130, a closed pipe is 0."""
    try:
        return run()
    except SpecError as error:
        print(f"mlx-spec: {error}", file=sys.stderr)
        return ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def integer(least: int | None = None) -> Callable[[str], int]:
    """A converter of arguments to integers of at least that much."""
    bound = "" if least is None else f" of at least {least}"

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or (least is not None and value < least):
            raise argparse.ArgumentTypeError(f"{text!r} is not allowed: give an integer{bound}")
        return value

    return convert


def number(text: str) -> float:
    """An argument as a number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: give a number") from None
