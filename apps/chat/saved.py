"""Conversations on the disk: JSON with a version, written whole or not at all.

A reader takes what it knows and ignores the rest, so that files go from one release to the next.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_spec.apps.chat.settings import typed_path
from mlx_spec.errors import BadCheckpoint, InvalidValue, NotFound
from mlx_spec.hub.files import write_atomically

FORMAT, VERSION = "mlx_spec conversation", 1
SUFFIX = ".json"


@dataclass(frozen=True)
class Saved:
    """A conversation, and what it was held with."""

    target: str
    drafter: str | None
    system: str | None
    turns: Sequence[Mapping[str, Any]]  # messages of user and assistant
    settings: Mapping[str, Any] = field(default_factory=dict)


def place(name: str) -> Path:
    """The file that a name typed by the user means. Raises InvalidValue for none."""
    if not name:
        raise InvalidValue("give the name of a file, such as /save talk.json")
    path = typed_path(name)
    return path if path.suffix else path.with_name(path.name + SUFFIX)


def write(file: Path, saved: Saved) -> None:
    """Write it, over a conversation of that name, too. Raises InvalidValue where something else stands."""
    if file.exists() and not _is_ours(file):
        raise InvalidValue(f"{file} is there and is no conversation of ours: take another name")
    content = {
        "format": FORMAT,
        "version": VERSION,
        "target": saved.target,
        "drafter": saved.drafter,
        "system": saved.system,
        "settings": dict(saved.settings),
        "messages": [dict(turn) for turn in saved.turns],
    }
    try:
        write_atomically(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise InvalidValue(f"{file} cannot be written ({error.strerror}): take another name") from error


def read(file: Path) -> Saved:
    """What `write` wrote, in this release or an earlier one. Raises NotFound or BadCheckpoint."""
    content = _content(file)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise BadCheckpoint(f"{file} is no conversation of ours: give a file that /save wrote")
    version = content.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise BadCheckpoint(
            f"{file} has version {version}, this release reads up to {VERSION}: it takes a newer mlx_spec"
        )
    messages = content.get("messages")
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise BadCheckpoint(f"{file} holds no list of messages: it was changed since /save wrote it")
    system, settings, drafter = content.get("system"), content.get("settings"), content.get("drafter")
    return Saved(
        str(content.get("target")),
        drafter if isinstance(drafter, str) else None,
        system if isinstance(system, str) else None,
        messages,
        settings if isinstance(settings, dict) else {},
    )


def _content(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NotFound(f"there is no file {file}: /save writes one") from error
    except OSError as error:
        raise NotFound(f"{file} cannot be read ({error.strerror}): give another file") from error
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{file} is not valid JSON: give a file that /save wrote") from error


def _is_ours(file: Path) -> bool:
    try:
        content = _content(file)
    except (NotFound, BadCheckpoint):
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and isinstance(message.get("content"), str)
