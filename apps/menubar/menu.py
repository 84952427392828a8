"""Build the menu as data: entries for the state of the server. `cocoa` draws them."""

from __future__ import annotations

import enum
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field

from mlx_spec import __version__
from mlx_spec.checkpoint.files import human_bytes
from mlx_spec.hub.catalog import DEMO, LOOKUP, NONE, PairSpec

DRAFTERS = {None: "auto", NONE: "off", LOOKUP: "lookup"}


class Action(enum.Enum):
    """The effects of clicks."""

    START = enum.auto()
    STOP = enum.auto()
    RESTART = enum.auto()
    TARGET = enum.auto()  # value: a target as `mlx-spec serve --target` takes it
    DRAFTER = enum.auto()  # value: a drafter, or "" for the drafter made for the target
    COPY_URL = enum.auto()
    COPY_ENVIRONMENT = enum.auto()
    OPEN_PAGE = enum.auto()
    OPEN_LOGS = enum.auto()
    LOGIN = enum.auto()  # switches the start at login on or off
    GET_MODEL = enum.auto()  # opens the models in the page
    OPENED = enum.auto()  # the menu was opened: the models on the disk are listed again
    QUIT = enum.auto()


@dataclass(frozen=True)
class Click:
    """A click on an entry."""

    action: Action
    value: str = ""


@dataclass(frozen=True)
class Item:
    """A line of text; it can be clicked if it has a click."""

    label: str
    click: Click | None = None
    checked: bool | None = None  # None for an entry without a mark


@dataclass(frozen=True)
class Menu:
    """A menu with its label: the text beside the icon in the bar, or a line of another menu."""

    label: str
    entries: tuple[Item | Menu | None, ...]  # None for a line between groups
    icon: str = "bolt.fill"  # in the bar, a name of SF Symbols
    state: str = ""  # in words, for those who do not see the icon


class Phase(enum.Enum):
    """The state of the server."""

    STOPPED = enum.auto()
    STARTING = enum.auto()  # it has not answered yet
    LOADING = enum.auto()
    RUNNING = enum.auto()
    SILENT = enum.auto()  # it runs, but it no longer answers
    STOPPING = enum.auto()
    CRASHED = enum.auto()  # it will be started again
    FAILED = enum.auto()  # it will not be started again


@dataclass(frozen=True)
class Figures:
    """Figures of the last answer; None for what is not known."""

    tokens_per_second: float | None = None
    gain: str | None = None  # in words, such as "1.9 × faster"
    memory_bytes: int | None = None  # held by MLX
    off_reason: str | None = None  # why nothing is drafted, in the server's words
    running: int = 0  # requests that are answered now
    waiting: int = 0


@dataclass(frozen=True)
class State:
    """All that the menu shows."""

    phase: Phase = Phase.STOPPED
    url: str | None = None  # of the server, without /v1
    is_ours: bool = True  # False if another program started it: the menu then watches but never ends it
    names: tuple[str, ...] = ()  # of the models it serves, loaded ones first
    selection: PairSpec | None = None  # None: the default of `mlx-spec serve`
    models: Mapping[str, int] = field(default_factory=dict)  # models on this disk -> bytes
    figures: Figures = Figures()
    problem: str | None = None
    retry_s: float = 0.0  # until a crashed server is started again
    login: bool = False  # it starts at login
    note: str | None = None  # about the menu itself


def menu(state: State) -> Menu:
    """Return the menu of a state."""
    speed = state.figures.tokens_per_second
    title = f"{speed:.0f}" if state.phase is Phase.RUNNING and speed is not None else ""
    program = (
        _item("Launch at login", Action.LOGIN, checked=state.login),
        Item(f"Version {__version__}"),
        _item(_quit_words(state), Action.QUIT),
    )
    groups = (_status(state), _server(state), _selections(state), _endpoint(state), program)
    entries = [entry for group in groups for entry in (None, *group)]
    return Menu(title, tuple(entries[1:]), *_icon(state))


def _icon(state: State) -> tuple[str, str]:
    """Return the icon in the bar and the state in words."""
    match state.phase:
        case Phase.RUNNING if state.figures.running:
            return "bolt.fill", "answering"
        case Phase.RUNNING:
            return "bolt", "ready"
        case Phase.STARTING | Phase.LOADING | Phase.STOPPING:
            return "hourglass", "loading" if state.phase is not Phase.STOPPING else "stopping"
        case Phase.STOPPED:
            return "bolt.slash", "stopped"
    return "exclamationmark.triangle", "in trouble"


def _quit_words(state: State) -> str:
    if state.phase in (Phase.STOPPED, Phase.FAILED):
        return "Quit"
    return "Quit and stop the server" if state.is_ours else "Quit; the server goes on"


def _status(state: State) -> tuple[Item, ...]:
    lines = [headline(state), *_wrapped(state.problem)]
    if state.phase is Phase.RUNNING:
        lines.append(figures_line(state.figures))
        if (figures := state.figures).running or figures.waiting:
            plural = "" if figures.running == 1 else "s"
            lines.append(f"{figures.running} request{plural} running, {figures.waiting} waiting")
        lines += [f"Drafts: {why}"] if (why := state.figures.off_reason) else []
    return tuple(Item(_shortened(line)) for line in [*lines, *_wrapped(state.note)] if line)


def headline(state: State) -> str:
    """Return the state and the address of the server in words."""
    where = (state.url or "").removeprefix("http://")
    name = f"{state.names[0]} at {where}" if state.names else f"Running at {where}"
    return {
        Phase.STOPPED: "Stopped",
        Phase.STARTING: f"Starting at {where}…",
        Phase.LOADING: "Loading the model…",
        Phase.RUNNING: name if state.is_ours else f"{name}, started elsewhere",
        Phase.SILENT: f"Not responding at {where}",
        Phase.STOPPING: "Stopping…",
        Phase.CRASHED: f"Crashed: starts again in {state.retry_s:.0f} s",
        Phase.FAILED: "Could not start",
    }[state.phase]


def figures_line(figures: Figures) -> str:
    """Return a line such as `1.9 × faster · 61 tokens/s · 6.2 GB` of the figures that are known."""
    texts = [
        figures.gain,
        None if figures.tokens_per_second is None else f"{figures.tokens_per_second:.0f} tokens/s",
        None if figures.memory_bytes is None else human_bytes(figures.memory_bytes),
    ]
    return " · ".join(text for text in texts if text)


def environment_example(url: str, *, key: bool) -> str:
    """Return shell lines that point OpenAI's and Anthropic's clients at a server, without the real key."""
    secret = "YOUR-KEY" if key else "none"
    return (
        f"export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={secret}\n"
        f"export ANTHROPIC_BASE_URL={url} ANTHROPIC_API_KEY={secret}\n"
    )


def _server(state: State) -> tuple[Item, ...]:
    alive = state.phase in {Phase.STARTING, Phase.LOADING, Phase.RUNNING, Phase.SILENT} and state.is_ours
    return (
        _item("Start", Action.START, allowed=state.phase in (Phase.STOPPED, Phase.CRASHED, Phase.FAILED)),
        _item("Stop", Action.STOP, allowed=alive or state.phase is Phase.CRASHED),
        _item("Restart", Action.RESTART, allowed=alive),
    )


def _selections(state: State) -> tuple[Menu, ...]:
    allowed = state.is_ours and state.phase is not Phase.STOPPING
    selected = state.selection or PairSpec(DEMO)
    served, drafter = selected.target, selected.drafter
    targets = tuple(
        _item(label, Action.TARGET, name, allowed=allowed, checked=name == served)
        for name, label in _targets(state)
    )
    ways = {**DRAFTERS, drafter: DRAFTERS.get(drafter, str(drafter))}
    drafters = tuple(
        _item(label, Action.DRAFTER, way or "", allowed=allowed, checked=way == drafter)
        for way, label in ways.items()
    )
    more = _item("Get a model…", Action.GET_MODEL, allowed=state.phase is Phase.RUNNING)
    return Menu("Model", (*targets, None, more)), Menu("Draft", drafters)


def _targets(state: State) -> list[tuple[str, str]]:
    """Return names and labels of the demo, the models on the disk and the selected one."""
    labels = {DEMO: DEMO} | {name: f"{name} ({human_bytes(size)})" for name, size in state.models.items()}
    if state.selection is not None:
        labels.setdefault(state.selection.target, state.selection.target)
    return [(name, _shortened(label)) for name, label in labels.items()]


def _endpoint(state: State) -> tuple[Item, ...]:
    here = state.url is not None
    return (
        _item("Copy endpoint URL", Action.COPY_URL, allowed=here),
        _item("Copy environment example", Action.COPY_ENVIRONMENT, allowed=here),
        _item("Open chat page", Action.OPEN_PAGE, allowed=state.phase is Phase.RUNNING),
        _item("Open logs", Action.OPEN_LOGS),
    )


def _item(
    label: str, action: Action, value: str = "", *, allowed: bool = True, checked: bool | None = None
) -> Item:
    return Item(label, Click(action, value) if allowed else None, checked)


def _wrapped(text: str | None) -> list[str]:
    """Return a message in at most five lines; a longer one is cut."""
    words = " ".join((text or "").split())
    return textwrap.wrap(words, width=60, max_lines=5, placeholder="…")


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    most = 90  # characters: longer ones make the menu wider than a small screen
    return line if len(line) <= most else f"{line[: most - 1]}…"
