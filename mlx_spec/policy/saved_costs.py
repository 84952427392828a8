"""Files of what was measured, for the processes that follow: costs of a pair, and the row class of a target.

There is one file for each device and pair, or target.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from mlx_spec.checkpoint.files import one_line, write_atomically
from mlx_spec.errors import Mismatch, NotFound
from mlx_spec.model.row_class import RowClass
from mlx_spec.policy.costs import BadCosts, Table

_log = logging.getLogger("mlx_spec")


@dataclass(frozen=True)
class Key:
    """The conditions that costs hold for."""

    device: str
    target: str  # `fingerprint` of its folder
    drafters: tuple[str, ...]  # `fingerprint` of each folder, or the name of a drafter without weights
    quantization: str  # as shown to users: "4-bit, groups of 64"
    kv_bits: int | None  # None if K/V are as computed
    mlx: str  # version
    format: int = 2  # of the file; raised when older ones can no longer be read
    code: str | None = None  # `computing_code`, for row classes; costs hold for all


@cache
def computing_code() -> str:
    """Return a digest of what computes passes beside MLX: mlx-lm's version and the files of model/."""
    digest = hashlib.sha256(version("mlx-lm").encode())
    for file in sorted(Path(inspect.getfile(RowClass)).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def folder() -> Path:
    """Return the folder of saved costs: in the user's cache."""
    return user_cache_path("mlx_spec") / "profiles"


def file_name(key: Key) -> str:
    """Return a readable name, different for every key but for versions: a newer one replaces the file."""
    fields = {name: value for name, value in asdict(key).items() if name not in ("mlx", "format", "code")}
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]
    words = re.sub(r"[^a-z0-9]+", "-", f"{key.device} {key.quantization}".lower()).strip("-")
    return f"{words[:80]}-{digest}.json"


def write(file: Path, key: Key, measured: str, table: Table) -> None:
    """Write costs with the date they were measured on. Raises BadCosts if the file cannot be written."""
    _write(file, {"key": asdict(key), "measured": measured, "table": asdict(table)})


def write_rows(file: Path, key: Key, rows: RowClass) -> None:
    """Write the row class of a target. Raises BadCosts if the file cannot be written."""
    _write(file, {"key": asdict(key), "rows": asdict(rows)})


def read(file: Path, key: Key) -> tuple[Table, str]:
    """Return the table in a file and the date it was measured on.

    Raises NotFound, BadCosts, or Mismatch if the key differs: it names both sides.
    """
    match _read(file, key):
        case {"measured": str(measured), "table": dict() as table}:
            return Table.from_json(table, len(key.drafters)), measured
    raise BadCosts(f"{file} does not hold costs: its key, date or table is missing")


def read_rows(file: Path, key: Key) -> RowClass:
    """Return the row class in a file. Raises as `read` does."""
    saved = _read(file, key)
    try:
        return RowClass.from_json(saved["rows"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadCosts(f"{file} does not hold a row class ({one_line(error)})") from error


def row_class(key: Key, name: str, measure: Callable[[], RowClass]) -> RowClass:
    """Return the saved row class of a target, or measure and save it. `name` is the target's, for users."""
    file = folder() / file_name(key)
    try:
        return read_rows(file, key)
    except NotFound:
        pass
    except (BadCosts, Mismatch) as error:
        _log.warning("%s: it is not used and will be replaced", error)
    print(f"measuring what passes of {name} agree bit by bit, once", file=sys.stderr, flush=True)
    rows = measure()
    try:
        write_rows(file, key, rows)
    except BadCosts as error:
        _log.warning("%s: row classes will be measured again", error)
    return rows


def _write(file: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text + "\n")
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise BadCosts(f"{file} cannot be written ({reason}): check its folder") from error


def _read(file: Path, key: Key) -> Mapping[str, Any]:
    try:
        content: Mapping[str, Any] = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"there is no file {file}") from error
    except OSError as error:
        raise BadCosts(f"{file} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise BadCosts(f"{file} is damaged ({one_line(error)})") from error
    match content:
        case {"key": {"format": int(other)}} if other != key.format:
            raise BadCosts(f"{file} is of format {other}, this version reads {key.format}")
        case {"key": dict() as saved}:
            different = [
                f"{name} {_shown(saved.get(name))}, here it is {_shown(here)}"
                for name, here in json.loads(json.dumps(asdict(key))).items()
                if saved.get(name) != here
            ]
            if different:
                raise Mismatch(f"{file} was measured with {'; '.join(different)}")
            return content
    raise BadCosts(f"{file} does not hold costs: its key, date or table is missing")


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return one_line(ValueError("none" if value is None else str(value)), 80)
