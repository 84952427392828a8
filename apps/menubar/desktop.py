"""What a desktop does for a program: open a page or a folder, tell something."""

from __future__ import annotations

import subprocess
import sys
import webbrowser
from pathlib import Path

IS_MAC = sys.platform == "darwin"
HIDING = 26  # first version of macOS that draws no item for framework builds of Python
# The text is an argument, so nothing in it is taken for AppleScript.
NOTIFY = (
    "osascript",
    "-e",
    "on run argv",
    "-e",
    'display notification (item 1 of argv) with title "mlx-spec"',
    "-e",
    "end run",
)


def open_page(url: str) -> None:
    """Open a page in the user's browser."""
    webbrowser.open(url)


def open_file(path: Path) -> None:
    """Show a file or folder with the desktop's own program; without one, nothing happens."""
    _run(("open" if IS_MAC else "xdg-open", str(path)))


def say(text: str) -> None:
    """Tell the user something about the menu, where it may not be seen."""
    print(f"mlx-spec: {text}", file=sys.stderr, flush=True)
    if IS_MAC:
        _run((*NOTIFY, text))


def framework_problem(version: str, framework: str) -> str | None:
    """Why no item will be seen; None if nothing is known against it.

    `version` is that of macOS, such as "26.1"; `framework` is sysconfig's PYTHONFRAMEWORK, "" for a build
    that is none. Reported in realiti4/claude-swap#310.
    """
    major = version.split(".")[0]
    if not framework or not major.isdecimal() or int(major) < HIDING:
        return None
    return (
        f"macOS {version} draws no menu-bar item for framework builds of Python such as this one: install "
        "with `uv tool install --managed-python 'mlx-spec[server,menubar]'`"
    )


def _run(command: tuple[str, ...]) -> None:
    try:
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    except OSError as error:
        print(f"mlx-spec: {command[0]} cannot be run: {error.strerror}", file=sys.stderr)
