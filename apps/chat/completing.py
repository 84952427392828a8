"""What the Tab key may complete: commands, what they take, and files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

Words = Callable[[], Sequence[str]]


class Completions:
    """Of a line that begins with a command. `arguments` gives the words that a command takes, by its name.

    A command in `files` takes the name of a file.
    """

    def __init__(
        self, commands: Sequence[str], arguments: Mapping[str, Words], files: Sequence[str] = ()
    ) -> None:
        self._commands = tuple(commands)
        self._arguments = arguments
        self._files = frozenset(files)

    def of(self, text: str) -> Iterator[tuple[str, int]]:
        """What may stand at the end of `text`, and how many of its characters that replaces."""
        if not text.startswith("/") or "\n" in text:
            return
        command, space, argument = text[1:].partition(" ")
        if not space:
            yield from ((f"/{name}", len(text)) for name in self._commands if name.startswith(command))
        elif command in self._files:
            yield from ((path, len(argument)) for path in _paths(argument.lstrip()))
        elif " " not in argument.strip() and command in self._arguments:
            begun = argument.lstrip()
            words = self._arguments[command]()
            yield from ((word, len(begun)) for word in words if word.startswith(begun))


def _paths(begun: str) -> list[str]:
    """Files and folders whose path, as typed, begins like that."""
    head, slash, tail = begun.rpartition("/")
    try:
        folder = Path(head + slash).expanduser()
        found = sorted(path for path in folder.iterdir() if path.name.startswith(tail))
    except (OSError, RuntimeError, ValueError):  # no such home, a NUL
        return []
    hidden = tail.startswith(".")
    shown = [path for path in found if hidden or not path.name.startswith(".")]
    return [f"{head}{slash}{path.name}{'/' if path.is_dir() else ''}" for path in shown]
