"""The menu at login: a LaunchAgent of macOS."""

from __future__ import annotations

import os
import plistlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mlx_spec.errors import InvalidValue

LABEL = "mlx-spec.menubar"
THROTTLE = 10  # seconds between two starts


def agent_file(home: Path) -> Path:
    """Where launchd looks for it."""
    return home / "Library" / "LaunchAgents" / f"{LABEL}.plist"


def agent(passed: Sequence[str], log: Path) -> bytes:
    """The property list. A menu that is quit stays away until the next login, one that crashes comes back."""
    content = {
        "Label": LABEL,
        "ProgramArguments": [sys.executable, "-m", "mlx_spec.menubar", *passed],
        "WorkingDirectory": str(Path.cwd()),  # paths among the options may be relative
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": THROTTLE,
        "ProcessType": "Interactive",
        "LimitLoadToSessionType": "Aqua",
        "StandardOutPath": str(log),
        "StandardErrorPath": str(log),
    }
    return plistlib.dumps(content)


def write_agent(file: Path, passed: Sequence[str], log: Path) -> None:
    """Have the menu started from the next login on. Raises InvalidValue."""
    if "--api-key" in [word.split("=")[0] for word in passed]:
        raise InvalidValue(f"use --api-key-file: --api-key would stand in {file} for all to read")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(".new")
        new.write_bytes(agent(passed, log))
        new.replace(file)
    except OSError as error:
        raise InvalidValue(f"{file} cannot be written: {error.strerror}") from error


def install(file: Path, passed: Sequence[str], log: Path, launchctl: str = "launchctl") -> None:
    """Have the menu started now and at every login. Raises InvalidValue where launchd refuses."""
    write_agent(file, passed, log)
    _run(launchctl, "bootout", _service())  # one of before; it need not exist
    problem = _run(launchctl, "bootstrap", _domain(), str(file))
    if problem is not None:
        raise InvalidValue(f"launchctl does not take {file} ({problem}); the menu starts at the next login")


def remove(file: Path, launchctl: str = "launchctl") -> bool:
    """Have it started no longer, and end the one that launchd started. Returns whether there was one."""
    existed = file.exists()
    file.unlink(missing_ok=True)
    _run(launchctl, "bootout", _service())
    return existed


def _domain() -> str:
    return f"gui/{os.getuid()}"


def _service() -> str:
    return f"{_domain()}/{LABEL}"


def _run(*command: str) -> str | None:
    """What went wrong."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return error.strerror or str(error)
    if done.returncode == 0:
        return None
    return " ".join(done.stderr.split()) or f"status {done.returncode}"
