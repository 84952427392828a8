"""Shared by all programs: options through typer, one-line errors, exit statuses, tables.

A program declares its options as a dataclass: each field is annotated with `option` or `flag`, the docstring
is the help. `parse` fills the dataclass from a command line. `mlx_spec.apps.cli.PROGRAMS` names both.
"""

import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TextIO, TypeVar, cast

import typer
from typer.core import TyperOption
from typer.main import get_command

from mlx_spec import __version__
from mlx_spec.checkpoint.files import typed_path
from mlx_spec.device.blas import use_blas
from mlx_spec.errors import SpecError
from mlx_spec.hub.catalog import DEMO, Exact, PairSpec
from mlx_spec.hub.names import known_names, resolve

ERROR, INTERRUPTED = 1, 130  # 2 is a bad option, 130 is 128 + SIGINT
STATUSES = "Exit status: 0; 1 on an error, 2 on a bad option, 130 when interrupted."
CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}

MODEL = "REPO_OR_FOLDER"  # the value of --target and --drafter
MODEL_PANEL = "Model"  # of help pages
T = TypeVar("T")


class BadOptions(typer.TyperException):
    """Options that make no sense together; the text says what to give instead."""


def option(
    *names: str,
    help: str,
    value: str | None = None,
    default: str | None = None,
    panel: str | None = None,
    **settings: Any,
) -> Any:
    """Declare an option that takes a value; `default` is shown instead of the default value."""
    return typer.Option(
        *names, metavar=value, help=help, show_default=default or True, rich_help_panel=panel, **settings
    )


def flag(name: str, help: str, panel: str | None = None, **settings: Any) -> Any:
    """Declare an option without a value."""
    return option(name, value=" ", help=help, panel=panel, **settings)


def _show_version(wanted: bool) -> bool:
    if wanted:
        print(f"mlx-spec {__version__}")
        raise typer.Exit
    return wanted


Version = Annotated[
    bool, flag("--version", "Show the version and exit.", is_eager=True, callback=_show_version)
]
Json = Annotated[bool, flag("--json", "print one JSON object")]
NoEarlierAnswers = Annotated[
    bool, flag("--no-earlier-answers", "draft nothing from earlier answers, and keep none", MODEL_PANEL)
]
KvBits = Annotated[
    Literal[4, 8] | None, option(help="quantize the KV cache", default="do not", panel=MODEL_PANEL)
]


def _model_names(begun: str) -> list[str]:
    """Return the models that a shell offers after Tab."""
    return [name for name in known_names() if name.startswith(begun)]


@dataclass(frozen=True)
class PairOptions:
    """The target and the drafter of a program, by name.

    Options that inherit from it import every annotation from here: this file evaluates them at once.
    """

    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="the same as --target", autocompletion=_model_names),
    ] = None
    target: Annotated[
        str | None,
        option(
            value=MODEL,
            help="model that answers: a name of `mlx-spec models`, owner/name, folder or GGUF file",
            default="the small bundled demo; in chat the pair used last",
            panel=MODEL_PANEL,
            autocompletion=_model_names,
        ),
    ] = None
    drafter: Annotated[
        str | None,
        option(
            value=MODEL,
            help='model that drafts; "lookup" copies from the text so far, "none" is plain decoding',
            default="the one made for the target, if there is one",
            panel=MODEL_PANEL,
        ),
    ] = None
    mlx_blas: Annotated[
        bool, flag("--mlx-blas", "on Linux, multiply with the slow BLAS that MLX brings", MODEL_PANEL)
    ] = False

    def __post_init__(self) -> None:
        if self.model is not None and self.target is not None:
            raise BadOptions("a model as an argument and --target: give one of them")

    @property
    def chosen(self) -> str | None:
        """Return the target, given either way; None if there is none."""
        return self.model if self.target is None else self.target

    def check_name(self) -> None:
        """Raise NotFound if no target has that name. Needs no MLX."""
        if self.chosen is not None:
            resolve(self.chosen)

    @property
    def spec(self) -> PairSpec:
        """Return the pair to load; the demo if no target is given. An empty name stays, and is refused."""
        return PairSpec(DEMO if self.chosen is None else self.chosen, self.drafter)


@dataclass(frozen=True)
class LoadOptions(PairOptions):
    """The target, the drafter, and how they are loaded."""

    num_draft_tokens: Annotated[
        int | None,
        option(
            value="K",
            help="draft tokens in each round; 0 turns speculation off",
            default="what pays",
            panel=MODEL_PANEL,
            min=0,
        ),
    ] = None
    kv_bits: KvBits = None
    exact: Annotated[
        Exact,
        option(
            help="let drafts change no bit in half precision: where that costs at most 5 % of plain speed, "
            "always, never, or by activations in float32",
            panel=MODEL_PANEL,
        ),
    ] = "auto"
    ahead: Annotated[
        bool,
        flag(
            "--ahead",
            "without a GPU: also draft while the target verifies, as long as that is measured to pay",
            MODEL_PANEL,
        ),
    ] = False

    @property
    def spec(self) -> PairSpec:
        return replace(
            super().spec,
            num_draft_tokens=self.num_draft_tokens,
            kv_bits=self.kv_bits,
            ahead=self.ahead,
            exact=self.exact,
        )


def parse(options: Callable[..., T], program: str, arguments: Sequence[str] | None, **settings: Any) -> T:
    """Return the options of a command line, as `options` makes them of its annotated parameters.

    Raises SystemExit: with status 2 and one line on stderr for a bad option, with 0 after --help.
    `settings` are typer's for a command.
    """
    app = typer.Typer(add_completion=False)
    app.command(program, epilog=STATUSES, **settings)(options)
    parsed = cast(T, run_app(app, f"mlx-spec {program}", arguments))
    if isinstance(parsed, PairOptions) and parsed.mlx_blas:
        use_blas(optimized=False)
    return parsed


def program(
    name: str, options: Callable[..., T], run: Callable[[T], int]
) -> Callable[[Sequence[str] | None], int]:
    """Return the `main` of a program, which parses a command line and returns the exit status of `run`.

    A SpecError is one line on stderr and status 1. A bad command line raises SystemExit with status 2.
    """

    def main(arguments: Sequence[str] | None = None) -> int:
        parsed = parse(options, name, arguments)

        def checked() -> int:
            if isinstance(parsed, PairOptions):
                parsed.check_name()
            return run(parsed)

        return guarded(checked)

    return main


def run_app(app: typer.Typer, name: str, arguments: Sequence[str] | None) -> object:
    """Parse a command line and return what the callback returns. Raises SystemExit as `parse` does."""
    command = tidied(get_command(app))
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        with command.make_context(name, words) as context:
            return command.invoke(context)
    except typer.Exit as done:
        raise SystemExit(done.exit_code) from None
    except typer.TyperException as error:
        refuse(name, error.format_message().replace("Value error, ", ""))


def tidied(command: Any) -> Any:
    """Return a typer command whose help page folds its paragraphs and gives no flag a value."""
    command.help = "\n\n".join(" ".join(text.split()) for text in (command.help or "").split("\n\n"))
    for option in (*command.params, command.get_help_option(typer.Context(command))):
        if isinstance(option, TyperOption) and option.is_flag and option.metavar is None:
            option.metavar = " "
    return command


def refuse(name: str, problem: str) -> NoReturn:
    """Exit with status 2 and one line on stderr: the problem, and where help is."""
    text = " ".join(problem.split()).removesuffix(".")
    tell(f"{text[:1].lower()}{text[1:]} (see {name} --help)")
    raise SystemExit(2)


def expanded(value: Path | None) -> Path | None:
    """Return the path of an option, with ~ expanded, which some shells leave. Raises InvalidValue."""
    return None if value is None else typed_path(value)


def above_zero(value: float | None) -> float | None:
    """Return the value of an option. Raises BadParameter unless it is a finite number above 0."""
    if value is not None and not 0 < value < float("inf"):
        raise typer.BadParameter("give a number above 0")
    return value


def guarded(run: Callable[[], int]) -> int:
    """Return the exit status of `run`; 130 for Ctrl-C.

    A SpecError or an error of the system, such as a full disk, is one line on stderr and status 1. A closed
    pipe is 0: a reader such as `head` has seen enough.
    """
    _prepare_streams()
    try:
        status = run()
        print(end="", flush=True)
        return status
    except SpecError as error:
        tell(error)
        return ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # a reader such as `head` has seen enough
        drop(sys.stdout)
        return 0
    except OSError as error:
        file = error.filename
        if file is None and isinstance(error, FileNotFoundError):
            file = "the working folder"  # it was removed
        elif file is None:
            file = "stdout"
            drop(sys.stdout)
        tell(f"{file}: {error.strerror or error}: make room there, or give another place")
        return ERROR


def _prepare_streams() -> None:
    """Write "?" for what a stream cannot encode; send what goes to a closed stderr to nowhere."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # takes the numbers of standard files that are closed, so that no other file gets them
    os.close(number)
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def drop(stream: TextIO | None) -> None:
    """Discard the rest of a stream's buffer, which the interpreter flushes when it exits."""
    if stream is not None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def show(*lines: str) -> None:
    """Print lines to stdout without control characters: a model must not steer the terminal."""
    print("\n".join(lines).translate(CONTROLS), flush=True)


def show_folded(*lines: str) -> None:
    """Print lines; on a terminal long ones are folded between words, below the text after their label."""
    if sys.stdout is None or not sys.stdout.isatty():
        return show(*lines)
    width = shutil.get_terminal_size().columns
    for line in lines:
        label = re.match(r".{0,32}\S {2,}|\s*", line)
        indent = len(label[0]) if label and len(label[0]) < width // 2 else 2
        show(folded(line, width, " " * indent))


def folded(line: str, columns: int, indent: str = "") -> str:
    """Return a line that is folded between words if it is longer; the rest begins with `indent`."""
    if len(line) <= columns:
        return line
    return textwrap.fill(
        line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def note(line: str) -> None:
    """Print a line to stderr; do nothing if it is closed."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        drop(sys.stderr)


def tell(what: object) -> None:
    """Print an error or a message on stderr, as one line without control characters."""
    line = f"mlx-spec: {' '.join(str(what).splitlines())}".translate(CONTROLS)
    if sys.stderr is not None and sys.stderr.isatty():  # fold between words on a terminal only
        line = folded(line, shutil.get_terminal_size().columns)
    note(line)


def table(
    rows: Sequence[Sequence[str]], right: Sequence[int] = (), optional: Sequence[int] = ()
) -> list[str]:
    """Return the lines of a table; the columns in `right` are aligned to the right, their words whole.

    On a terminal columns in `optional` are left out, the last ones first, until all fit. Long cells are
    wrapped within their column. If columns would hold only a few letters, each row becomes a line of its
    first cell, and a line of the others.
    """
    from rich.console import Console
    from rich.table import Table

    is_watched = sys.stdout is not None and sys.stdout.isatty()
    pipe_columns = 10_000  # width of a table that no terminal shows: rows are not wrapped
    console = Console(width=None if is_watched else pipe_columns, markup=False, highlight=False, emoji=False)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    shown = list(range(len(widths)))
    for column in reversed(optional):
        if sum(widths[i] + 2 for i in shown) - 2 > console.width:
            shown.remove(column)
    right, rows = [shown.index(i) for i in right if i in shown], [[row[i] for i in shown] for row in rows]
    widths = [widths[i] for i in shown]
    if sum(widths) + 2 * len(widths) > 1.6 * console.width:
        wrap = partial(textwrap.wrap, width=console.width, initial_indent="  ", subsequent_indent="  ")
        return [line for row in rows for line in (row[0], *wrap(" · ".join(filter(None, row[1:]))))]
    grid = Table.grid(padding=(0, 2))
    for column in range(len(rows[0])):
        words = [len(word) for row in rows for word in row[column].split()]
        is_narrow = column in right and sum(widths) + 2 * len(widths) - 2 > console.width
        width = max(words, default=0) if is_narrow else None
        grid.add_column(justify="right" if column in right else "left", overflow="fold", width=width)
    for row in rows:
        grid.add_row(*row)
    with console.capture() as capture:
        console.print(grid)
    return [line.rstrip() for line in capture.get().splitlines()]
