"""Where the menu keeps its files, and how they are read and written."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_spec.errors import InvalidValue


@dataclass(frozen=True)
class Places:
    """Files of the menu, all in one folder."""

    folder: Path

    @property
    def log(self) -> Path:
        """What the server prints."""
        return self.folder / "logs" / "server.log"

    @property
    def own_log(self) -> Path:
        """What the menu prints when it is started at login."""
        return self.folder / "logs" / "menubar.log"

    @property
    def server(self) -> Path:
        """The server that runs."""
        return self.folder / "server.json"

    @property
    def choice(self) -> Path:
        """The model and the drafter that were chosen last."""
        return self.folder / "choice.json"

    @property
    def savings(self) -> Path:
        """Seconds saved by day."""
        return self.folder / "savings.json"

    @property
    def lock(self) -> Path:
        """Held by the menu that runs."""
        return self.folder / "menubar.lock"

    def make(self) -> None:
        """Make the folders. Raises InvalidValue where that is impossible."""
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            self.folder.chmod(0o700)
        except OSError as error:
            raise InvalidValue(f"{self.folder} cannot be used: {error.strerror}; make it writable") from error


def users() -> Places:
    """The places of the user who runs this."""
    from platformdirs import user_state_path

    return Places(user_state_path("mlx_spec") / "menubar")


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file of ours; empty if there is none: what is kept is a convenience."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def told(error: OSError) -> str:
    """What went wrong with which file, in a line."""
    return f"{error.filename or 'a file'}: {error.strerror or error}"


def write(file: Path, text: str) -> None:
    """Replace a file at once, so that nobody reads half of it."""
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(text)
    Path(name).replace(file)
