"""Read and write files; atomic folders; formatting of sizes, names and errors.

A run that is killed leaves a hidden folder that the next run for the same place removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from glob import escape
from pathlib import Path
from typing import Any, BinaryIO, cast

from mlx_spec.errors import BadCheckpoint, InvalidValue, NotFound, SpecError

AGAIN = "download or convert it again"
# Raised by mlx-lm for a config.json that describes no model.
LOADING_ERRORS = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    MemoryError,
    RuntimeError,
    OSError,
)


class NoSpace(SpecError):
    """A disk that is too full for a download or a conversion."""


# --- files


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`. Raises BadCheckpoint for anything else."""
    return parse_object(file, read_file(file))


def read_file(file: Path) -> bytes:
    """Return the content of a file. Raises BadCheckpoint."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise BadCheckpoint(f"{file} cannot be read ({error.strerror})") from error


def parse_object(file: Path, content: bytes) -> dict[str, Any]:
    """Return the JSON object that `file` holds. Raises BadCheckpoint for anything else."""
    try:
        value = json.loads(content.decode())
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise BadCheckpoint(f"{file} is not valid JSON ({error}): {AGAIN}") from error
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{file} holds a {type(value).__name__} where a JSON object belongs: {AGAIN}")
    return value


def read_optional(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`, empty if there is no file. Raises BadCheckpoint for anything else."""
    return read_object(file) if file.is_file() else {}


def read_pair(file: Path) -> tuple[str | None, str | None] | None:
    """Return the target and the drafter in a file that a program wrote; None if it cannot be read."""
    try:
        pair = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    match pair:
        case {"target": str() | None as target, "drafter": str() | None as drafter}:
            return target, drafter
    return None


def write_json(file: Path, value: object) -> None:
    """Write a new file, and wait until the disk has it. Raises OSError."""
    with file.open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def write_atomically(file: Path, text: str) -> None:
    """Replace the content of `file` atomically; only its owner may read it. Raises OSError."""
    for unfinished in file.parent.glob(f".{escape(file.name[:100])}.*.tmp"):
        remove_abandoned(unfinished)
    with temporary_file(file.parent, file.name) as stream:
        stream.write(text.encode())
        stream.flush()
        os.fsync(stream.fileno())
        os.replace(stream.name, file)


@contextlib.contextmanager
def temporary_file(folder: Path, name: str = "") -> Iterator[BinaryIO]:
    """Yield a new hidden file, for its owner only. It is removed at the end unless it was renamed.

    It is locked until then, so others can tell if its writer has died (`remove_abandoned`). Raises OSError.
    """
    while True:
        prefix = f".{name[:100]}."
        stream = tempfile.NamedTemporaryFile(dir=folder, prefix=prefix, suffix=".tmp", delete=False)  # noqa: SIM115
        try:
            with stream:
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(stream, fcntl.LOCK_EX)
                if not os.fstat(stream.fileno()).st_nlink:  # removed before it was locked
                    continue
                yield cast(BinaryIO, stream)
                return
        finally:
            Path(stream.name).unlink(missing_ok=True)  # on Ctrl-C too


def remove_abandoned(file: Path) -> bool:
    """Remove a temporary file if its writer has died. Return False if it is being written."""
    try:
        with file.open("r+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.unlink()
    except FileNotFoundError:  # renamed or removed meanwhile
        return True
    except OSError:
        return False
    return True


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


# --- folders and disk space


def typed_path(name: str | Path) -> Path:
    """Return the path that a user typed, which need not exist. Raises InvalidValue for what is not a path."""
    text = str(name)
    if not text:
        raise InvalidValue("a name is empty: give a folder, a file or owner/name")
    if "\0" in text:
        raise InvalidValue("a path cannot hold a NUL: type it again")
    if (shown := text.encode(errors="replace").decode()) != text:  # bytes of a name that Python cannot decode
        raise InvalidValue(f"{shown} has bytes that are not UTF-8, which MLX does not open: rename it")
    try:
        path = Path(text).expanduser()
        path.exists()
    except RuntimeError as error:
        raise InvalidValue(
            f"{text} starts with the home of an unknown user: give a path without ~"
        ) from error
    except OSError as error:  # such as a name that is too long
        raise InvalidValue(f"{text} cannot be read ({error.strerror}): give another path") from error
    return path


def default_folder() -> Path:
    """Return the folder of converted pairs."""
    from platformdirs import user_data_path

    return user_data_path("mlx_spec") / "models"


def check_space(
    name: str, missing: int, folder: Path, way: str = "set HF_HOME to a folder on another disk"
) -> None:
    """Raise NoSpace unless `missing` bytes fit on the disk of `folder` and a gigabyte stays free.

    `way` is another way out, besides making room.
    """
    margin = 1.05  # for the file system's own data
    free, needed = free_bytes(folder), int(missing * margin) + 1_000_000_000
    if missing and free < needed:
        raise NoSpace(
            f"{name} needs {human_bytes(needed)} on the disk of {folder}, {human_bytes(free)} are free: "
            f"make room there, or {way}"
        )


def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk that holds `path`, which need not exist yet."""
    existing = next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))
    return shutil.disk_usage(existing).free


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a hidden folder that becomes `out` at the end, or is removed on failure.

    Raises InvalidValue if `out` exists and is not empty, or if another run is writing it. Raises NotFound if
    its parent does not exist.
    """
    out = typed_path(out).absolute()
    check_new(out)
    with locked(out):
        for stale in out.parent.glob(f".{escape(out.name)}.partial-*"):
            shutil.rmtree(stale)
        partial = out.parent / f".{out.name}.partial-{os.getpid()}"
        partial.mkdir()
        try:
            yield partial
            for path in (partial, *partial.rglob("*")):  # also files that libraries wrote
                _sync(path)
            check_new(out)
            partial.rename(out)
            _sync(out.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def check_new(out: Path) -> None:
    """Raise InvalidValue unless `out` is new or an empty folder, NotFound if its parent does not exist."""
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise InvalidValue(f"{out} exists already: give another place, or remove it")
    if not out.parent.is_dir():
        raise NotFound(f"there is no folder {out.parent}: create it, or give another place")


@contextlib.contextmanager
def locked(out: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of `out`. The kernel frees it when a run dies, however it dies.

    If another run has it, `wait` for its end, or raise InvalidValue.
    """
    from filelock import FileLock, Timeout  # it imports asyncio

    file = out.parent / f".{out.name}.lock"
    try:
        with FileLock(file, timeout=-1 if wait else 0):
            try:
                yield
            finally:
                file.unlink(missing_ok=True)  # a waiting run then creates a new one
    except Timeout as error:
        raise InvalidValue(f"another run is writing {out}: wait for it, or give another place") from error


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
