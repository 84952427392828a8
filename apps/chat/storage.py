"""Where the program keeps what it remembers, and files that are written whole or not at all."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from mlx_spec.errors import InvalidValue

PRIVATE = 0o600


def history_file() -> Path:
    """What was typed, for the arrow keys."""
    from platformdirs import user_state_path

    return user_state_path("mlx_spec") / "chat_history"


def last_used_file() -> Path:
    """The pair used last."""
    from platformdirs import user_cache_path

    return user_cache_path("mlx_spec") / "last_chat.json"


def typed(name: str) -> Path:
    """The path that a user means. Raises InvalidValue for what can be none."""
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:
        raise InvalidValue(f"{name} is in the home of nobody: give a path without ~") from error
    if "\0" in name:
        raise InvalidValue("a path cannot hold a NUL: type it again")
    return path


def make_private(file: Path) -> None:
    """Make sure that `file` exists and that nobody else can read it. Raises OSError."""
    number = os.open(file, os.O_CREAT | os.O_APPEND | os.O_WRONLY, PRIVATE)
    try:
        os.fchmod(number, PRIVATE)
    finally:
        os.close(number)


def write_whole(file: Path, text: str) -> None:
    """All of it or nothing, for nobody else to read. Raises OSError."""
    temporary = file.with_name(f".{file.name[:100]}.{uuid.uuid4().hex}.tmp")
    try:
        make_private(temporary)
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    except BaseException:  # Ctrl-C too
        temporary.unlink(missing_ok=True)
        raise
