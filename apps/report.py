"""`mlx-spec report`: write machine, versions, self-test and speeds as one block to paste into an issue.

The block has no path, no name of a user or host, and no prompt.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_spec import load
from mlx_spec.checkpoint.files import one_line
from mlx_spec.cli.command import ERROR, PairOptions, program, show
from mlx_spec.device import require_backend
from mlx_spec.errors import SpecError

from .bench import measured, speed_table
from .doctor import LINE, WIDTH, all_checks, certificate, tested

if TYPE_CHECKING:
    from mlx_spec.pair import Pair

    from .selftest import Effort


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
    lines, is_fine = block(lambda: load(**vars(options.spec)), hide)
    show("```text", *lines, *(_to_answer() if sys.platform == "darwin" else ()), "```")
    return 0 if is_fine else ERROR


def block(
    open_pair: Callable[[], Pair],
    hide: Callable[[str], str],
    effort: Effort | None = None,
    tokens: int = 64,
    most: int | None = None,
) -> tuple[list[str], bool]:
    """Return the lines about machine and pair, and whether all is fine.

    `effort` is for the self-test, None for a quick one; `tokens` bounds the answers that are
    timed, to at most `most` questions.
    """
    checks = [replace(check, text=hide(check.text)) for check in all_checks() if check.name != "models"]
    is_fine, lines = all(check.state != "wrong" for check in checks), list[str]()
    try:
        require_backend()
        from .selftest import QUICK

        pair = open_pair()
        words, result = tested(pair, effort or QUICK)
        lines += certificate(words, result, checks, datetime.now(UTC))
        is_fine &= result.passed
        speeds, answers = measured(pair, tokens, repeats=1, most=most)
        lines += [f"answers of each: {answers}", "", *speed_table(speeds), LINE]
    except SpecError as error:
        is_fine = False
        lines = lines or [f"{check.name:<12} {check.text}" for check in checks]
        lines += textwrap.wrap(f"problem: {hide(one_line(error))}", WIDTH)
    return lines, is_fine


def undecided() -> list[str]:
    """Return the questions that no test on Linux can answer. Remove one once a Mac has answered it."""
    return """\
speed: is the gain that roofline predicts the one that bench measures, for dense and MoE targets?
tuned costs: do the costs that tune measures repeat within 10 % while other programs are idle?
near ties: how many near ties does doctor count in bfloat16, and are all other tokens equal?
float32 on an M5: is doctor's text the same with MLX_ENABLE_TF32 unset, 0 and 1?
kernels of mlx-lm: do doctor and bench pass for Qwen3-Next, whose layers have Metal kernels?
attention: does the peak of memory show fused kernels for head dims 256 and 512 from 1024 rows on?
memory: does a prompt of 32k tokens stay below what inspect says, and is less wired when idle?
GGUF: does doctor pass for a Q6_K file, which the GPU keeps in 8 bits, with activations in float16?
pictures: does `chat --image` read a HEIC file, by sips?
menu: is the item drawn, by uv's Python and by others, on macOS 14, 15 and 26?
quit: does the server end at logout, and when another program quits the menu?
login: does the menu start at login with the models of HF_HOME?
sleep: does `pmset -g assertions` name caffeinate during answers only?
ports: does `serve` refuse a port at which AirPlay or another program listens on all addresses?
names: do folders and saved chats whose names differ only in case stay apart, or is one refused?
terminal: do the tests that type into a terminal pass, which open the name of their stdout?
several Macs: does mlx.launch start ranks over Thunderbolt and Ethernet, and does --draft-rank pay?
formula: does `brew install` of the formula end without an error about linkage?
hosted runner: does the suite pass on its virtual GPU, or on its CPU alone?
closed lid: does a stream go on after a wake, for a client on this machine and on another?
""".splitlines()


def _to_answer() -> Iterator[str]:
    yield "please answer what you can of this, which only a Mac can tell:"
    for question in undecided():
        yield from textwrap.wrap(question, WIDTH, initial_indent="- ", subsequent_indent="  ")


def hiding(*models: str | None) -> Callable[[str], str]:
    """Return a function that replaces paths and the names of user and host in a text.

    `models` are names of models. Those that are paths are replaced whole: they may have spaces.
    """
    host = socket.gethostname()
    names = {getpass.getuser(), Path.home().name, host, host.partition(".")[0]}
    known = [name for name in models if name is not None and Path(name).expanduser().is_absolute()]
    folders = sorted({*known, str(Path.home()), os.getcwd()} - {"/"}, key=len, reverse=True)
    folder_pattern = "|".join(map(re.escape, folders)) or "(?!)"
    rest = r"(?:/[^\s/:,'\"]+)"
    path = re.compile(rf"(?:{folder_pattern}){rest}*/?|(?<![\w/])(?:~|\.{{1,2}})?{rest}+/?")
    name = "|".join(re.escape(name) for name in names if len(name) > 2)  # shorter ones are parts of words
    private = re.compile(rf"(?<!\w)(?:{name})(?!\w)" if name else r"(?!)")
    return lambda text: private.sub("(a name)", path.sub("(a path)", text))


main = program("report", Options, _run)
