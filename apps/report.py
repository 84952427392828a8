"""`mlx-spec report`: write machine, versions, self-test and speeds as one block to paste into an issue.

The block has no path, no name of a user or host, and no prompt.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from mlx_spec import load
from mlx_spec.checkpoint.files import one_line
from mlx_spec.cli.command import ERROR, PairOptions, program, show
from mlx_spec.device import require_backend
from mlx_spec.errors import SpecError

from .bench import measured, speed_table
from .doctor import LINE, WIDTH, all_checks, certificate, tested


@dataclass(frozen=True)
class Options(PairOptions):
    """Write one block to paste into an issue: machine, versions, self-test and a short bench of a pair.

    It takes a minute or two. The block has no path, no name of a user or host and no prompt. The exit status
    is 1 when something is wrong; the block says what.
    """

    def check_name(self) -> None:
        """Accept any name: the block says what is wrong with it."""


def _run(options: Options) -> int:
    hide = hiding(options.chosen, options.drafter)
    checks = [replace(check, text=hide(check.text)) for check in all_checks() if check.name != "models"]
    is_fine, lines = all(check.state != "wrong" for check in checks), list[str]()
    try:
        require_backend()
        pair = load(**vars(options.spec))
        parts, found = tested(pair, quick=True)
        lines += certificate(parts, found, checks, datetime.now(UTC))
        is_fine &= found.passed
        speeds, answers = measured(pair, tokens=64, repeats=1)
        lines += [f"answers of each: {answers}", "", *speed_table(speeds), LINE]
    except SpecError as error:
        is_fine = False
        lines = lines or [f"{check.name:<12} {check.text}" for check in checks]
        lines += textwrap.wrap(f"problem: {hide(one_line(error))}", WIDTH)
    show("```text", *lines, "```")
    return 0 if is_fine else ERROR


def hiding(*given: str | None) -> Callable[[str], str]:
    """Return a function that replaces paths and the names of user and host in a text.

    `given` are names of models. Those that are paths are replaced whole: they may have spaces.
    """
    host = socket.gethostname()
    names = {getpass.getuser(), Path.home().name, host, host.partition(".")[0]}
    known = [name for name in given if name is not None and Path(name).expanduser().is_absolute()]
    folders = sorted({*known, str(Path.home()), os.getcwd()} - {"/"}, key=len, reverse=True)
    places = "|".join(map(re.escape, folders)) or "(?!)"
    rest = r"(?:/[^\s/:,'\"]+)"
    path = re.compile(rf"(?:{places}){rest}*/?|(?<![\w/])(?:~|\.{{1,2}})?{rest}+/?")
    name = "|".join(re.escape(name) for name in names if len(name) > 2)  # shorter ones are parts of words
    private = re.compile(rf"(?<!\w)(?:{name})(?!\w)" if name else r"(?!)")
    return lambda text: private.sub("(a name)", path.sub("(a path)", text))


main = program("report", Options, _run)
