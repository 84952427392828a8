"""Measured costs in a file per device, target, drafter and quantization, for the processes that follow.

The costs themselves are a JSON object that `costs.py` makes and checks; here they are written whole, found
again, and refused where they belong to something else. Nothing here needs MLX.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from mlx_spec.errors import Mismatch, NotFound, SpecError
from mlx_spec.hub.checkpoint import WEIGHTS, header_bytes
from mlx_spec.hub.files import one_line

FORMAT = 1  # of the files; raised when older ones can no longer be read
MAX_SIZE = 1_000_000  # bytes; a profile has a few thousand
STALE = ("mlx", "format")  # a newer one replaces the file instead of standing beside it

_log = logging.getLogger("mlx_spec")


class BadProfile(SpecError):
    """A file that is no profile, or cannot be written."""


@dataclass(frozen=True)
class Key:
    """What a profile was measured with. Costs hold for exactly this."""

    device: str
    target: str  # `fingerprint` of its folder
    drafters: tuple[str, ...]  # the same, or the name of a drafter without weights
    quantization: str  # as shown to people: "4-bit, groups of 64"
    kv_bits: int | None  # None: K/V as computed
    mlx: str  # version
    format: int = FORMAT


@dataclass(frozen=True)
class Profile:
    """The content of a file."""

    key: Key
    measured: str  # date and time, ISO 8601
    table: dict[str, Any]


def folder() -> Path:
    """Where profiles are kept: the user's cache folder."""
    from platformdirs import user_cache_path

    return user_cache_path("mlx_spec") / "profiles"


def file_name(key: Key) -> str:
    """Readable, and another one for every key but for the versions, which replace each other."""
    parts = {name: value for name, value in dataclasses.asdict(key).items() if name not in STALE}
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
    words = re.sub(r"[^a-z0-9]+", "-", f"{key.device} {key.quantization}".lower()).strip("-")
    return f"{words[:80]}-{digest}.json"


def load(key: Key, folder: Path) -> dict[str, Any] | None:
    """The costs saved under `key`; None if there are none.

    A file that is damaged or was measured with something else is left out with a warning of one line.
    """
    file = folder / file_name(key)
    try:
        return _read(file, key).table
    except NotFound:
        return None
    except (BadProfile, Mismatch) as error:
        _log.warning("%s: it is not used and will be replaced", error)
        return None


def save(key: Key, table: Mapping[str, Any], folder: Path, *, measured: str | None = None) -> str | None:
    """Keep costs for the next process. Returns None, or in one line why that failed, which is also logged.

    `measured` is the date they are from, now if left out. Raises ValueError or TypeError if `table` is not
    JSON: that is never the fault of a disk.
    """
    text = _text(key, table, measured)
    file = folder / file_name(key)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(text, file)
    except OSError as error:
        reason = f"measured costs cannot be kept in {file} ({error.strerror or one_line(error)})"
        _log.warning("%s: they will be measured again", reason)
        return reason
    return None


def export(key: Key, table: Mapping[str, Any], path: Path, *, measured: str | None = None) -> None:
    """Write costs to a file of the user's. Raises BadProfile if it cannot be written."""
    text = _text(key, table, measured)
    try:
        _write(text, path)
    except OSError as error:
        raise BadProfile(
            f"{path} cannot be written ({error.strerror or one_line(error)}): choose another place"
        ) from error


def import_(path: Path, key: Key) -> Profile:
    """The profile in a file of the user's, if it was measured with `key`.

    Raises NotFound, BadProfile, or Mismatch, which names what differs and both sides.
    """
    try:
        return _read(path, key)
    except (BadProfile, Mismatch) as error:
        raise type(error)(f"{error}: measure here with `mlx-spec tune`") from error


def fingerprint(folder: Path) -> str:
    """16 hexadecimal digits that change with the config, the tensors' names and shapes, or the files' sizes.

    Headers are read, weights are not: fine-tunes of one model look alike, and cost alike. Raises
    BadCheckpoint.
    """
    digest = hashlib.sha256()
    config = folder / "config.json"
    digest.update(config.read_bytes() if config.is_file() else b"")
    for file in sorted(folder.glob(WEIGHTS)):
        digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
        digest.update(header_bytes(file))
    return digest.hexdigest()[:16]


def _text(key: Key, table: Mapping[str, Any], measured: str | None) -> str:
    content = {
        "key": dataclasses.asdict(key),
        "measured": measured or datetime.now(UTC).isoformat(timespec="seconds"),
        "table": dict(table),
    }
    return json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def _write(text: str, file: Path) -> None:
    """All of it or nothing, whoever else writes the same file."""
    temporary = file.with_name(f".{file.name[:100]}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _read(file: Path, key: Key) -> Profile:
    """The profile in `file`. Raises NotFound, BadProfile or Mismatch."""
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_SIZE + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"there is no file {file}") from error
    except OSError as error:
        raise BadProfile(f"{file} cannot be read ({error.strerror})") from error
    if len(content) > MAX_SIZE:
        raise BadProfile(f"{file} has more than {MAX_SIZE} bytes and is no profile")
    try:
        found = json.loads(content, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise BadProfile(f"{file} is damaged ({one_line(error)})") from error
    profile = _profile(found, file)
    _check(profile, key, file)
    return profile


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _profile(found: object, file: Path) -> Profile:
    match found:
        case {"key": {"format": int(other)}} if other != FORMAT:
            raise BadProfile(f"{file} is of format {other}, this version reads {FORMAT}")
        case {"key": dict() as key, "measured": str(measured), "table": dict() as table}:
            return Profile(_key(key, file), measured, table)
    raise BadProfile(f"{file} is no profile, which has a key, a date and a table")


def _key(found: Mapping[str, Any], file: Path) -> Key:
    match found:
        case {
            "device": str(device),
            "target": str(target),
            "drafters": [*drafters],
            "quantization": str(quantization),
            "kv_bits": int() | None as kv_bits,
            "mlx": str(mlx),
            "format": int(format),
        } if all(isinstance(name, str) for name in drafters):
            return Key(device, target, tuple(drafters), quantization, kv_bits, mlx, format)
    raise BadProfile(f"{file} has an incomplete key")


def _check(profile: Profile, key: Key, file: Path) -> None:
    """Raise Mismatch, naming everything that differs."""
    theirs, ours = dataclasses.asdict(profile.key), dataclasses.asdict(key)
    different = [
        f"{name} {_shown(theirs[name])}, here it is {_shown(ours[name])}"
        for name in ours
        if theirs[name] != ours[name]
    ]
    if different:
        raise Mismatch(f"{file} was measured with {'; '.join(different)}")


def _shown(value: object) -> str:
    """A value of a key on one line."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return one_line(ValueError("none" if value is None else str(value)), 80)
