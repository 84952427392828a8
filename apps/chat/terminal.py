"""Text in and out: the answer on stdout, everything else on stderr. No escape codes but on a terminal."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO

from mlx_spec.apps.chat.interrupts import heeded
from mlx_spec.apps.chat.markdown import rendered, rows
from mlx_spec.errors import InvalidValue, SpecError

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
# A model must not steer the terminal: no control characters but tab and newline.
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}


class OutputClosed(SpecError):
    """Nobody reads the answer any more."""


class ReaderLeft(OutputClosed):
    """Whoever read the answer, such as `head`, has seen enough."""


class Terminal:
    """Both output streams, and what is known about the current line on stdout."""

    def __init__(self) -> None:
        _occupy_standard_files()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        self.shows_thinking = _is_terminal(sys.stdout)  # in a pipe there is only the answer
        self.is_watched = _is_terminal(sys.stderr)
        self._dims_answer, self._dims_notes = _has_styles(sys.stdout), _has_styles(sys.stderr)
        self._kind = ""  # of the last piece of this answer
        self._shown = ""  # all of that kind
        self._size: os.terminal_size | None = None  # when it began
        self._fresh_line = True

    @property
    def has_screen(self) -> bool:
        """Whether the user sees what is written on one of the streams."""
        return self.shows_thinking or self.is_watched

    @property
    def has_styles(self) -> bool:
        """Whether answers may have colours."""
        return self._dims_answer

    def piece(self, text: str, kind: str, style: str = "") -> None:
        """Show one piece of an answer at once, in an SGR style where there are any. Raises OutputClosed."""
        if not text or (kind == "thinking" and not self.shows_thinking):
            return
        if kind != self._kind:
            self._start(kind)
        self._write(text, ";".join([*(["2"] if kind == "thinking" else []), *([style] if style else [])]))

    def end(self, *, interrupted: bool = False) -> None:
        """End the answer and its line, which is not empty after a Ctrl-C. Raises OutputClosed."""
        if not self._fresh_line:
            self._write("\n")
        elif interrupted and self.is_watched:
            self.newline()
        self._kind = ""

    def render(self) -> None:
        """Show the last part of an ended answer again, as its Markdown is meant. Raises OutputClosed.

        Only where that changes it and all of it is still on the screen, which has the size it had.
        """
        shown, size = self._shown, self._size
        if not self._dims_answer or size is None or size != _size(sys.stdout):
            return
        new = rendered(shown)
        height = rows(shown.removesuffix("\n"), size.columns)
        if new == shown or height is None or height >= size.lines:
            return
        self._put(f"\x1b[{height}A\x1b[J{new}")

    def note(self, text: str) -> None:
        """A line for the user that is not part of the answer."""
        _say(f"{DIM}{text}{PLAIN}" if self._dims_notes else text)

    def styled(self, parts: Sequence[tuple[str, str]]) -> None:
        """A line for the user, of texts with an SGR style each."""
        texts = [
            f"\x1b[{style}m{text}{PLAIN}" if style and self._dims_notes else text for text, style in parts
        ]
        _say("".join(texts))

    def error(self, error: Exception) -> None:
        """One line that says what went wrong. Gives up on a stdout that is closed."""
        if isinstance(error, OutputClosed):
            self.drop()
        elif not self._fresh_line:
            self.end()
        _say(f"mlx-spec: {' '.join(str(error).split())}")

    def ask(self, prompt: str) -> str:
        """A line from the user, with editing. Raises EOFError, and InvalidValue if it is not text."""
        _edit_lines()
        if not _is_terminal(sys.stdout):  # then input() would put the prompt into the answers
            print(prompt, end="", file=sys.stderr, flush=True)
            prompt = ""
        try:
            with heeded():
                return checked(input(prompt), "this line")
        except UnicodeDecodeError as error:
            raise InvalidValue("this line is not UTF-8 text: type it again") from error

    def drop(self) -> None:
        """Give up on a stdout that is closed."""
        _drop(sys.stdout)

    def newline(self) -> None:
        """Leave the line of the prompt."""
        _say("")

    def _start(self, kind: str) -> None:
        if not self._fresh_line:
            self._write("\n")
        if kind == "thinking" and not self._dims_answer:
            self._write("(thinking)\n")
        elif self._kind == "thinking":
            self._write("\n" if self._dims_answer else "(answer)\n")
        self._kind, self._shown = kind, ""
        self._size = _size(sys.stdout) if kind == "answer" else None

    def _write(self, text: str, style: str = "") -> None:
        if self.shows_thinking:
            text = text.translate(_CONTROLS)
        if not text:
            return
        self._put(f"\x1b[{style}m{text}{PLAIN}" if style and self._dims_answer else text)
        self._shown += text
        self._fresh_line = text.endswith("\n")

    def _put(self, text: str) -> None:
        if sys.stdout is None:
            raise OutputClosed("stdout is closed, so the answer has nowhere to go: leave it open")
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError as error:
            raise ReaderLeft(f"cannot write to stdout ({error.strerror}): the answer stops here") from error
        except OSError as error:
            raise OutputClosed(f"cannot write to stdout ({error.strerror}): the answer stops here") from error


def checked(text: str, name: str) -> str:
    """The text, if every character of it is one. Raises InvalidValue otherwise."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidValue(f"{name} is not valid text at character {error.start}: give UTF-8") from error
    return text


def _edit_lines() -> None:
    with suppress(ImportError):
        import readline  # input() uses it

        # Several lines pasted at once are one message. Python switches that off.
        readline.parse_and_bind("set enable-bracketed-paste on")


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def _has_styles(stream: TextIO | None) -> bool:
    return _is_terminal(stream) and not os.environ.get("NO_COLOR", "")


def _size(stream: TextIO | None) -> os.terminal_size | None:
    """None where there is no terminal."""
    try:
        return os.get_terminal_size(stream.fileno()) if stream is not None else None
    except (OSError, ValueError):
        return None


def _say(line: str) -> None:
    if sys.stderr is None:
        return
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        _drop(sys.stderr)


def _drop(stream: TextIO | None) -> None:
    """Send what is still buffered to nowhere: the interpreter flushes once more as it leaves."""
    if stream is not None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _occupy_standard_files() -> None:
    """Put nothing where stdin, stdout or stderr is closed, or the next file to be opened gets its number."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
