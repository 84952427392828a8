"""Events to states to menus: a snapshot of every state."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce as fold

import pytest

from mlx_spec.apps.chat.status import OFF as OFF_REASONS
from mlx_spec.apps.menubar.figures import Figures
from mlx_spec.apps.menubar.menu import (
    OFF,
    duration,
    environment_example,
    live_line,
    menu,
    off_line,
    saved_line,
)
from mlx_spec.apps.menubar.model import Action, Command, Entry, Item, Separator, Submenu
from mlx_spec.apps.menubar.state import (
    Answered,
    Choice,
    Chosen,
    Crashed,
    Ended,
    Event,
    Found,
    GaveUp,
    Launched,
    Leaving,
    LocalModel,
    LoginSet,
    Measured,
    Named,
    Noted,
    Phase,
    State,
    Unanswered,
    reduce,
)
from mlx_spec.types import Reason

URL = "http://127.0.0.1:8080"
FAST = Figures(speed=61.3, gain=1.87, per_round=3.14, memory=6_240_000_000, reason="speculation pays")
SLOW = Figures(speed=20.1, memory=31_000_000, reason="too few draft tokens accepted")
UP: tuple[Event, ...] = (Launched(URL), Answered("loading"), Answered("ok"), Named(("demo",)))


def after(*events: Event, begin: State | None = None) -> State:
    return fold(reduce, events, begin or State())


def drawn(entry: Entry) -> list[str]:
    """Lines of an entry: `(…)` cannot be clicked, `•` is marked, `◦` could be."""
    if isinstance(entry, Separator):
        return ["---"]
    if isinstance(entry, Item):
        mark = {None: "", True: "• ", False: "◦ "}[entry.checked]
        return [mark + (entry.label if entry.enabled else f"({entry.label})")]
    return [f"{entry.label} ▸", *(f"    {line}" for inner in entry.entries for line in drawn(inner))]


def lines(state: State) -> list[str]:
    return [line for entry in menu(state).entries for line in drawn(entry)]


def group(state: State, number: int) -> list[str]:
    """The lines between two separators."""
    return "\n".join(lines(state)).split("\n---\n")[number].split("\n")


def test_a_whole_menu():
    state = after(
        *UP, Measured(FAST, 41.4), Found((LocalModel("owner/big-4bit", 4_300_000_000),)), LoginSet(False)
    )
    assert menu(state).title == "61"
    assert lines(state) == [
        "(demo at 127.0.0.1:8080)",
        "(61 tok/s · ×1.9 · 3.1 tok/round · 6.2 GB)",
        "(Saved 41 s today)",
        "---",
        "(Start)",
        "Stop",
        "Restart",
        "---",
        "Model ▸",
        "    • demo",
        "    ◦ owner/big-4bit (4.3 GB)",
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
        "Quit",
    ]


STOPPED = ["Start", "(Stop)", "(Restart)"]
ALIVE = ["(Start)", "Stop", "Restart"]
NEITHER = ["(Start)", "(Stop)", "(Restart)"]
STATES: dict[str, tuple[tuple[Event, ...], Phase, list[str], list[str]]] = {
    "new": ((), Phase.STOPPED, ["(Stopped)"], STOPPED),
    "starting": (UP[:1], Phase.STARTING, ["(Starting at 127.0.0.1:8080…)"], ALIVE),
    "not yet": ((*UP[:1], Unanswered()), Phase.STARTING, ["(Starting at 127.0.0.1:8080…)"], ALIVE),
    "loading": (UP[:2], Phase.LOADING, ["(Loading the model…)"], ALIVE),
    "about to fail": ((*UP[:2], Answered("failed")), Phase.LOADING, ["(Loading the model…)"], ALIVE),
    "running": (UP, Phase.RUNNING, ["(demo at 127.0.0.1:8080)"], ALIVE),
    "unnamed": (UP[:3], Phase.RUNNING, ["(Running at 127.0.0.1:8080)"], ALIVE),
    "speculation off": (
        (*UP, Measured(SLOW, 0.2)),
        Phase.RUNNING,
        [
            "(demo at 127.0.0.1:8080)",
            "(20 tok/s · 31 MB)",
            "(Speculation is off: too few draft tokens are accepted)",
            "(Saved 0 s today)",
        ],
        ALIVE,
    ),
    "silent": ((*UP, Unanswered()), Phase.SILENT, ["(Not responding at 127.0.0.1:8080)"], ALIVE),
    "heard again": ((*UP, Unanswered(), Answered("ok")), Phase.RUNNING, ["(demo at 127.0.0.1:8080)"], ALIVE),
    "stopping": ((*UP, Leaving()), Phase.STOPPING, ["(Stopping…)"], NEITHER),
    "draining": ((*UP, Answered("draining")), Phase.STOPPING, ["(Stopping…)"], NEITHER),
    "stopped": (
        (*UP, Measured(FAST, 200.0), Leaving(), Ended()),
        Phase.STOPPED,
        ["(Stopped)", "(Saved 3 min today)"],
        STOPPED,
    ),
    "crashed": (
        (*UP, Crashed("the server was ended by signal 9", 4.0)),
        Phase.WAITING,
        ["(Crashed: starts again in 4 s)", "(the server was ended by signal 9)"],
        ["Start", "Stop", "(Restart)"],
    ),
    "started again": (
        (*UP, Crashed("the server was ended by signal 9", 4.0), Launched(URL)),
        Phase.STARTING,
        ["(Starting at 127.0.0.1:8080…)"],
        ALIVE,
    ),
    "failed": (
        (*UP[:2], GaveUp("there is no folder nowhere")),
        Phase.FAILED,
        ["(Could not start)", "(there is no folder nowhere)"],
        STOPPED,
    ),
    "elsewhere": (
        (Launched(URL, own=False), *UP[2:]),
        Phase.RUNNING,
        ["(demo at 127.0.0.1:8080, started elsewhere)"],
        NEITHER,
    ),
    "noted": ((Noted("it is hidden"),), Phase.STOPPED, ["(Stopped)", "(it is hidden)"], STOPPED),
}


@pytest.mark.parametrize("name", STATES)
def test_snapshot(name):
    events, phase, status, server = STATES[name]
    state = after(*events)
    assert state.phase is phase
    assert group(state, 0) == status
    assert group(state, 1) == server


def test_every_phase_has_a_snapshot():
    assert {phase for _, phase, _, _ in STATES.values()} == set(Phase)


@pytest.mark.parametrize("name", STATES)
def test_what_can_be_clicked_fits_the_state(name):
    state = after(*STATES[name][0])
    commands = [
        entry.command.action for entry in menu(state).entries if isinstance(entry, Item) and entry.command
    ]
    assert (Action.COPY_URL in commands) is (state.url is not None)
    assert (Action.OPEN_PAGE in commands) is (state.phase is Phase.RUNNING)
    assert Action.QUIT in commands and Action.OPEN_LOGS in commands
    assert (menu(state).title != "") is (state.phase is Phase.RUNNING and state.figures.speed is not None)


def test_nothing_is_left_of_a_server_that_ended_but_the_seconds():
    state = after(*UP, Measured(FAST, 41.0), Ended())
    assert state == State(saved=41.0)


@pytest.mark.parametrize(
    "event", [Ended(), Crashed("x", 1.0), GaveUp("x"), Launched("http://127.0.0.1:8081")]
)
def test_figures_are_those_of_the_server_that_runs(event):
    assert after(*UP, Measured(FAST, 1.0), event).figures == Figures()


def test_choices_are_marked():
    chosen = after(Found((LocalModel("owner/a", 5 * 10**9),)), Chosen(Choice("owner/a", "lookup")))
    assert group(chosen, 2) == [
        "Model ▸",
        "    ◦ demo",
        "    • owner/a (5.0 GB)",
        "Draft ▸",
        "    ◦ auto",
        "    ◦ off",
        "    • lookup",
    ]


def test_a_target_and_a_drafter_of_the_command_line_are_listed():
    assert group(State(choice=Choice("/models/mine", "owner/draft")), 2) == [
        "Model ▸",
        "    ◦ demo",
        "    • /models/mine",
        "Draft ▸",
        "    ◦ auto",
        "    ◦ off",
        "    ◦ lookup",
        "    • owner/draft",
    ]


def test_models_named_on_the_command_line_have_their_drafters_from_there():
    found = group(State(fixed=True), 2)
    assert found == ["Model ▸", "    ◦ demo", "Draft ▸", "    • (auto)", "    ◦ (off)", "    ◦ (lookup)"]


def test_nothing_is_chosen_for_somebody_elses_server():
    found = group(after(Launched(URL, own=False)), 2)
    assert all(line.endswith(("▸", ")")) for line in found)


def test_commands_say_what_to_serve():
    (draft,) = [one for one in menu(after(*UP)).entries if isinstance(one, Submenu) and one.label == "Draft"]
    assert [item.command for item in draft.entries] == [
        Command(Action.DRAFTER, ""),
        Command(Action.DRAFTER, "none"),
        Command(Action.DRAFTER, "lookup"),
    ]


@pytest.mark.parametrize("login", [None, True, False])
def test_login_is_offered_where_there_is_such_a_thing(login):
    found = [line for line in lines(State(login=login)) if "login" in line]
    assert found == {None: [], True: ["• Launch at login"], False: ["◦ Launch at login"]}[login]


def test_the_live_line_says_what_is_known():
    whole = State(figures=FAST)
    assert live_line(whole) == "61 tok/s · ×1.9 · 3.1 tok/round · 6.2 GB"
    assert live_line(replace(whole, figures=replace(FAST, gain=None, per_round=None))) == "61 tok/s · 6.2 GB"
    assert live_line(State()) == ""


def test_off_is_explained_for_exactly_the_servers_reasons():
    assert set(OFF) == {reason.value for reason in OFF_REASONS}
    for reason in Reason:
        said = off_line(State(figures=Figures(reason=reason.value)))
        assert said.startswith("Speculation is off: ") is (reason in OFF_REASONS)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0, "Saved 0 s today"),
        (-0.4, "Saved 0 s today"),
        (41.4, "Saved 41 s today"),
        (99.6, "Saved 2 min today"),
        (5040.0, "Saved 84 min today"),
        (9000.0, "Saved 2.5 h today"),
        (-3.2, "Lost 3 s today"),
    ],
)
def test_saved_line(seconds, said):
    assert saved_line(seconds) == said


def test_durations_do_not_jump_at_their_borders():
    assert [duration(s) for s in (99.4, 99.5, 5969, 5970)] == ["99 s", "2 min", "99 min", "1.7 h"]


def test_the_environment_example_never_holds_the_key():
    assert environment_example(URL, key=False) == (
        f"export OPENAI_BASE_URL={URL}/v1 OPENAI_API_KEY=none\n"
        f"export ANTHROPIC_BASE_URL={URL} ANTHROPIC_API_KEY=none\n"
    )
    assert "YOUR-KEY" in environment_example(URL, key=True)


def test_long_messages_are_a_few_lines():
    message = (
        "--api-key-file /nowhere/at/all/whatever cannot be read:\nwrite the key into it, or name another"
    )
    assert group(after(GaveUp(message)), 0)[1:] == [
        "(--api-key-file /nowhere/at/all/whatever cannot be read:)",
        "(write the key into it, or name another)",
    ]
    endless = group(after(GaveUp("ab " * 500)), 0)[1:]
    assert len(endless) == 5 and endless[-1].endswith("…)") and max(map(len, endless)) <= 62
    (name,) = [line for line in lines(State(choice=Choice("/models/" + "a" * 200))) if "/models" in line]
    assert len(name.strip()) == 92 and name.endswith("…")
