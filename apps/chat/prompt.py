"""What to answer, from the command line and stdin."""

from __future__ import annotations

import select
import sys

from mlx_spec.apps.chat.terminal import Terminal, checked
from mlx_spec.errors import InvalidValue

PATIENCE = 2.0  # seconds without a byte on stdin before we say what we wait for


def read_prompt(given: str | None, terminal: Terminal) -> str | None:
    """The prompt given, and below it what is piped in; None for a conversation. Raises InvalidValue."""
    piped = _piped_text(terminal)
    if given is None and piped is None:
        if sys.stdin is None:
            raise InvalidValue("stdin is closed, so nothing can be asked: leave it open, or use -p TEXT")
        return None
    text = "\n\n".join(part for part in ((given or "").strip(), (piped or "").strip()) if part)
    if not text:
        raise InvalidValue("the prompt is empty: give -p TEXT, or pipe text to stdin")
    return checked(text, "the prompt")


def _piped_text(terminal: Terminal) -> str | None:
    """All of stdin, or None when it is a terminal or closed. Raises InvalidValue if it is not text."""
    if sys.stdin is None or sys.stdin.isatty():
        return None
    if terminal.is_watched and not select.select([sys.stdin], [], [], PATIENCE)[0]:
        terminal.note("reading the prompt from stdin until its end; </dev/null if there is none")
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidValue(
            f"stdin is not UTF-8 (byte {error.object[error.start]:#04x} at {error.start}): pipe text only"
        ) from error
    except OSError as error:
        raise InvalidValue(f"cannot read stdin ({error.strerror}): pipe text, or use -p") from error
