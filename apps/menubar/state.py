"""What the menu knows, and how each event changes it. Pure: no clock, no files, no processes."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TypeAlias

from mlx_spec.apps.menubar.figures import UNKNOWN, Figures


class Phase(enum.Enum):
    """How the server is."""

    STOPPED = enum.auto()
    STARTING = enum.auto()  # it has not answered yet
    LOADING = enum.auto()
    RUNNING = enum.auto()
    SILENT = enum.auto()  # it runs, but it has ceased to answer
    STOPPING = enum.auto()
    WAITING = enum.auto()  # it crashed and will be started again
    FAILED = enum.auto()  # it will not


LIVELY = frozenset({Phase.STARTING, Phase.LOADING, Phase.RUNNING, Phase.SILENT})


@dataclass(frozen=True)
class Choice:
    """What to serve. None: as `mlx-spec serve` chooses without the option."""

    target: str | None = None
    drafter: str | None = None


@dataclass(frozen=True)
class LocalModel:
    """A model on this disk."""

    name: str
    size: int  # bytes


@dataclass(frozen=True)
class State:
    """A moment."""

    phase: Phase = Phase.STOPPED
    url: str | None = None  # of the server, without /v1
    own: bool = True  # False: somebody else started it, so it is watched and not ended
    names: tuple[str, ...] = ()  # of the models it serves, loaded ones first
    choice: Choice = Choice()
    fixed: bool = False  # the command line names the models, there is nothing to choose
    models: tuple[LocalModel, ...] = ()
    figures: Figures = UNKNOWN
    saved: float | None = None  # seconds, today
    problem: str | None = None
    retry: float = 0.0  # seconds until it is started again
    login: bool | None = None  # started at login; None: not on this system
    note: str | None = None  # about the menu itself


@dataclass(frozen=True)
class Launched:
    """A server was started, or one that runs already was found."""

    url: str
    own: bool = True


@dataclass(frozen=True)
class Answered:
    """`/health` said how it is."""

    status: str


@dataclass(frozen=True)
class Unanswered:
    """`/health` did not answer."""


@dataclass(frozen=True)
class Named:
    """`/v1/models` said what it serves."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Measured:
    """`/metrics` said how it goes."""

    figures: Figures
    saved: float | None


@dataclass(frozen=True)
class Crashed:
    """It ended without being asked to."""

    problem: str
    retry: float  # seconds


@dataclass(frozen=True)
class GaveUp:
    """It ended in a way that another start would only repeat."""

    problem: str


@dataclass(frozen=True)
class Leaving:
    """It was asked to end."""


@dataclass(frozen=True)
class Ended:
    """It has ended."""


@dataclass(frozen=True)
class Found:
    """The models on this disk."""

    models: tuple[LocalModel, ...]


@dataclass(frozen=True)
class Chosen:
    """Another model or drafter."""

    choice: Choice


@dataclass(frozen=True)
class LoginSet:
    """Whether the menu is started at login."""

    on: bool


@dataclass(frozen=True)
class Noted:
    """Something about the menu that the user should know; None: no longer."""

    text: str | None


Event: TypeAlias = (
    Launched
    | Answered
    | Unanswered
    | Named
    | Measured
    | Crashed
    | GaveUp
    | Leaving
    | Ended
    | Found
    | Chosen
    | LoginSet
    | Noted
)
# Others, such as "failed", are about to end the server: its end says more.
PHASES = {"ok": Phase.RUNNING, "loading": Phase.LOADING, "draining": Phase.STOPPING}


def reduce(state: State, event: Event) -> State:
    """The state after an event."""
    match event:
        case Launched(url, own):
            return replace(_without_server(state), phase=Phase.STARTING, url=url, own=own)
        case Answered(status):
            return replace(state, phase=PHASES.get(status, state.phase))
        case Unanswered():
            heard = state.phase in (Phase.LOADING, Phase.RUNNING)
            return replace(state, phase=Phase.SILENT) if heard else state
        case Named(names):
            return replace(state, names=names)
        case Measured(figures, saved):
            return replace(state, figures=figures, saved=saved)
        case Crashed(problem, retry):
            return replace(_without_server(state), phase=Phase.WAITING, problem=problem, retry=retry)
        case GaveUp(problem):
            return replace(_without_server(state), phase=Phase.FAILED, problem=problem)
        case Leaving():
            return replace(state, phase=Phase.STOPPING, problem=None)
        case Ended():
            return _without_server(state)
        case _:
            return _around(state, event)


def _around(state: State, event: Found | Chosen | LoginSet | Noted) -> State:
    """Events that are not the server's."""
    match event:
        case Found(models):
            return replace(state, models=models)
        case Chosen(choice):
            return replace(state, choice=choice)
        case LoginSet(on):
            return replace(state, login=on)
        case Noted(text):
            return replace(state, note=text)


def _without_server(state: State) -> State:
    """Nothing runs, and nothing is left of what did; what was saved today stays."""
    return replace(
        state,
        phase=Phase.STOPPED,
        url=None,
        own=True,
        names=(),
        figures=UNKNOWN,
        problem=None,
        retry=0.0,
    )
