"""Files of measured costs, one per device, target, drafters and quantization, for the processes that follow.

A file that is damaged, or was measured with something else, is ignored with one line of warning.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from mlx_spec.errors import Mismatch, NotFound
from mlx_spec.hub.files import one_line, write_atomically
from mlx_spec.policy.costs import BadCosts

FORMAT = 2  # of the files; raised when older ones can no longer be read

_log = logging.getLogger("mlx_spec")


@dataclass(frozen=True)
class Key:
    """The conditions that costs hold for."""

    device: str
    target: str  # `fingerprint` of its folder
    drafters: tuple[str, ...]  # the same, or the name of a drafter without weights
    quantization: str  # as shown to people: "4-bit, groups of 64"
    kv_bits: int | None  # None if K/V are as computed
    mlx: str  # version
    format: int = FORMAT


@dataclass(frozen=True)
class SavedCosts:
    """The content of a file."""

    key: Key
    measured: str  # date and time, ISO 8601
    table: dict[str, Any]


def folder() -> Path:
    """Return the folder of saved costs: in the user's cache."""
    return user_cache_path("mlx_spec") / "profiles"


def file_name(key: Key) -> str:
    """Return a readable name, different for every key. Versions are left out: a newer one replaces a file."""
    parts = {name: value for name, value in asdict(key).items() if name not in ("mlx", "format")}
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
    words = re.sub(r"[^a-z0-9]+", "-", f"{key.device} {key.quantization}".lower()).strip("-")
    return f"{words[:80]}-{digest}.json"


def load(key: Key, folder: Path) -> SavedCosts | None:
    """Return the costs saved for `key`; None, with a warning if there is a file, if there are none."""
    try:
        return _read(folder / file_name(key), key)
    except NotFound:
        return None
    except (BadCosts, Mismatch) as error:
        _log.warning("%s: it is not used and will be replaced", error)
        return None


def save(key: Key, table: Mapping[str, Any], folder: Path, *, measured: str) -> str | None:
    """Save costs for the next process. Return None, or one line that says why that failed and is logged."""
    file = folder / file_name(key)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(key, table, measured, file)
    except OSError as error:
        reason = f"measured costs cannot be saved in {file} ({error.strerror or one_line(error)})"
        _log.warning("%s: they will be measured again", reason)
        return reason
    return None


def export(key: Key, table: Mapping[str, Any], path: Path, *, measured: str) -> None:
    """Write costs to a file of the user's. Raises BadCosts if it cannot be written."""
    try:
        _write(key, table, measured, path)
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise BadCosts(f"{path} cannot be written ({reason}): choose another place") from error


def import_(path: Path, key: Key) -> SavedCosts:
    """Return the costs in a file of the user's.

    Raises NotFound, BadCosts, or Mismatch if they were measured with something else; it names both sides.
    """
    try:
        return _read(path, key)
    except (BadCosts, Mismatch) as error:
        raise type(error)(f"{error}: measure here with `mlx-spec tune`") from error


def _write(key: Key, table: Mapping[str, Any], measured: str, file: Path) -> None:
    content = {"key": asdict(key), "measured": measured, "table": dict(table)}
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_atomically(file, text + "\n")


def _read(file: Path, key: Key) -> SavedCosts:
    try:
        found = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"there is no file {file}") from error
    except OSError as error:
        raise BadCosts(f"{file} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise BadCosts(f"{file} is damaged ({one_line(error)})") from error
    return _check(found, key, file)


def _check(found: object, key: Key, file: Path) -> SavedCosts:
    """Raise BadCosts for other content, and Mismatch with every part of the key that differs."""
    match found:
        case {"key": {"format": int(other)}} if other != FORMAT:
            raise BadCosts(f"{file} is of format {other}, this version reads {FORMAT}")
        case {"key": dict() as saved, "measured": str(measured), "table": dict() as table}:
            different = [
                f"{name} {_shown(saved.get(name))}, here it is {_shown(here)}"
                for name, here in json.loads(json.dumps(asdict(key))).items()
                if saved.get(name) != here
            ]
            if different:
                raise Mismatch(f"{file} was measured with {'; '.join(different)}")
            return SavedCosts(key, measured, table)
    raise BadCosts(f"{file} holds no costs: its key, date or table is missing")


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return one_line(ValueError("none" if value is None else str(value)), 80)
