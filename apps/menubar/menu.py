"""From what is known to what is shown. Pure."""

from __future__ import annotations

import textwrap

from mlx_spec.apps.menubar.model import Action, Command, Entry, Item, Menu, Separator, Submenu
from mlx_spec.apps.menubar.state import LIVELY, LocalModel, Phase, State

LONGEST = 90  # characters of a line
WIDTH, MOST = 60, 5  # characters and lines of a message
NONE, LOOKUP, DEMO = "none", "lookup", "demo"
DRAFTERS = ((None, "auto"), (NONE, "off"), (LOOKUP, "lookup"))
# The server's reasons for plain decoding, as `mlx_spec.types.Reason` words them, and what the user reads.
OFF = {
    "disabled by user": "it is switched off",
    "no drafter": "the model has no drafter",
    "verification costs more than it gains": "checking drafts costs more here than it gains",
    "too few draft tokens accepted": "too few draft tokens are accepted",
    "speculation has lost time so far": "it has lost time so far",
}


def menu(state: State) -> Menu:
    """The menu of a state."""
    speed = state.figures.speed
    title = f"{speed:.0f}" if state.phase is Phase.RUNNING and speed is not None else ""
    groups: tuple[tuple[Entry, ...], ...] = (
        _status(state),
        _server(state),
        _choices(state),
        _endpoint(state),
        _program(state),
    )
    entries: list[Entry] = []
    for group in filter(None, groups):
        entries += [Separator(), *group] if entries else group
    return Menu(title, tuple(entries))


def _status(state: State) -> tuple[Item, ...]:
    lines = [headline(state), *_wrapped(state.problem)]
    if state.phase is Phase.RUNNING:
        lines += filter(None, [live_line(state), off_line(state)])
    lines += [saved_line(state.saved)] if state.saved is not None else []
    return tuple(Item(_short(line)) for line in [*lines, *_wrapped(state.note)])


def headline(state: State) -> str:
    """How the server is, and where."""
    where = "" if state.url is None else state.url.removeprefix("http://")
    match state.phase:
        case Phase.STOPPED:
            return "Stopped"
        case Phase.STARTING:
            return f"Starting at {where}…"
        case Phase.LOADING:
            return "Loading the model…"
        case Phase.RUNNING:
            name = f"{state.names[0]} at {where}" if state.names else f"Running at {where}"
            return name if state.own else f"{name}, started elsewhere"
        case Phase.SILENT:
            return f"Not responding at {where}"
        case Phase.STOPPING:
            return "Stopping…"
        case Phase.WAITING:
            return f"Crashed: starts again in {duration(state.retry)}"
        case Phase.FAILED:
            return "Could not start"


def live_line(state: State) -> str:
    """Such as `61 tok/s · ×1.9 · 3.1 tok/round · 6.2 GB`, of what is known."""
    figures = state.figures
    parts = [
        None if figures.speed is None else f"{figures.speed:.0f} tok/s",
        None if figures.gain is None else f"×{figures.gain:.1f}",
        None if figures.per_round is None else f"{figures.per_round:.1f} tok/round",
        None if figures.memory is None else _size(figures.memory),
    ]
    return " · ".join(part for part in parts if part)


def off_line(state: State) -> str:
    """Why there is no speculation; "" where there is, or where nothing is known."""
    why = OFF.get(state.figures.reason or "")
    return f"Speculation is off: {why}" if why else ""


def saved_line(seconds: float) -> str:
    """What a day has brought."""
    if seconds <= -1:  # the time ledger bounds it, but the user may know
        return f"Lost {duration(-seconds)} today"
    return f"Saved {duration(max(seconds, 0))} today"


def duration(seconds: float) -> str:
    """Such as `41 s`, `12 min`, `1.4 h`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 99.5 * 60 else f"{seconds / 3600:.1f} h"


def environment_example(url: str, *, key: bool) -> str:
    """Lines for a shell that point OpenAI's and Anthropic's clients at a server; a key is not given away."""
    secret = "YOUR-KEY" if key else "none"
    return (
        f"export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={secret}\n"
        f"export ANTHROPIC_BASE_URL={url} ANTHROPIC_API_KEY={secret}\n"
    )


def _server(state: State) -> tuple[Item, ...]:
    lively = state.phase in LIVELY and state.own
    idle = state.phase in (Phase.STOPPED, Phase.WAITING, Phase.FAILED)
    can_stop = lively or state.phase is Phase.WAITING
    return (
        _item("Start", Action.START, allowed=idle),
        _item("Stop", Action.STOP, allowed=can_stop),
        _item("Restart", Action.RESTART, allowed=lively),
    )


def _choices(state: State) -> tuple[Submenu, ...]:
    allowed = state.own and state.phase is not Phase.STOPPING
    target, drafter = state.choice.target, state.choice.drafter
    models = _listed(state)
    targets = tuple(
        _item(label, Action.TARGET, name, allowed=allowed, checked=_is_target(name, target, state))
        for name, label in models
    )
    ways = [*DRAFTERS]
    if drafter is not None and drafter not in (NONE, LOOKUP):
        ways.append((drafter, drafter))
    drafts = tuple(
        _item(label, Action.DRAFTER, way or "", allowed=allowed and not state.fixed, checked=way == drafter)
        for way, label in ways
    )
    return Submenu("Model", targets), Submenu("Draft", drafts)


def _listed(state: State) -> list[tuple[str, str]]:
    """Names and labels of targets to choose from: the demo, what is on the disk, what was chosen."""
    sizes = {DEMO: None, **{model.name: model for model in state.models}}
    if state.choice.target is not None:
        sizes.setdefault(state.choice.target, None)
    return [(name, _labelled(name, model)) for name, model in sizes.items()]


def _labelled(name: str, model: LocalModel | None) -> str:
    return _short(name if model is None else f"{name} ({_size(model.size)})")


def _is_target(name: str, target: str | None, state: State) -> bool:
    return name == target or (name == DEMO and target is None and not state.fixed)


def _endpoint(state: State) -> tuple[Item, ...]:
    here = state.url is not None
    return (
        _item("Copy endpoint URL", Action.COPY_URL, allowed=here),
        _item("Copy environment example", Action.COPY_ENVIRONMENT, allowed=here),
        _item("Open chat page", Action.OPEN_PAGE, allowed=state.phase is Phase.RUNNING),
        _item("Open logs", Action.OPEN_LOGS),
    )


def _program(state: State) -> tuple[Item, ...]:
    login = () if state.login is None else (_item("Launch at login", Action.LOGIN, checked=state.login),)
    return (*login, _item("Quit", Action.QUIT))


def _item(
    label: str, action: Action, value: str = "", *, allowed: bool = True, checked: bool | None = None
) -> Item:
    return Item(label, Command(action, value) if allowed else None, checked)


def _size(count: int) -> str:
    """Bytes such as `6.2 GB`."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.0f} MB"


def _wrapped(text: str | None) -> list[str]:
    """A message in lines; what is lost of a very long one is its end."""
    return textwrap.wrap(" ".join((text or "").split()), WIDTH, max_lines=MOST, placeholder="…")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"
