"""Fail the n-th call that writes: a write, an fsync, a rename, a new file or folder."""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mlx_spec.errors import SpecError

CALLS = ("fsync", "replace", "rename", "mkdir", "sendfile")
ERRORS: dict[str, Callable[[], Exception]] = {
    "full": lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "broken": lambda: OSError(errno.EIO, os.strerror(errno.EIO)),
    "memory": MemoryError,
}


@dataclass
class Faults:
    """Counts the calls that write, and fails one of them."""

    place: int = 0  # the call that fails, from 1 on; 0: none does
    error: Callable[[], Exception] = MemoryError
    count: int = 0

    def step(self) -> None:
        self.count += 1
        if self.count == self.place:
            raise self.error()


FAULTS = Faults()


class FaultyFile(io.FileIO):
    """A file whose writes are counted."""

    def write(self, data: Any) -> int | None:
        FAULTS.step()
        return super().write(data)

    def truncate(self, size: int | None = None) -> int:
        FAULTS.step()
        return super().truncate(size)


def faulty_open(
    file: Any,
    mode: str = "r",
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Any = None,
) -> Any:
    """Open a file as `open` does; a new one counts."""
    if not set(mode) & set("wax+"):
        return real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
    FAULTS.step()
    raw = FaultyFile(file, mode.replace("b", "").replace("t", ""), closefd, opener)
    stream = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
    return stream if "b" in mode else io.TextIOWrapper(stream, encoding or "utf-8", errors, newline)


real_open: Any = open


@contextmanager
def faults(place: int, error: Callable[[], Exception]) -> Iterator[None]:
    """Fail a call that writes, within this block."""
    FAULTS.place, FAULTS.error, FAULTS.count = place, error, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "open", faulty_open)
        patch.setattr(io, "open", faulty_open)
        for name in CALLS:
            real = vars(os)[name]
            patch.setattr(os, name, lambda *a, real=real, **k: (FAULTS.step(), real(*a, **k))[1])
        yield


@dataclass
class Writer:
    """A part that writes files into a folder."""

    write: Callable[[Path], object]  # raises SpecError or OSError, or warns
    check: Callable[[Path, bool], object]  # after a write that failed, or that did not
    prepare: Callable[[Path], object] = field(default=lambda folder: None)
    places: int | None = None  # how many of the calls fail in turn; None: all
    missed: int = 0  # of these, how many a run may not reach: threads make more or fewer calls


def sweep(writer: Writer, folder: Path, errors: tuple[str, ...] = tuple(ERRORS)) -> int:
    """Fail each call of a writer in turn. Return their number."""
    (folder / "whole").mkdir()
    writer.prepare(folder / "whole")
    with faults(0, MemoryError):
        writer.write(folder / "whole")
    count = FAULTS.count
    writer.check(folder / "whole", True)
    step, missed = 1 if writer.places is None else max(count // writer.places, 1), 0
    for kind in errors:
        for place in sorted({*range(1, count + 1, step), count}):
            own = folder / f"{kind}-{place}"
            own.mkdir()
            writer.prepare(own)
            try:
                with faults(place, ERRORS[kind]):
                    writer.write(own)
            except (SpecError, OSError) as error:
                assert "\n" not in str(error)
            except MemoryError:
                assert kind == "memory"
            missed += FAULTS.count < place
            hidden = [path.name for path in own.rglob(".*") if path.name != ".locks"]  # of huggingface_hub
            assert not hidden, (kind, place, hidden)
            writer.check(own, False)
            writer.write(own)
            writer.check(own, True)
            shutil.rmtree(own)
    assert missed <= writer.missed
    return count
