"""What a menu is, whatever draws it: entries with labels, and the commands that they stand for."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias


class Action(enum.Enum):
    """What a click asks for."""

    START = enum.auto()
    STOP = enum.auto()
    RESTART = enum.auto()
    TARGET = enum.auto()  # value: a target as `mlx-spec serve --target` takes it
    DRAFTER = enum.auto()  # value: a drafter, or "" for the target's own
    COPY_URL = enum.auto()
    COPY_ENVIRONMENT = enum.auto()
    OPEN_PAGE = enum.auto()
    OPEN_LOGS = enum.auto()
    LOGIN = enum.auto()  # at login or no longer
    QUIT = enum.auto()


@dataclass(frozen=True)
class Command:
    """A click."""

    action: Action
    value: str = ""


@dataclass(frozen=True)
class Item:
    """A line of text; without a command it is only read."""

    label: str
    command: Command | None = None
    checked: bool | None = None  # None: it has no mark

    @property
    def enabled(self) -> bool:
        """Whether a click does something."""
        return self.command is not None


@dataclass(frozen=True)
class Separator:
    """A line between groups."""


@dataclass(frozen=True)
class Submenu:
    """A menu behind a line of text."""

    label: str
    entries: tuple[Item | Separator, ...]


Entry: TypeAlias = Item | Separator | Submenu


@dataclass(frozen=True)
class Menu:
    """A whole menu, and what is seen of it while it is closed."""

    title: str  # beside the icon, "" for nothing
    entries: tuple[Entry, ...]


class View(Protocol):
    """What draws a menu. `run` belongs to the main thread; the others may be called from any."""

    def run(self, begun: Callable[[], None], click: Callable[[Command], None]) -> None:
        """Show it until it is closed. `begun` is called once on the main thread, when there is a loop."""

    def show(self, menu: Menu) -> None:
        """Show another state of it."""

    def copy(self, text: str) -> None:
        """Put a text on the clipboard."""

    def close(self) -> None:
        """Have `run` return."""
