"""Where messages come from: an editor of our own where the terminal and the packages allow it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Protocol

from mlx_spec.apps.chat.input import MORE, PROMPT, CommandCompleter, is_open
from mlx_spec.apps.chat.interrupts import Interrupts
from mlx_spec.apps.chat.settings import history_file, make_private
from mlx_spec.apps.chat.terminal import Terminal


class Lines(Protocol):
    """Reads messages from the user."""

    blocks: bool  # Enter begins a new line, and Alt-Enter sends

    def read(self) -> str:
        """A message. Raises EOFError, KeyboardInterrupt, and InvalidValue if it is not text."""
        ...


class Plain:
    """Line by line, as Python's own input() reads them."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self.blocks = False

    def read(self) -> str:
        """A message: one line, or all lines of a block, or with `blocks` all up to an empty one."""
        try:
            text = self._terminal.ask(PROMPT)
            while is_open(text) or (self.blocks and text.strip() and not text.endswith("\n")):
                text += "\n" + self._terminal.ask(MORE)
        except (EOFError, KeyboardInterrupt):
            self._terminal.newline()
            raise
        return text


def open_lines(
    terminal: Terminal, interrupts: Interrupts, completions: CommandCompleter, *, history: bool
) -> Lines:
    """An editor on the terminal, or what there is without."""
    if not (sys.stdin and sys.stdin.isatty() and terminal.has_screen):
        return Plain(terminal)
    try:
        from mlx_spec.apps.chat.input import LineEditor, is_dumb
    except ImportError:
        return Plain(terminal)
    if is_dumb():
        return Plain(terminal)
    return LineEditor(interrupts, completions, _history(terminal) if history else None)


def _history(terminal: Terminal) -> Path | None:
    file = history_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        make_private(file)
    except OSError as error:
        terminal.note(f"what you type is not kept: {file} cannot be written ({error.strerror})")
        return None
    return file
