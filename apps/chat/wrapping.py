"""Lines of answers and messages on a terminal: where they end, and how many rows they take."""

from __future__ import annotations

import re
import textwrap

from rich.cells import cell_len, chop_cells

PLAIN = "0"  # the SGR parameter that ends a style
FENCES = ("```", "~~~")
WIDE = "\u2e80-\ua4cf\uac00-\ud7af\uf900-\ufaff\uff01-\uff60"  # Chinese, Japanese and Korean: a word each
WORDS = re.compile(f"\n| +|[{WIDE}]|[^ \n{WIDE}]+")
# Terminals disagree about the width of joined emoji; that of a tab depends on its column.
UNSURE_WIDTH = re.compile("[\t\u200d\ufe0e\ufe0f\U0001f1e6-\U0001f1ff\U0001f3fb-\U0001f3ff]")


class Wrapping:
    """Breaks the lines of an answer between words while they are written, except in fenced code.

    A word is shown at once; if it reaches the edge, its beginning moves to the next line.
    """

    def __init__(self) -> None:
        self.shown = ""  # the text with the line breaks that were added
        self._line = ""  # without them
        self._column = 0
        self._word: list[tuple[str, str]] = []  # its pieces and their styles
        self._in_code = False

    def add(self, text: str, style: str, columns: int) -> str:
        """Return what to write for more text; 0 columns: their number is not known."""
        return "".join(self._part(part, style, columns) for part in WORDS.findall(text))

    def _part(self, part: str, style: str, columns: int) -> str:
        if part == "\n":
            self._in_code ^= self._line.lstrip().startswith(FENCES)
            self.shown += part
            self._line, self._column, self._word = "", 0, []
            return part
        self._line += part
        if not columns or self._in_code or UNSURE_WIDTH.search(self._line):
            self.shown += part
            return in_style(part, style)
        if part[0] == " ":
            part = part[: max(columns - self._column, 0)]
            self._word = []
        elif cell_len(part) == 2 * len(part):
            self._word = []
        return self._fit(part, style, columns)

    def _fit(self, part: str, style: str, columns: int) -> str:
        moved, width = "".join(piece for piece, _ in self._word), cell_len(part)
        begun = cell_len(moved)
        codes = ""
        if self._column + width > columns and self._column > begun and begun + width <= columns:
            codes = f"\x1b[{self._column - begun + 1}G\x1b[K" if begun else ""
            codes += "\n" + "".join(in_style(*piece) for piece in self._word)
            self.shown = self.shown[: len(self.shown) - len(moved)] + "\n" + moved
            self._column = begun
        self.shown += part
        self._column = (self._column + width - 1) % columns + 1 if self._column + width else 0
        self._word = [*self._word, (part, style)] if part.strip(" ") else []
        return codes + in_style(part, style)


def in_style(text: str, style: str) -> str:
    """Return the text between escape codes, if it has a style."""
    return f"\x1b[{style}m{text}\x1b[{PLAIN}m" if style and text else text


def folded(text: str, columns: int) -> str:
    """Return a message whose lines end between words."""
    return "\n".join(
        textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False)
        if len(line) > columns
        else line
        for line in text.split("\n")
    )


def rows(text: str, columns: int) -> int | None:
    """Return how many rows of a terminal the text takes; None if that is uncertain."""
    if UNSURE_WIDTH.search(text) or columns < 1:
        return None
    return sum(max(len(chop_cells(line, columns)), 1) for line in text.split("\n"))
