"""The log of the server: rotated by copying, because the server holds the file open."""

from __future__ import annotations

import shutil
from pathlib import Path

LARGEST = 2**20  # bytes
KEPT = 3  # older files beside the one that is written
TAIL = 4096  # bytes looked at for the last words
OURS = "mlx-spec: "


def rotate(file: Path) -> None:
    """Move what is in the log on to the next older one, if it is large.

    Whoever writes to it must append: its next line then goes to the start of the emptied file. A line that is
    written between the copy and the cut is lost.
    """
    if not file.exists() or file.stat().st_size <= LARGEST:
        return
    for age in range(KEPT - 1, 0, -1):
        older = _aged(file, age)
        if older.exists():
            older.replace(_aged(file, age + 1))
    shutil.copyfile(file, _aged(file, 1))
    with file.open("r+b") as stream:
        stream.truncate()


def last_words(file: Path, begin: int) -> str | None:
    """The last line that the server wrote for its user, in what it wrote from byte `begin` on."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(min(begin, size), size - TAIL))
            lines = stream.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return None
    ours = [line.removeprefix(OURS) for line in lines if line.startswith(OURS)]
    return ours[-1] if ours else None


def size(file: Path) -> int:
    """Bytes; 0 if there is no such file."""
    return file.stat().st_size if file.exists() else 0


def _aged(file: Path, age: int) -> Path:
    return file.with_name(f"{file.stem}.{age}{file.suffix}")
