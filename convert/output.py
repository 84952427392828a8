"""The folder of a new pair: written under a hidden name beside its place, and renamed when it is complete.

A run that is killed leaves a hidden folder that the next run for the same place removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from mlx_spec.convert.progress import shown_size
from mlx_spec.errors import InvalidValue, NotFound
from mlx_spec.hub import NoSpace

MARGIN, SPARE = 1.02, 1 << 26  # of what is needed, and bytes: for small files and the file system's own


@contextlib.contextmanager
def writing(out: Path) -> Iterator[Path]:
    """A hidden folder that becomes `out` at the end of the block, and is removed if the block fails.

    Raises InvalidValue where `out` exists and is not empty, or another run is writing it, NotFound where its
    parent does not exist.
    """
    out = out.expanduser().absolute()
    refuse_existing(out)
    if not out.parent.is_dir():
        raise NotFound(f"there is no folder {out.parent}: create it, or give another place for the pair")
    with _locked(out):
        for stale in out.parent.glob(f".{_escaped(out.name)}.partial-*"):
            shutil.rmtree(stale)
        partial = out.parent / f".{out.name}.partial-{os.getpid()}"
        partial.mkdir()
        try:
            yield partial
            _sync_folders(partial)
            refuse_existing(out)
            partial.rename(out)
            _sync(out.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def refuse_existing(out: Path) -> None:
    """Raise InvalidValue unless `out` does not exist or is an empty folder."""
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise InvalidValue(f"{out} exists already: give another place for the pair, or remove it")


def check_space(folder: Path, needed: int) -> None:
    """Raise NoSpace unless `needed` bytes fit on the disk of `folder` and some are left."""
    free, needed = shutil.disk_usage(folder).free, int(MARGIN * needed) + SPARE
    if free < needed:
        raise NoSpace(
            f"the disk of {folder.parent} has {shown_size(free)} free and {shown_size(needed)} are needed: "
            "make room there, or write to another disk"
        )


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
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
            raise InvalidValue(
                f"another conversion is writing {out}: wait for it, or give another place"
            ) from error
        # A run that just ended may have removed the file between the two calls.
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(handle).st_ino == file.stat().st_ino:
                return handle
        os.close(handle)


def _sync_folders(folder: Path) -> None:
    for path in (folder, *(p for p in folder.rglob("*") if p.is_dir())):
        _sync(path)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _escaped(name: str) -> str:
    """`name` for a glob pattern."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
