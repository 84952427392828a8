"""Read and write small files; put sizes, names and errors into words."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from mlx_spec.errors import BadCheckpoint

AGAIN = "download or convert it again"
LOADING_ERRORS = (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OSError)  # of mlx-lm


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`. Raises BadCheckpoint for anything else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise BadCheckpoint(f"{file} is not valid JSON ({error}): {AGAIN}") from error
    except OSError as error:
        raise BadCheckpoint(f"{file} cannot be read ({error.strerror})") from error
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{file} holds a {type(value).__name__} where a JSON object belongs: {AGAIN}")
    return value


def read_pair(file: Path) -> tuple[str | None, str | None] | None:
    """Return the target and the drafter that a program wrote down, None without a readable file."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    match found:
        case {"target": str() | None as target, "drafter": str() | None as drafter}:
            return target, drafter
    return None


def write_atomically(file: Path, text: str) -> None:
    """Replace `file` by `text` at once, readable by its owner only. Raises OSError."""
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name[:100]}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(file)
    except BaseException:  # Ctrl-C too
        temporary.unlink(missing_ok=True)
        raise


def sha256(file: Path) -> str:
    """Return the hash of a file in hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def human_bytes(size: float) -> str:
    """Return a number of bytes as people read it: "3.6 GB"."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def shortened(names: list[str]) -> str:
    """Return the first three names and how many more there are."""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


def one_line(error: BaseException, limit: int = 300) -> str:
    """Return the text of an error on one line, cut to `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = f"no {text}" if isinstance(error, KeyError) else text
    return text if len(text) <= limit else text[: limit - 1] + "…"
