"""The manual: `mlx-spec help`, and the same pages in the README.

    python -m mlx_spec.apps.manual --write README.md    # between the two markers
    python -m mlx_spec.apps.manual --check README.md    # status 1 if that would change it

Pages are made from the parsers and not by them: the layout of argparse depends on the terminal and on Python.
"""

from __future__ import annotations

import argparse
import html
import os
import sys
import textwrap
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from mlx_spec.apps.command import ERROR, Parser, guarded
from mlx_spec.apps.programs import PROGRAMS, Group, Option, groups, options, parser_of
from mlx_spec.errors import InvalidValue, NotFound

BEGIN, END = "<!-- help -->", "<!-- end of help -->"
WIDTH = 92
INDENT = 7  # columns, as man has them
SHOWN = {"help": "show this page and leave", "version": "show the version and leave"}


def help_parser() -> Parser:
    """The options of `mlx-spec help`."""
    parser = Parser("help", "Explain a program, or list them all.", usage="%(prog)s [PROGRAM]")
    parser.add_argument(
        "program", metavar="PROGRAM", nargs="?", choices=sorted(PROGRAMS), help="the one to explain"
    )
    return parser


def help_main(arguments: Sequence[str] | None = None) -> int:
    """`mlx-spec help`. Returns its exit status."""
    wanted = help_parser().parse_args(arguments).program
    lines = overview() if wanted is None else page(wanted)

    def show() -> int:
        print("\n".join(lines), flush=True)
        return 0

    return guarded(show)


def overview() -> list[str]:
    """All programs, a line each."""
    width = max(map(len, PROGRAMS)) + 2
    lines = ["Lossless speculative decoding on MLX.", "", "usage: mlx-spec PROGRAM [options]", ""]
    lines += [f"  {name:{width}}{_summary(name)}" for name in PROGRAMS]
    return [*lines, "", "`mlx-spec help PROGRAM` explains its options, `mlx-spec --version` is the version."]


def page(name: str) -> list[str]:
    """The page of a program."""
    parser = parser_of(name)
    lines = ["NAME", *_filled(f"{parser.prog} - {_summary(name)}"), "", "SYNOPSIS", *_synopsis(parser)]
    lines += ["", "DESCRIPTION", *_filled(parser.description or "")]
    for group in groups(parser):
        lines += ["", *_section(group)]
    return [*lines, *(["", "EXIT STATUS", *_filled(_status(parser.epilog))] if parser.epilog else [])]


def written(readme: str) -> str:
    """`readme` with the pages between its markers. Raises InvalidValue unless each marker is there once."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise InvalidValue(f"the file must hold {BEGIN} and, after it, {END}, once each: put them in")
    before, rest = readme.split(BEGIN)
    return "".join([before, BEGIN, "\n", *_collapsible(), END, rest.split(END)[1]])


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m mlx_spec.apps.manual`. Returns its exit status: 1 if --check finds old pages."""
    parser = argparse.ArgumentParser(prog="python -m mlx_spec.apps.manual", description="Pages for a README.")
    ways = parser.add_mutually_exclusive_group(required=True)
    ways.add_argument("--write", metavar="FILE", type=Path, help="put the pages between the markers of FILE")
    ways.add_argument("--check", metavar="FILE", type=Path, help="only say whether FILE has them as they are")
    given = parser.parse_args(arguments)
    return guarded(lambda: _bring_up_to_date(given.write or given.check, writes=given.write is not None))


def _bring_up_to_date(file: Path, *, writes: bool) -> int:
    try:
        now = file.read_text(encoding="utf-8")
        then = written(now)
        if then != now and writes:
            temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex}.tmp")
            temporary.write_text(then, encoding="utf-8")
            os.replace(temporary, file)
    except OSError as error:
        raise NotFound(f"{file}: {error.strerror or error}") from error
    if then != now and not writes:
        way = f"python -m mlx_spec.apps.manual --write {file}"
        print(f"mlx-spec: the help in {file} is not that of the programs: run {way}", file=sys.stderr)
        return ERROR
    return 0


def _collapsible() -> Iterator[str]:
    for name in PROGRAMS:
        text = "\n".join(page(name))
        yield f"<details><summary><code>mlx-spec {name}</code>: {html.escape(_summary(name))}</summary>\n\n"
        yield f"```\n{text}\n```\n\n</details>\n"


def _summary(name: str) -> str:
    """The first sentence of its description."""
    text = " ".join((parser_of(name).description or "").split())
    first, _, _ = text.partition(". ")
    return first.rstrip(".")


def _synopsis(parser: argparse.ArgumentParser) -> list[str]:
    words = [word for option in options(parser) if (word := _usage(option))]
    first = textwrap.wrap(
        " ".join(words), WIDTH - INDENT - len(parser.prog) - 1, break_long_words=False, break_on_hyphens=False
    ) or [""]
    head, hang = " " * INDENT + parser.prog + " ", " " * (INDENT + len(parser.prog) + 1)
    lines = [(head if i == 0 else hang) + line for i, line in enumerate(first)]
    return [line.rstrip().replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _usage(option: Option) -> str:
    """How it is typed; its words stay together on a line."""
    if not option.names:
        shown = f"{option.value} ..." if option.repeats else f"{option.value}"
    else:
        shown = f"{option.names[-1]} {option.value}" if option.value else option.names[-1]
    if option.names[-1:] in (("--help",), ("--version",)):
        return ""
    shown = shown if option.required else f"[{shown}]"
    return shown.replace(" ", "\N{NO-BREAK SPACE}")


def _section(group: Group) -> Iterator[str]:
    yield {"positional arguments": "arguments"}.get(group.title, group.title).upper()
    if group.description:
        yield from _filled(group.description)
    for option in group.options:
        names = ", ".join(option.names)
        head = " ".join(word for word in (names, option.value) if word)
        yield " " * INDENT + head
        yield from _filled(_about(option), 2 * INDENT)


def _about(option: Option) -> str:
    """Its help; of two options that argparse makes, our own."""
    known = SHOWN.get(option.names[-1].removeprefix("--")) if option.names else None
    return known or option.help


def _status(epilog: str) -> str:
    return epilog.removeprefix("exit status: ").strip()


def _filled(text: str, indent: int = INDENT) -> list[str]:
    margin = " " * indent
    return textwrap.wrap(
        " ".join(text.split()),
        WIDTH,
        initial_indent=margin,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )


if __name__ == "__main__":
    sys.exit(main())
