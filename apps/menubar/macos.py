"""macOS: run its programs, notify, and start the menu at login with a LaunchAgent."""

from __future__ import annotations

import os
import platform
import plistlib
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from mlx_spec.checkpoint.files import write_atomically
from mlx_spec.cli.command import tell
from mlx_spec.errors import InvalidValue

LABEL = "mlx-spec.menubar"
AGENT = Path("Library", "LaunchAgents", f"{LABEL}.plist")  # where launchd looks for it, in a home
DOMAIN = f"gui/{os.getuid()}"  # of launchd, for this user


def notify(text: str) -> None:
    """Show a text about the menu on stderr and as a notification."""
    tell(text)
    # The text is an argument, so nothing in it is taken for AppleScript.
    script = 'display notification (item 1 of argv) with title "mlx-spec"'
    spawn("osascript", "-e", "on run argv", "-e", script, "-e", "end run", text)


def framework_problem() -> str | None:
    """Return why macOS will not show the item (realiti4/claude-swap#310); None if no reason is known."""
    version = platform.mac_ver()[0]  # such as "26.1"
    major = version.split(".")[0]
    is_framework = bool(sysconfig.get_config_var("PYTHONFRAMEWORK"))
    # macOS draws no item for framework builds of Python from version 26 on.
    if not is_framework or not major.isdecimal() or int(major) < 26:
        return None
    return (
        f"macOS {version} draws no menu-bar item for framework builds of Python such as this one: install "
        "with `uv tool install --managed-python 'mlx-spec[server,menubar]'`"
    )


def write_agent(file: Path, passed: Sequence[str], log: Path) -> None:
    """Write the agent that starts the menu at login, and again after a crash but not after Quit.

    Raises InvalidValue.
    """
    if "--api-key" in [word.split("=")[0] for word in passed]:
        raise InvalidValue(f"use --api-key-file: --api-key would stand in {file} for all to read")
    content = {
        "Label": LABEL,
        # -P: without it a folder `mlx_spec` in the working folder would be run.
        "ProgramArguments": [sys.executable, "-P", "-m", "mlx_spec.menubar", *passed],
        "WorkingDirectory": str(Path.cwd()),  # paths among the options may be relative
        "EnvironmentVariables": _environment(),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 10,  # seconds between two starts, the least that launchd allows
        "ProcessType": "Interactive",
        "LimitLoadToSessionType": "Aqua",
        "StandardOutPath": str(log),
        "StandardErrorPath": str(log),
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, plistlib.dumps(content).decode())
    except OSError as error:
        raise InvalidValue(f"{file} cannot be written: {error.strerror}") from error


def _environment() -> dict[str, str]:
    """Return the variables of this process that decide where models are and how they are fetched and run.

    launchd gives an agent none of a shell. Secrets stay out of the file.
    """
    kept = re.compile(r"(HF|HUGGINGFACE|XDG|MLX|SSL)_\w+|(https?|all|no)_proxy", re.IGNORECASE)
    secret = re.compile(r"TOKEN$|KEY$", re.IGNORECASE)
    return {
        name: value
        for name, value in os.environ.items()
        if kept.fullmatch(name) and not secret.search(name) and not re.search(r"://[^/]*@", value)
    }


def install_agent(file: Path, passed: Sequence[str], log: Path, launchctl: str = "launchctl") -> None:
    """Start the menu now and at every login. Raises InvalidValue if launchd refuses."""
    write_agent(file, passed, log)
    _launchctl(launchctl, "bootout", f"{DOMAIN}/{LABEL}")  # fails without an earlier agent, which is fine
    if (problem := _launchctl(launchctl, "bootstrap", DOMAIN, str(file))) is not None:
        raise InvalidValue(f"launchctl does not take {file} ({problem}); the menu starts at the next login")


def remove_agent(file: Path, launchctl: str = "launchctl") -> bool:
    """Remove the agent and end the menu that launchd started. Return True if there was an agent."""
    existed = file.exists()
    file.unlink(missing_ok=True)
    _launchctl(launchctl, "bootout", f"{DOMAIN}/{LABEL}")
    return existed


def _launchctl(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return error.strerror or str(error)
    if done.returncode == 0:
        return None
    return " ".join(done.stderr.split()) or f"status {done.returncode}"


def spawn(*command: str) -> None:
    """Run a program of macOS without waiting for it."""
    quiet = subprocess.DEVNULL
    try:
        subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)
    except OSError as error:
        tell(f"{command[0]} cannot be run: {error.strerror}")
