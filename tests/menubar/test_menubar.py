"""The parts of the menu around its state: figures, files, ports, options, login; and no MLX."""

from __future__ import annotations

import fcntl
import json
import os
import plistlib
import subprocess
import sys
from datetime import date, timedelta
from pathlib import Path

import pytest
from endpoint import fresh

from mlx_spec.apps.menubar import desktop, login, logs, ports
from mlx_spec.apps.menubar.arguments import parse
from mlx_spec.apps.menubar.client import Address
from mlx_spec.apps.menubar.control import local_models
from mlx_spec.apps.menubar.figures import NO_COUNTERS, Counters, Watch
from mlx_spec.apps.menubar.places import Places, read_object, users, write
from mlx_spec.apps.menubar.savings import DAYS, Savings
from mlx_spec.apps.menubar.state import Choice, LocalModel
from mlx_spec.apps.menubar.supervisor import Wish
from mlx_spec.errors import InvalidValue

ROOT = Path(__file__).parents[2]
LIMIT = 60  # seconds until a process counts as hung
TODAY = date(2026, 11, 21)


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


# --- without MLX

PROGRAM = """
import sys
from mlx_spec.apps.menubar import arguments, control, desktop, login, main
from mlx_spec.apps.menubar.menu import menu
from mlx_spec.apps.menubar.state import Answered, Launched, State, reduce
state = State()
for event in (Launched("http://127.0.0.1:1"), Answered("ok")):
    state = reduce(state, event)
    assert menu(state).entries
arguments.parse(["--target", "demo"])
print(*sorted({name.split(".")[0] for name in sys.modules}))
"""


def test_the_process_of_the_menu_never_loads_mlx():
    done = run("-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    heavy = {"mlx", "mlx_lm", "numpy", "transformers", "fastapi", "uvicorn", "huggingface_hub"}
    assert "mlx_spec" in done.stdout.split() and not heavy & set(done.stdout.split())


def test_help_names_the_options():
    done = run("-m", "mlx_spec.menubar", "--help")
    assert done.returncode == 0 and done.stderr == ""
    assert "--install-login-item" in done.stdout and "mlx-spec serve" in done.stdout


@pytest.mark.skipif(sys.platform == "darwin", reason="there it would install one")
def test_login_items_are_refused_where_there_are_none():
    done = run("-m", "mlx_spec.menubar", "--install-login-item")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("mlx-spec: login items are of macOS") and done.stderr.count("\n") == 1


def test_a_second_menu_leaves_at_once(tmp_path, monkeypatch):
    for name in ("HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    places = users()
    places.make()
    with places.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = run("-m", "mlx_spec.menubar")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "mlx-spec: the menu runs already\n")


# Stand-ins for what may be installed, or not, on a machine without a display.
ABSENT = "raise ImportError('not installed')"
LOST = "raise RuntimeError('Bad display name')"  # as pystray where there is neither GTK nor X11
OLD = "def require_version(name, version): raise ValueError('Namespace Gtk not available')"


@pytest.mark.skipif(sys.platform == "darwin", reason="there it would be shown")
@pytest.mark.parametrize(
    "installed",
    [{}, {"pystray": LOST, "gi": ABSENT}, {"pystray": LOST, "gi": OLD}, {"pystray": ABSENT}],
    ids=["what is here", "no GTK for Python", "no GTK 3", "no pystray"],
)
def test_without_a_display_it_says_what_is_needed(installed, tmp_path):
    for name, content in installed.items():
        (tmp_path / f"{name}.py").write_text(content)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", str(ROOT))])
    state = str(tmp_path / "state")
    done = run(
        "-m", "mlx_spec.menubar", PYTHONPATH=path, XDG_STATE_HOME=state, DISPLAY="", WAYLAND_DISPLAY=""
    )
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.count("\n") == 1
    assert "mlx-spec[menubar]" in done.stderr


# --- options


def test_options_of_the_server_are_passed_on():
    given = ["--target", "owner/a", "--kv-bits", "4", "--drafter=lookup", "--port", "9000", "--idle", "60"]
    plan = parse(given).plan
    assert plan.choice == Choice("owner/a", "lookup") and not plan.fixed
    assert plan.wish == Wish(Address("127.0.0.1", 9000), None, ("--kv-bits", "4", "--idle", "60"))
    assert plan.passed == tuple(given)
    assert plan.wish.line(plan.choice) == (
        "--kv-bits", "4", "--idle", "60", "--target", "owner/a", "--drafter", "lookup",
    )  # fmt: skip


def test_nothing_given_is_the_servers_defaults():
    plan = parse([]).plan
    assert (plan.choice, plan.wish.options, plan.wish.address.port) == (Choice(), (), 8080)
    assert plan.wish.line(plan.choice) == ()


def test_models_by_name_are_fixed():
    assert parse(["--model", "a=demo"]).plan.fixed
    assert not parse(["--model", "a=demo", "--target", "demo"]).plan.fixed


@pytest.mark.parametrize(
    "given",
    [
        ["--nothing"],
        ["--port", "x"],
        ["--install-login-item", "--remove-login-item"],
        ["--host", "0.0.0.0"],
    ],
)
def test_nonsense_is_one_line_and_status_2(given, capsys):
    with pytest.raises(SystemExit) as left:
        parse(given)
    said = capsys.readouterr().err
    assert left.value.code == 2 and said.count("\n") == 1 and said.startswith("mlx-spec: ")


def test_a_server_that_listens_everywhere_is_reached_here():
    assert Address("0.0.0.0", 8080).url == "http://127.0.0.1:8080"
    assert Address("::1", 8080).url == "http://[::1]:8080"


def test_ports_are_tried_in_order_and_end():
    assert [one.port for one in ports.candidates(Address("127.0.0.1", 8080))] == list(range(8080, 8090))
    assert [one.port for one in ports.candidates(Address("127.0.0.1", 65534))] == [65534, 65535]
    assert min(one.port for one in ports.candidates(Address("127.0.0.1", 0))) > 1023


# --- figures


def scrape(model: str, **values: float) -> str:
    return "".join(f'mlx_spec_{name}{{model="{model}"}} {value}\n' for name, value in values.items())


FIRST = scrape(
    "demo",
    generation_tokens_total=100,
    time_per_output_token_seconds_sum=0.02,
    time_per_output_token_seconds_count=1,
    spec_decode_num_drafts_total=10,
    spec_decode_num_accepted_tokens_total=20,
    plain_seconds_total=4,
    compared_seconds_total=2,
    gain=2.0,
)
SECOND = scrape(
    "demo",
    generation_tokens_total=300,
    time_per_output_token_seconds_sum=0.04,
    time_per_output_token_seconds_count=3,
    spec_decode_num_drafts_total=20,
    spec_decode_num_accepted_tokens_total=25,
    plain_seconds_total=9,
    compared_seconds_total=6,
    gain=1.25,
)
REASONS = (
    'mlx_spec_reason{model="demo",reason="probing"} 0.0\n'
    'mlx_spec_reason{model="demo",reason="speculation pays"} 1.0\n'
)
MEMORY = 'mlx_spec_memory_bytes{kind="active"} 6.24e+09\nmlx_spec_memory_bytes{kind="peak"} 9e+09\n'


def test_figures_are_those_of_the_requests_since_the_last_look():
    watch = Watch(NO_COUNTERS)
    assert watch.see(Counters(FIRST + REASONS + MEMORY)) == 2.0
    assert (watch.figures.speed, watch.figures.gain, watch.figures.per_round) == (50.0, 2.0, 3.0)
    assert (watch.figures.memory, watch.figures.reason) == (6_240_000_000, "speculation pays")
    assert watch.see(Counters(SECOND + MEMORY)) == 1.0
    assert (watch.figures.speed, watch.figures.gain, watch.figures.per_round) == (100.0, 1.25, 1.5)
    before = watch.figures
    assert watch.see(Counters(SECOND + MEMORY)) == 0.0
    assert watch.figures == before  # no request ended: what is shown stays


def test_rounds_that_are_counted_while_a_request_runs_are_those_of_its_end():
    running = scrape("demo", spec_decode_num_drafts_total=4, spec_decode_num_accepted_tokens_total=6)
    ended = scrape("demo", time_per_output_token_seconds_sum=0.1, time_per_output_token_seconds_count=1)
    watch = Watch(NO_COUNTERS)
    watch.see(Counters(running))
    assert (watch.figures.speed, watch.figures.per_round) == (None, 2.5)
    watch.see(Counters(running + ended))
    assert (watch.figures.speed, watch.figures.per_round) == (pytest.approx(10), 2.5)


def test_what_was_counted_before_the_menu_came_is_not_counted_again():
    watch = Watch(None)
    assert watch.see(Counters(FIRST)) == 0.0
    assert watch.figures.speed is None and watch.figures.gain == 2.0
    assert watch.see(Counters(SECOND)) == 1.0


def test_a_server_that_began_anew_counts_from_zero():
    watch = Watch(NO_COUNTERS)
    watch.see(Counters(SECOND))
    assert watch.see(Counters(FIRST)) == 2.0


def test_plain_decoding_has_no_tokens_per_round():
    plain = scrape("demo", generation_tokens_total=5, time_per_output_token_seconds_sum=0.1)
    watch = Watch(NO_COUNTERS)
    watch.see(Counters(plain + scrape("demo", time_per_output_token_seconds_count=1)))
    assert watch.figures.speed == pytest.approx(10) and watch.figures.per_round is None


def test_of_several_models_the_last_one_is_shown():
    other = scrape("other", generation_tokens_total=50, gain=3.0)
    watch = Watch(NO_COUNTERS)
    watch.see(Counters(FIRST + other))
    assert watch.figures.gain == 2.0
    watch.see(Counters(FIRST + scrape("other", generation_tokens_total=60, gain=3.5)))
    assert watch.figures.gain == 3.5


def test_labels_are_unescaped():
    counters = Counters('mlx_spec_gain{model="a\\"b\\\\c\\nd"} 2\n')
    assert counters.sum("gain", model='a"b\\c\nd') == 2.0


def test_the_server_counts_what_the_menu_reads():
    _, endpoint = fresh()
    before = Counters(endpoint.client.get("/metrics").text)
    endpoint.chat()
    watch = Watch(before)
    saved = watch.see(Counters(endpoint.client.get("/metrics").text))
    figures = watch.figures  # of endpoint.STATISTICS
    assert (figures.speed, figures.gain) == (pytest.approx(20), pytest.approx(1.5))
    assert figures.per_round == pytest.approx(2) and figures.memory is not None
    assert figures.reason == "speculation pays"
    assert saved == pytest.approx(0.1)


# --- files


def test_savings_are_kept_by_day(tmp_path):
    file = tmp_path / "savings.json"
    savings = Savings(file)
    assert savings.of(TODAY) is None
    savings.add(TODAY, 0.0)
    assert not file.exists()
    savings.add(TODAY, 40.5)
    savings.add(TODAY, -0.5)
    assert Savings(file).of(TODAY) == 40.0
    assert Savings(file).of(TODAY + timedelta(days=1)) is None


def test_old_days_go(tmp_path):
    savings = Savings(tmp_path / "savings.json")
    for i in range(DAYS + 5):
        savings.add(TODAY + timedelta(days=i), 1.0)
    assert len(read_object(tmp_path / "savings.json")) == DAYS
    assert savings.of(TODAY) is None and savings.of(TODAY + timedelta(days=DAYS + 4)) == 1.0


@pytest.mark.parametrize("content", ["", "[1]", '{"2026-11-21": "x"}', '{"2026-11-21": NaN}', "{"])
def test_a_damaged_file_is_as_good_as_none(tmp_path, content):
    (tmp_path / "savings.json").write_text(content)
    assert Savings(tmp_path / "savings.json").of(TODAY) is None


def test_files_are_private_and_replaced_whole(tmp_path):
    places = Places(tmp_path / "menubar")
    places.make()
    write(places.choice, "{}")
    assert places.folder.stat().st_mode & 0o777 == 0o700
    assert places.choice.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in places.folder.iterdir() if path.is_file()] == ["choice.json"]


def test_places_that_cannot_be_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidValue, match="cannot be used"):
        Places(tmp_path / "file" / "menubar").make()


def test_logs_are_rotated_under_a_writer(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "LARGEST", 100)
    file = tmp_path / "server.log"
    with file.open("ab", buffering=0) as writer:
        for i in range(6):
            writer.write(bytes([48 + i]) * 101)
            logs.rotate(file)
            assert logs.size(file) == 0
        writer.write(b"last")
    logs.rotate(file)
    kept = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert kept == {
        "server.log": "last",
        "server.1.log": "5" * 101,
        "server.2.log": "4" * 101,
        "server.3.log": "3" * 101,
    }


def test_last_words_are_those_of_this_start(tmp_path):
    file = tmp_path / "server.log"
    assert logs.last_words(file, 0) is None
    file.write_text("mlx-spec: of before\n")
    begin = logs.size(file)
    assert logs.last_words(file, begin) is None
    with file.open("a") as stream:
        stream.write("mlx-spec: first\nmlx-spec: second\nTraceback\n")
    assert logs.last_words(file, begin) == "second"


def test_models_are_the_targets_of_the_listing():
    rows = [
        {"name": "demo", "size": 11, "problem": None, "found": {"target": {}}},
        {"name": "owner/drafter", "size": 5, "problem": None, "found": {"kind": "draft"}},
        {"name": "owner/broken", "size": 5, "problem": "a file is missing", "found": {"kind": None}},
        {"name": "owner/unread", "size": 5, "problem": None, "found": None},
        {"name": "owner/target", "size": 5, "problem": None, "found": {"kind": None}},
    ]
    assert local_models(json.dumps(rows)) == (LocalModel("demo", 11), LocalModel("owner/target", 5))
    assert local_models("") == local_models("[1]") == local_models('{"a": 1}') == ()


def test_the_real_listing_is_understood():
    assert "demo" in [model.name for model in local_models(run("-m", "mlx_spec", "models", "--json").stdout)]


# --- login and the hazards of macOS


def test_the_agent_starts_it_at_login_and_after_crashes_only(tmp_path):
    content = plistlib.loads(login.agent(("--target", "owner/a"), tmp_path / "menubar.log"))
    assert content["ProgramArguments"] == [sys.executable, "-m", "mlx_spec.menubar", "--target", "owner/a"]
    assert content["RunAtLoad"] is True and content["KeepAlive"] == {"SuccessfulExit": False}
    assert content["ThrottleInterval"] == 10 and content["LimitLoadToSessionType"] == "Aqua"
    assert content["StandardOutPath"] == content["StandardErrorPath"] == str(tmp_path / "menubar.log")
    assert Path(content["WorkingDirectory"]).is_absolute()


def launchctl(folder: Path, refuses: str = "") -> str:
    """A program that writes down how it is called, and refuses one command as launchctl does."""
    program = folder / "launchctl"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/calls\n'
        f'if [ "$1" = "{refuses}" ]; then echo "Bootstrap failed: 5" >&2; exit 5; fi\n'
    )
    program.chmod(0o700)
    return str(program)


def calls(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "calls").read_text().splitlines()]


def test_install_and_remove(tmp_path):
    program, file = launchctl(tmp_path, "bootout"), login.agent_file(tmp_path)
    login.install(file, (), tmp_path / "log", program)  # that nothing is loaded yet is no error
    assert [call[0] for call in calls(tmp_path)] == ["bootout", "bootstrap"]
    domain, path = calls(tmp_path)[1][1:]
    assert domain.startswith("gui/") and path == str(file)
    assert plistlib.loads(file.read_bytes())["Label"] == login.LABEL == file.stem
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert login.remove(file, program) and not file.exists()
    assert calls(tmp_path)[-1] == ["bootout", f"{domain}/{login.LABEL}"]
    assert not login.remove(file, program)


def test_what_launchd_refuses_is_said(tmp_path):
    program = launchctl(tmp_path, "bootstrap")
    with pytest.raises(InvalidValue, match="Bootstrap failed: 5"):
        login.install(login.agent_file(tmp_path), (), tmp_path / "log", program)
    with pytest.raises(InvalidValue, match="No such file"):
        login.install(login.agent_file(tmp_path), (), tmp_path / "log", str(tmp_path / "nothing"))


@pytest.mark.parametrize("given", [("--api-key", "secret"), ("--api-key=secret",)])
def test_no_key_is_written_to_the_agent(tmp_path, given):
    with pytest.raises(InvalidValue, match="use --api-key-file"):
        login.write_agent(login.agent_file(tmp_path), given, tmp_path / "log")
    assert list(tmp_path.iterdir()) == []
    login.write_agent(login.agent_file(tmp_path), ("--api-key-file", "key"), tmp_path / "log")


@pytest.mark.parametrize(
    ("version", "framework", "hidden"),
    [
        ("26.0", "Python", True),
        ("27.1.2", "Python", True),
        ("15.6", "Python", False),
        ("26.0", "", False),
        ("", "Python", False),
    ],
)
def test_framework_builds_are_told_of(version, framework, hidden):
    problem = desktop.framework_problem(version, framework)
    assert (problem is not None) is hidden
    assert problem is None or (version in problem and "--managed-python" in problem)
