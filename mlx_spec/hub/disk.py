"""Room on the disk, and folders that get their name when they are complete.

A run that is killed leaves a hidden folder that the next run for the same place removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from glob import escape
from pathlib import Path

from mlx_spec.errors import InvalidValue, NotFound, SpecError
from mlx_spec.hub.files import human_bytes

SPARE_BYTES = 1_000_000_000  # that must stay free on the disk
MARGIN = 1.05  # of the size of a download, for the file system
HF_HOME = "set HF_HOME to a folder on another disk"  # how to download elsewhere


class NoSpace(SpecError):
    """A disk that is too full for a download or a conversion."""


def default_folder() -> Path:
    """Return the folder of converted pairs."""
    from platformdirs import user_data_path

    return user_data_path("mlx_spec") / "models"


def check_space(name: str, missing: int, place: Path, way: str = HF_HOME) -> None:
    """Raise NoSpace unless `missing` bytes fit on the disk of `place` and some stay free.

    `way` is the way out beside making room.
    """
    free, needed = free_bytes(place), int(missing * MARGIN) + SPARE_BYTES
    if missing and free < needed:
        raise NoSpace(
            f"{name} needs {human_bytes(needed)} on the disk of {place}, {human_bytes(free)} are free: "
            f"make room there, or {way}"
        )


def free_bytes(place: Path) -> int:
    """Return the free bytes of the disk that holds `place`, which need not exist yet."""
    existing = next((folder for folder in (place, *place.parents) if folder.exists()), Path("/"))
    return shutil.disk_usage(existing).free


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a hidden folder that becomes `out` at the end, or goes on failure.

    Raises InvalidValue if `out` exists and is not empty, or another run is writing it, NotFound if its parent
    does not exist.
    """
    out = out.expanduser().absolute()
    refuse_existing(out)
    if not out.parent.is_dir():
        raise NotFound(f"there is no folder {out.parent}: create it, or give another place")
    with locked(out):
        for stale in out.parent.glob(f".{escape(out.name)}.partial-*"):
            shutil.rmtree(stale)
        partial = out.parent / f".{out.name}.partial-{os.getpid()}"
        partial.mkdir()
        try:
            yield partial
            for folder in (partial, *(path for path in partial.rglob("*") if path.is_dir())):
                _sync(folder)
            refuse_existing(out)
            partial.rename(out)
            _sync(out.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def refuse_existing(out: Path) -> None:
    """Raise InvalidValue unless `out` does not exist or is an empty folder."""
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise InvalidValue(f"{out} exists already: give another place, or remove it")


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the lock of `out`. The kernel frees it when a run dies, however it dies."""
    file = out.parent / f".{out.name}.lock"
    handle = _open_locked(file, out)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        os.close(handle)


def _open_locked(file: Path, out: Path) -> int:
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise InvalidValue(f"another run is writing {out}: wait for it, or give another place") from error
        # A run that just ended may have removed the file between the two calls.
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(handle).st_ino == file.stat().st_ino:
                return handle
        os.close(handle)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
