"""States to menus: a snapshot of every phase."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlx_spec import __version__
from mlx_spec.apps.menubar.menu import Action, Figures, Item, Menu, Phase, State, environment_example, menu

URL = "http://127.0.0.1:8080"
FAST = Figures(61.3, "1.9 × faster", 6_240_000_000)
SLOW = Figures(20.1, memory_bytes=31_000_000, off_reason="off, they have lost time so far")
UP = State(Phase.RUNNING, URL, names=("demo",))


def drawn(entry: Item | Menu | None) -> list[str]:
    """Lines of an entry: `(…)` cannot be clicked, `•` is marked, `◦` could be."""
    if entry is None:
        return ["---"]
    if isinstance(entry, Item):
        mark = {None: "", True: "• ", False: "◦ "}[entry.checked]
        return [mark + (entry.label if entry.click else f"({entry.label})")]
    return [f"{entry.label} ▸", *(f"    {line}" for inner in entry.entries for line in drawn(inner))]


def lines(state: State) -> list[str]:
    return [line for entry in menu(state).entries for line in drawn(entry)]


def group(state: State, number: int) -> list[str]:
    """The lines between two separators."""
    return "\n".join(lines(state)).split("\n---\n")[number].split("\n")


def test_a_whole_menu():
    state = replace(UP, figures=FAST, models={"owner/big-4bit": 4_300_000_000})
    assert menu(state).label == "61"
    assert lines(state) == [
        "(demo at 127.0.0.1:8080)",
        "(1.9 × faster · 61 tokens/s · 6.2 GB)",
        "---",
        "(Start)",
        "Stop",
        "Restart",
        "---",
        "Model ▸",
        "    • demo",
        "    ◦ owner/big-4bit (4.3 GB)",
        "    ---",
        "    Get a model…",
        "Draft ▸",
        "    • auto",
        "    ◦ off",
        "    ◦ lookup",
        "---",
        "Copy endpoint URL",
        "Copy environment example",
        "Open chat page",
        "Open logs",
        "---",
        "◦ Launch at login",
        f"(Version {__version__})",
        "Quit and stop the server",
    ]


STOPPED = ["Start", "(Stop)", "(Restart)"]
ALIVE = ["(Start)", "Stop", "Restart"]
NEITHER = ["(Start)", "(Stop)", "(Restart)"]
OFF_LINE = "(Drafts: off, they have lost time so far)"
STATES = {
    "new": (State(), ["(Stopped)"], STOPPED),
    "starting": (State(Phase.STARTING, URL), ["(Starting at 127.0.0.1:8080…)"], ALIVE),
    "loading": (State(Phase.LOADING, URL), ["(Loading the model…)"], ALIVE),
    "running": (UP, ["(demo at 127.0.0.1:8080)"], ALIVE),
    "unnamed": (State(Phase.RUNNING, URL), ["(Running at 127.0.0.1:8080)"], ALIVE),
    "off": (
        replace(UP, figures=SLOW),
        ["(demo at 127.0.0.1:8080)", "(20 tokens/s · 31.0 MB)", OFF_LINE],
        ALIVE,
    ),
    "silent": (replace(UP, phase=Phase.SILENT), ["(Not responding at 127.0.0.1:8080)"], ALIVE),
    "stopping": (replace(UP, phase=Phase.STOPPING), ["(Stopping…)"], NEITHER),
    "crashed": (
        State(Phase.CRASHED, problem="the server was ended by signal 9", retry_s=4.0),
        ["(Crashed: starts again in 4 s)", "(the server was ended by signal 9)"],
        ["Start", "Stop", "(Restart)"],
    ),
    "failed": (
        State(Phase.FAILED, problem="there is no folder nowhere"),
        ["(Could not start)", "(there is no folder nowhere)"],
        STOPPED,
    ),
    "elsewhere": (replace(UP, is_ours=False), ["(demo at 127.0.0.1:8080, started elsewhere)"], NEITHER),
    "noted": (State(note="it is hidden"), ["(Stopped)", "(it is hidden)"], STOPPED),
}


@pytest.mark.parametrize("name", STATES)
def test_snapshot(name):
    state, status, server = STATES[name]
    assert group(state, 0) == status
    assert group(state, 1) == server
    clicks = [entry.click.action for entry in menu(state).entries if isinstance(entry, Item) and entry.click]
    assert (Action.COPY_URL in clicks) is (state.url is not None)
    assert (Action.OPEN_PAGE in clicks) is (state.phase is Phase.RUNNING)
    assert Action.QUIT in clicks and Action.OPEN_LOGS in clicks


def test_every_phase_has_a_snapshot():
    assert {state.phase for state, _, _ in STATES.values()} == set(Phase)


def test_the_environment_example_never_holds_the_key():
    assert environment_example(URL, key=False) == (
        f"export OPENAI_BASE_URL={URL}/v1 OPENAI_API_KEY=none\n"
        f"export ANTHROPIC_BASE_URL={URL} ANTHROPIC_API_KEY=none\n"
    )
    assert "YOUR-KEY" in environment_example(URL, key=True)
