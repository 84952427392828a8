"""Read and write text: answers on stdout, everything else on stderr. Escape codes go to terminals only.

Tokens are written one by one with the codes of their colours, because rich would wrap each piece separately.
"""

from __future__ import annotations

import io
import os
import re
import select
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import TYPE_CHECKING, TextIO

from prompt_toolkit.utils import is_dumb_terminal
from rich.cells import cell_len, chop_cells

from mlx_spec.cli.command import CONTROLS, folded, note
from mlx_spec.errors import InvalidValue

if TYPE_CHECKING:
    from rich.status import Status

    from mlx_spec.tokenizer.stream import TokenText

# Parameters of SGR escape codes, with the 256-colour palette. Text of the target has no colour.
DIM = "2"
DRAFTED = ("38;5;34", "38;5;36", "38;5;38", "38;5;33", "38;5;63")  # by position; the last also for later ones
COPIED, FORCED = "38;5;172", "38;5;170"
GAINED = "32"  # green from the terminal's palette, which fits its background
BORDER = "│"  # between two rounds

# Each character of Chinese, Japanese or Korean counts as a word.
WORDS = re.compile(
    "\n| +|[\u2e80-\ua4cf\uac00-\ud7af\uf900-\ufaff\uff01-\uff60]"
    "|[^ \n\u2e80-\ua4cf\uac00-\ud7af\uf900-\ufaff\uff01-\uff60]+"
)
# Terminals disagree about the width of joined emoji; the width of a tab depends on its column.
UNSURE_WIDTH = re.compile("[\t\u200d\ufe0e\ufe0f\U0001f1e6-\U0001f1ff\U0001f3fb-\U0001f3ff]")


class Terminal:
    """Both output streams, and what is known about the current line on stdout."""

    def __init__(self) -> None:
        self.shows_thinking = _is_terminal(sys.stdout)  # a pipe gets the answer only
        self.is_watched = _is_terminal(sys.stderr)
        self.has_styles = _has_styles(sys.stdout)
        self._moves = self.shows_thinking and not is_dumb_terminal()
        self._dims_notes = _has_styles(sys.stderr)
        self.renders = False  # True: replace each complete block of an answer by its rendered Markdown
        self._kind = ""  # of the last piece of this answer
        self._wrapping = Wrapping()  # of the text of that kind that is not rendered yet
        self._size: os.terminal_size | None = None  # of the terminal when the answer began

    def piece(self, text: str, kind: str, style: str = "") -> None:
        """Show a piece of an answer at once, in an SGR style if there are styles. Raises OSError."""
        if not text or (kind == "thinking" and not self.shows_thinking):
            return
        if kind != self._kind:
            self._start(kind)
        self._write(text, ";".join(code for code in (DIM if kind == "thinking" else "", style) if code))
        if self.renders and self._size is not None and "\n" in text and not self._wrapping.in_code:
            from .markdown import finished

            is_high = self._wrapping.shown.count("\n") > self._size.lines / 2
            self._render(*finished(self._wrapping.text, splits_lists=is_high))

    def end(self, *, interrupted: bool = False) -> None:
        """End the answer and its line; after Ctrl-C the terminal has written "^C" there. Raises OSError."""
        if self._wrapping.line:
            self._write("\n")
        elif interrupted and self.is_watched:
            self.note("")
        self._kind = ""

    def render(self) -> None:
        """Replace the last blocks of an ended answer by their rendered Markdown. Raises OSError."""
        from .markdown import finished

        if self._size is not None and self._wrapping.shown.count("\n") >= self._size.lines:
            self._render(*finished(self._wrapping.text, splits_lists=True))
        self._render(self._wrapping.text, "", False)

    def _render(self, text: str, rest: str, is_parted: bool) -> None:
        """Replace blocks on the screen by their rendered Markdown, and write `rest` again after them.

        Nothing changes if the text has no Markdown, if it may have left the screen, or if the terminal was
        resized.
        """
        from .markdown import rendered

        size = self._size
        if not text or not self.has_styles or size is None or size != _size(sys.stdout):
            return
        shown, self._wrapping = self._wrapping.shown, Wrapping()
        again = self._wrapping.add(rest, "", size.columns)
        height = rows(shown, size.columns)
        if height is None or height > size.lines:
            return
        if (new := rendered(text, size.columns)) is not None:
            up = f"\x1b[{height - 1}A" if height > 1 else ""
            gap = "\n" if is_parted else ""
            self._put(f"\r{up}\x1b[J{new}{gap}{again}")

    def note(self, *lines: str) -> None:
        """Show lines that are not part of the answer."""
        for line in lines:
            self.styled([(self._folded(line), DIM)])

    def styled(self, pieces: Sequence[tuple[str, str]]) -> None:
        """Show a line that is made up of texts with SGR styles."""
        texts = ((text.translate(CONTROLS), style if self._dims_notes else "") for text, style in pieces)
        note("".join(in_style(*each) for each in texts))

    @contextmanager
    def working(self, text: str) -> Iterator[None]:
        """Show a spinner within the context, if stderr is a terminal that can move its cursor.

        Progress lines that are written to stderr meanwhile appear beside the spinner.
        """
        if not (self.is_watched and self._moves):
            yield
            return
        from rich.console import Console

        console = Console(file=sys.stderr, highlight=False)  # the real stderr, before it is redirected
        spinner = console.status(text, spinner="dots", spinner_style="none")
        with spinner, redirect_stderr(_BesideSpinner(spinner, sys.stderr)):
            yield

    def error(self, error: Exception) -> None:
        if self._wrapping.line:
            self.end()
        self.styled([(self._folded(f"mlx-spec: {' '.join(str(error).split())}"), "")])

    def ask(self, prompt: str) -> str:
        """Return a line of the user. Raises EOFError, and InvalidValue if it is not text."""
        # input() would write the prompt to stdout, among the answers, if stdout is a pipe.
        stream = sys.stdout if _is_terminal(sys.stdout) else sys.stderr
        print(prompt, end="", file=stream, flush=True)
        # Python handles signals between these short waits, but not within input(). So a Ctrl-C that comes
        # just before it is handled within 0.1 s.
        while _is_terminal(sys.stdin) and not select.select([sys.stdin], [], [], 0.1)[0]:
            pass
        try:
            return checked(input(), "this line")
        except UnicodeDecodeError as error:
            raise InvalidValue("this line is not UTF-8 text: type it again") from error

    def _folded(self, text: str) -> str:
        size = _size(sys.stderr) if self.is_watched else None
        if size is None or size.columns < 1:
            return text
        return "\n".join(folded(line, size.columns) for line in text.split("\n"))

    def _start(self, kind: str) -> None:
        if self._wrapping.line:
            self._write("\n")
        if kind == "thinking" and not self.has_styles:
            self._write("(thinking)\n")
        elif self._kind == "thinking":
            self._write("\n" if self.has_styles else "(answer)\n")
        self._kind, self._wrapping = kind, Wrapping()
        self._size = _size(sys.stdout) if kind == "answer" else None

    def _write(self, text: str, style: str = "") -> None:
        if sys.stdout is None:
            raise InvalidValue("stdout is closed, so the answer has nowhere to go: leave it open")
        if self.shows_thinking:
            text = text.translate(CONTROLS)
        columns = size.columns if self._moves and (size := _size(sys.stdout)) else 0
        self._put(self._wrapping.add(text, style if self.has_styles else "", columns))

    def _put(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


# --- colours


def origin_style(span: TokenText) -> str:
    """Return the SGR style of a span by the origin of its token."""
    match span.source:
        case None:
            return ""
        case "grammar":
            return FORCED
        case "lookup" | "earlier":
            return COPIED
    return DRAFTED[min(span.position, len(DRAFTED)) - 1]


def legend() -> list[tuple[str, str]]:
    """Return texts with their SGR styles that explain the colours of `origin_style`."""
    return [
        ("target ", ""),
        (f"{BORDER} ", DIM),
        ("drafted at position", DRAFTED[0]),
        *((f" {position}", style) for position, style in enumerate(DRAFTED, 1)),
        ("+", DRAFTED[-1]),
        (f" {BORDER} ", DIM),
        ("copied from the text or earlier answers", COPIED),
        (f" {BORDER} ", DIM),
        ("forced by the grammar", FORCED),
        (f"   {BORDER} ends a round", DIM),
    ]


# --- wrapping lines, and counting the rows that they take


class Wrapping:
    """Wraps the lines of an answer at words while they are written, except in fenced code.

    A word is shown at once. If it then reaches the edge, its beginning moves to the next line.
    """

    def __init__(self) -> None:
        self.text = ""
        self.shown = ""  # the text with the line breaks that were added
        self.line = ""  # the last line of the text
        self._column = 0
        self._word: list[tuple[str, str]] = []  # the last word: its pieces and their styles
        self.in_code = False

    def add(self, text: str, style: str, columns: int) -> str:
        """Return what to write for more text. With 0 columns, for an unknown width, nothing is wrapped."""
        self.text += text
        return "".join(self._piece(piece, style, columns) for piece in WORDS.findall(text))

    def _piece(self, piece: str, style: str, columns: int) -> str:
        if piece == "\n":
            self.in_code ^= self.line.lstrip().startswith(("```", "~~~"))
            self.shown += piece
            self.line, self._column, self._word = "", 0, []
            return piece
        self.line += piece
        if not columns or self.in_code or UNSURE_WIDTH.search(self.line):
            self.shown += piece
            return in_style(piece, style)
        if piece[0] == " ":
            piece = piece[: max(columns - self._column, 0)]
            self._word = []
        elif cell_len(piece) == 2 * len(piece):
            self._word = []
        return self._fit(piece, style, columns)

    def _fit(self, piece: str, style: str, columns: int) -> str:
        moved, width = "".join(text for text, _ in self._word), cell_len(piece)
        begun = cell_len(moved)
        codes = ""
        if self._column + width > columns and self._column > begun and begun + width <= columns:
            codes = f"\x1b[{self._column - begun + 1}G\x1b[K" if begun else ""
            codes += "\n" + "".join(in_style(*styled) for styled in self._word)
            self.shown = self.shown[: len(self.shown) - len(moved)] + "\n" + moved
            self._column = begun
        self.shown += piece
        self._column = (self._column + width - 1) % columns + 1 if self._column + width else 0
        self._word = [*self._word, (piece, style)] if piece.strip(" ") else []
        return codes + in_style(piece, style)


def in_style(text: str, style: str) -> str:
    """Return the text between escape codes, if it has a style."""
    return f"\x1b[{style}m{text}\x1b[0m" if style and text else text


def rows(text: str, columns: int) -> int | None:
    """Return how many rows of a terminal the text takes; None if that is uncertain."""
    if UNSURE_WIDTH.search(text) or columns < 1:
        return None
    return sum(max(len(chop_cells(line, columns)), 1) for line in text.split("\n"))


# --- streams


def checked(text: str, name: str) -> str:
    """Return the text. Raises InvalidValue if it is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidValue(f"{name} is not valid text at character {error.start}: give UTF-8") from error
    return text


class _BesideSpinner(io.TextIOBase):
    """Stderr with a spinner: lines that are rewritten with "\\r" appear beside it, others above it."""

    def __init__(self, spinner: Status, above: TextIO) -> None:
        self._spinner, self._above = spinner, above
        self._is_rewritten = False  # True if the last line was written with "\r"

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if "\r" in text:
            from rich.text import Text

            self._spinner.update(Text(text.rpartition("\r")[2].strip()))
        elif text != "\n" or not self._is_rewritten:  # the end of a rewritten line needs no line above
            self._above.write(text)
        self._is_rewritten = "\r" in text
        return len(text)


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def _has_styles(stream: TextIO | None) -> bool:
    return _is_terminal(stream) and not os.environ.get("NO_COLOR") and not is_dumb_terminal()


def _size(stream: TextIO | None) -> os.terminal_size | None:
    try:
        return os.get_terminal_size(stream.fileno()) if stream is not None else None
    except (OSError, ValueError):
        return None
