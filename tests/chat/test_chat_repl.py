"""A conversation on a terminal: every command, Ctrl-C, history, completion, and what is kept of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hub_stand_in import serving
from screen import GOLDEN, HAS_DEMO, PAIR, READY, STATUS, TINY, Screen, at_home
from waiting import wait_until

HISTORY = Path("xdg_state_home") / "mlx_spec" / "chat_history"
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "code": {"enum": ["abc"]}},
    "required": ["ok", "code"],
    "additionalProperties": False,
}
pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs a terminal of its own")


def opened_for_a_reader(pipe: Path) -> int:
    """A pipe, as soon as somebody reads from it; it must stay open."""
    opened: list[int] = []

    def opens() -> bool:
        with suppress(OSError):  # nobody does
            opened.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        return bool(opened)

    wait_until(opens)
    return opened[0]


def answer_in(text: str) -> str:
    """The answer above the status line, in what came after a message."""
    found = re.search(r"\n(?P<answer>[^\n]*\S[^\n]*)\n(?=" + STATUS + ")", text)
    assert found, text
    return found["answer"]


def test_conversation(tmp_path):
    with Screen(*PAIR, "--max-tokens=12", home=tmp_path) as screen:
        if HAS_DEMO:
            screen.wait_for("demo.*--target REPO_OR_FOLDER")
        screen.wait_for(READY)
        said = screen.say("What does os.path.join do?")
        assert answer_in(said)
        screen.type("\x1b[200~And os.path.split?\n# a second line\x1b[201~")  # as a terminal pastes
        screen.wait_for("# a second line")
        screen.type("\r")
        screen.wait_for(STATUS + r", \d+ of \d+ prompt tokens reused")
        screen.wait_for(READY)
        screen.type('"""one\rtwo\x1b\rthree"""')
        screen.wait_for('three"""')
        assert READY not in screen.text.rpartition("one")[2]  # it is still being typed
        screen.say("")
        assert "turns: 3, " in screen.say("/show")
        screen.say(f"/save {tmp_path / 'talk'}")
        screen.type("\x04")
        assert screen.leave() == 0
        assert "Traceback" not in screen.text
        assert screen.text.count(" tokens/s · ") + screen.text.count(" x plain · ") == 3
    turns = json.loads((tmp_path / "talk.json").read_text())["messages"][::2]
    assert [turn["content"] for turn in turns[1:]] == [
        "And os.path.split?\n# a second line",
        "one\ntwo\nthree",
    ]


def test_every_command(tmp_path):
    schema, talk = tmp_path / "schema.json", tmp_path / "talk.json"
    schema.write_text(json.dumps(SCHEMA))
    with Screen(*PAIR, "--max-tokens=24", home=tmp_path, PATH="/nowhere") as screen:
        screen.wait_for(READY)
        names = set(re.findall(r"\n/(\w+)", screen.say("/help")))
        wanted = "help exit clear system model draft set show stats save load retry undo json"
        assert names == {*wanted.split(), "highlight"}
        for command, problem in (
            ("/stats", "there is no answer yet"),
            ("/retry", "no message to answer again"),
            ("/undo", "nothing to undo"),
            ("/dance", "there is no command /dance: /help lists them"),
            ("/set heat 3", "there is no setting heat: there are temperature"),
            ("/set top_p 7", "top_p=7 is not allowed"),
            ("/set max_tokens many", "'many' is not allowed"),
            ("/draft 99", "give auto, off, lookup or 1 to 16"),
            ("/save", "give the name of a file"),
            (f"/load {tmp_path / 'none'}", "there is no file"),
            (f"/load {schema}", "is no conversation of ours"),
            (f"/save {schema}", "take another name"),
            (f"/json {tmp_path}", "give a file with a JSON schema"),
            ("/highlight maybe", "give on or off"),
            ("/model nothing-like-that", "is no known model"),
        ):
            assert re.search(f"mlx-spec: .*{re.escape(problem)}", screen.say(command)), screen.text[-500:]

        assert "draft" in screen.say("/draft off")
        first = answer_in(screen.say("What does os.path.join do?"))
        assert "speculation off: disabled by user" in screen.say("/stats")
        assert "drafts: by" in screen.say("/draft 3")
        assert answer_in(screen.say("/retry")) == first
        assert "accepted by position:" in screen.say("/stats")
        assert "drafts: by lookup" in screen.say("/draft lookup")
        assert answer_in(screen.say("/retry")) == first
        assert "as many tokens as pay" in screen.say("/draft auto")
        told = screen.say("/stats")
        assert re.search(r"first token after \d+\.\d\d s\n(.*\n)*.*gain: .*\n.*\npeak memory: \d", told)

        assert "1 turn saved" in screen.say(f"/save {talk}")
        assert "0 turns left" in screen.say("/undo")
        assert "1 turn loaded" in screen.say(f"/load {talk}")
        assert "turns: 1, " in screen.say("/show")
        assert "the conversation is forgotten" in screen.say("/clear")
        assert "turns: 0, " in screen.say("/show")

        assert "temperature 0.5" in screen.say("/set temperature 0.5")
        assert "settings: temperature 0.5, max_tokens 24" in screen.say("/show")
        assert re.search(r"temperature +0\.5\n(.*\n)*seed +off\n", screen.say("/set"))
        assert "temperature 0.0" in screen.say("/set temperature off")
        assert "new system prompt, new conversation" in screen.say("/system Answer in verse.")
        assert "system prompt: Answer in verse." in screen.say("/system")
        assert "no system prompt" in screen.say("/system off")
        assert re.search(r"on this disk:\n\* .*fits, about(.*\n)*.*gemma-4-e2b", screen.say("/model"))

        assert f"answers match {schema}" in screen.say(f"/json {schema}")
        assert json.loads(answer_in(screen.say("What does zip do?"))).keys() == {"ok", "code"}
        assert "answers are free" in screen.say("/json off")
        screen.type("/exit\r")
        assert screen.leave() == 0
        assert "Traceback" not in screen.text


def test_completion(tmp_path):
    (tmp_path / "conversation-of-monday.json").touch()
    with Screen(*TINY, "--max-tokens=4", home=tmp_path) as screen:
        screen.wait_for(READY)
        for typed, completed in (
            ("/hi\t", "/highlight"),
            ("/set temp\t", "/set temperature"),
            ("/model gemma-4-26b-a4b-8\t", "/model gemma-4-26b-a4b-8bit"),
            (f"/load {tmp_path}/conv\t", f"/load {tmp_path}/conversation-of-monday.json"),
        ):
            screen.type(typed)
            seen = re.escape(completed)
            screen.wait_for(seen.removesuffix("json")[-12:])
            screen.type("\x03")
            screen.wait_for(READY)
            assert completed in screen.text, screen.text[-300:]
        screen.type("\x04")
        assert screen.leave() == 0


def test_history(tmp_path):
    file = tmp_path / HISTORY
    for arguments, typed in ((["--no-history"], "/show secret"), ([], "/show again")):
        with Screen(*TINY, *arguments, home=tmp_path) as screen:
            screen.wait_for(READY)
            screen.say(typed)
            screen.type("\x04")
            assert screen.leave() == 0
            assert file.exists() is ("--no-history" not in arguments)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "secret" not in file.read_text() and "/show again" in file.read_text()
    file.chmod(0o644)
    with Screen(*TINY, home=tmp_path) as screen:
        screen.wait_for(READY)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        screen.type("\x1b[A")
        screen.wait_for("/show again")
        screen.type("\r")
        screen.wait_for("turns: 0, ")


def test_saved_conversation_goes_on_the_same(tmp_path):
    """Saved, left, loaded in another process: the next answer is the one that would have come."""
    options = [*PAIR, "--max-tokens=32"]
    with Screen(*options, home=tmp_path) as screen:
        screen.wait_for(READY)
        first = answer_in(screen.say("What does os.path.join do?"))
        screen.say(f"/save {tmp_path / 'talk'}")
        expected = answer_in(screen.say("And os.path.split?"))
    file = tmp_path / "talk.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.glob(".*.tmp")] == []
    with Screen(*options, home=tmp_path) as screen:
        screen.wait_for(READY)
        screen.say(f"/load {file}")
        assert answer_in(screen.say("And os.path.split?")) == expected
        screen.say("/undo")
        screen.say("/undo")
        assert answer_in(screen.say("What does os.path.join do?")) == first


def test_interrupts(endless, tmp_path):
    trace = tmp_path / "rounds.jsonl"
    with Screen(*endless, "--max-tokens=1000000", f"--trace={trace}", home=tmp_path) as screen:
        screen.wait_for(READY)
        screen.type("half a line\x03")  # in one write: it comes between a character and the next wait
        screen.wait_for(READY)
        waits = [_wait_after_interrupt(screen, trace, 1, " · interrupted")]
        waits.append(_wait_after_interrupt(screen, trace, 2, ", .* reused · interrupted"))
        assert "turns: 2, " in screen.say("/show")
        for turn in range(3, 12):
            if min(waits) <= 0.1:  # seconds; other programs may have taken some of them
                break
            screen.say("/undo")
            waits.append(_wait_after_interrupt(screen, trace, turn, ", .* · interrupted"))
        assert min(waits) <= 0.1, waits
        for message in ("more", "x" * 1023):  # the editor reads 1024 characters at a time
            screen.type(f"{message}\r\x03")  # behind the message, before the answer
            screen.wait_for("interrupted")
            screen.wait_for(READY)
        screen.process.send_signal(signal.SIGINT)  # not as a key
        screen.wait_for(READY)
        assert "Traceback" not in screen.text


def test_interrupts_of_commands(tmp_path):
    """Nobody ever writes into that pipe, and Ctrl-C ends the wait for what it holds."""
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    with Screen(*TINY, "--max-tokens=4", home=tmp_path) as screen:
        screen.wait_for(READY)
        screen.say("hello")
        for command in ("load", "save", "json"):
            screen.type(f"/{command} {pipe}\r")
            writer = opened_for_a_reader(pipe)
            screen.type("\x03")
            screen.wait_for("interrupted")
            screen.wait_for(READY)
            os.close(writer)
            screen.type(f"/{command} {pipe}\r\x03")  # before it waits
            screen.wait_for("interrupted")
            screen.wait_for(READY)
        assert "turns: 1, " in screen.say("/show")
        assert "Traceback" not in screen.text


def _wait_after_interrupt(screen: Screen, trace: Path, turn: int, status: str) -> float:
    """Seconds from the end of the last round to the prompt."""
    screen.type("hello\r")
    wait_until(lambda: f'"turn": {turn}' in trace.read_text())
    screen.type("\x03")
    screen.wait_for(STATUS + status)
    screen.wait_for(READY)
    ended: float = json.loads(trace.read_text().splitlines()[-1])["time"]
    return time.time() - ended


def test_keys_while_an_answer_streams(endless, tmp_path):
    """They are not seen within it, and wait in the next line. Afterwards the terminal is as it was."""
    trace = tmp_path / "rounds.jsonl"
    with Screen(*endless, "--max-tokens=1000000", f"--trace={trace}", home=tmp_path) as screen:
        screen.wait_for(READY)
        screen.say("/set max_tokens 200")
        screen.type("hello\r")
        wait_until(lambda: '"turn": 1' in trace.read_text())
        screen.process.send_signal(signal.SIGSTOP)  # so that it is typed in the middle
        screen.type("/show\r")
        screen.process.send_signal(signal.SIGCONT)
        screen.wait_for(STATUS + ".* · cut at")
        assert "/show" not in screen.text.rpartition("hello")[2].partition(" · cut at")[0]
        screen.wait_for("/show")
        time.sleep(0.1)
        assert "turns: 1, " not in screen.text, "nothing is sent that was typed unseen"
        assert "turns: 1, " in screen.say("")
        screen.say("/set max_tokens 1000000")
        screen.type("hello\r")
        wait_until(lambda: '"turn": 2' in trace.read_text())
        assert not screen.echoes
        screen.process.send_signal(signal.SIGSTOP)  # as after Ctrl-Z; the shell wants to see its keys
        screen.echoes = True
        screen.process.send_signal(signal.SIGCONT)
        wait_until(lambda: not screen.echoes)
        screen.type("one\rtwo\r\x03")
        screen.wait_for("interrupted")
        screen.wait_for(READY)
        screen.wait_for("… two")
        screen.type("\r")
        wait_until(lambda: '"turn": 3' in trace.read_text())
        screen.type("\x03")
        screen.wait_for("interrupted")
        screen.wait_for(READY)
        screen.say(f"/save {tmp_path / 'talk'}")
        messages = json.loads((tmp_path / "talk.json").read_text())["messages"]
        assert messages[-2]["content"] == "one\ntwo"
        screen.type("hello\r")
        wait_until(lambda: '"turn": 4' in trace.read_text())
        screen.type("\x04\x03")  # Ctrl-D leaves once the answer has ended
        assert screen.leave() == 0 and screen.echoes
        assert "Traceback" not in screen.text


def test_highlight(tmp_path):
    with Screen(*PAIR, "--max-tokens=24", "--num-draft-tokens=3", home=tmp_path) as screen:
        screen.wait_for(READY)
        plain = answer_in(screen.say("What does os.path.join do?"))
        assert "drafted at position 1 2 3 4 5+" in screen.say("/highlight on")
        start = len(screen.raw)
        shown = answer_in(screen.say("/retry"))
        coloured = screen.raw[start:]
        assert shown.replace("│", "") == plain and "│" in shown
        assert "\x1b[38;5;34m" in coloured or not HAS_DEMO  # drafted at position 1
        assert "\x1b[2m│" in coloured
        assert "no highlighting" in screen.say("/highlight off")
        assert answer_in(screen.say("/retry")) == plain


def test_without_the_editor(tmp_path):
    """On a terminal that cannot move its cursor, lines are read as Python reads them."""
    with Screen(*TINY, "--max-tokens=4", home=tmp_path, TERM="dumb") as screen:
        screen.wait_for("Ctrl-D leaves(.|\n)*> ")
        screen.type('"""one\n')
        screen.wait_for("… ")
        screen.type('two"""\n')
        screen.wait_for(STATUS)
        screen.wait_for("> ")
        screen.type("\x03")
        screen.wait_for("> ")
        screen.type("/show\n")
        screen.wait_for("turns: 1, ")
        screen.type("/exit\n")
        assert screen.leave() == 0
        assert "Traceback" not in screen.text and "\x1b" not in screen.raw


# --- models


def _converted(home: Path, name: str) -> Path:
    """A pair where converted ones are kept."""
    place = Path(at_home(home)["XDG_DATA_HOME"]) / "mlx_spec" / "models" / name
    shutil.copytree(GOLDEN / "target", place / "target")
    shutil.copytree(GOLDEN / "assistant", place / "drafter")
    (place / "pair.json").write_text(json.dumps({"target": "target", "drafter": "drafter"}))
    return place


def test_first_run_takes_the_pair_used_last(tmp_path):
    with Screen("--max-tokens=4", home=tmp_path) as screen:
        if HAS_DEMO:
            screen.wait_for("a small demo model .* for a real one: /model")
            screen.wait_for(READY)
        place, other = _converted(tmp_path, "mine"), _converted(tmp_path, "other")
        os.utime(place / "target" / "config.json", (4e9, 4e9))
        if HAS_DEMO:
            screen.say("hello")
            assert f"loading {place}" in screen.say("/model mine")
            assert "turns: 1, " in screen.say("/show")
            listed = screen.say("/model")
            assert re.search(rf"\*  {place} .*fits", listed) and f"   {other} " in listed
    remembered = Path(at_home(tmp_path)["XDG_CACHE_HOME"]) / "mlx_spec" / "last_chat.json"
    remembered.unlink(missing_ok=True)
    with Screen(home=tmp_path) as screen:
        screen.wait_for(f"loading {re.escape(str(place))}, the pair used last")  # the files say so
        screen.wait_for(READY)
        screen.say(f"/model {other}")
    with Screen(home=tmp_path) as screen:
        screen.wait_for(f"loading {re.escape(str(other))}, the pair used last")  # so it was remembered
        screen.wait_for(READY)


def _never_read(checkpoint: Path) -> None:
    """Whoever reads its weights waits for ever."""
    weights = checkpoint / "model.safetensors"
    weights.unlink()
    os.mkfifo(weights)


def test_model_that_cannot_be_loaded(tmp_path):
    """The conversation goes on with the one before."""
    broken, stuck = _converted(tmp_path, "broken"), _converted(tmp_path, "stuck") / "target"
    _never_read(stuck)
    first = shutil.copytree(GOLDEN / "target", tmp_path / "first")
    weights = broken / "drafter" / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 100)
    with Screen(f"--target={first}", "--drafter=none", "--max-tokens=4", home=tmp_path) as screen:
        screen.wait_for(READY)
        screen.say("hello")
        assert "mlx-spec: " in screen.say("/model broken")
        assert "turns: 1, " in screen.say("/show")
        for _ in range(2):
            screen.type("/model stuck\r")
            screen.wait_for(f"loading {stuck.parent}\\s")
            screen.type("\x03")
            screen.wait_for(f"interrupted\\s+mlx-spec: {stuck.parent} is not loaded: .* goes on as before")
            screen.wait_for(READY)
        screen.say("more")
        assert "turns: 2, " in screen.say("/show")
        _never_read(first)
        screen.type("/model stuck\r")
        writing = opened_for_a_reader(stuck / "model.safetensors")  # so the one before is gone
        screen.type("\x03")
        screen.wait_for("interrupted")
        screen.type("\x03")  # while the one before is loaded again
        screen.wait_for("interrupted")
        assert screen.leave() == 130
    os.close(writing)


def test_model_is_downloaded(tmp_path):
    """Size, free disk and memory first; fetched after a yes, and Ctrl-C only pauses that."""
    target, drafter = "mlx-community/gemma-4-e2b-it-4bit", "google/gemma-4-E2B-it-assistant"
    with serving({target: GOLDEN / "target", drafter: GOLDEN / "assistant"}) as hub:
        variables = {
            name: value for name, value in hub.variables(tmp_path).items() if name not in ("HOME", "PATH")
        }
        with Screen(*TINY, "--max-tokens=4", home=tmp_path, **variables) as screen:
            screen.wait_for(READY)
            screen.say("hello")
            assert re.search(r"gemma-4-e2b +mlx-community/gemma-4-e2b-it-4bit", screen.say("/model"))
            _ask_for(screen, "gemma-4-e2b", "n")
            screen.wait_for("nothing was downloaded")
            screen.wait_for(READY)
            hub.breaks.clear()
            hub.cut_after, hub.cuts = 60_000, 1
            _ask_for(screen, "gemma-4-e2b", "y")
            wait_until(lambda: hub.cuts == 0)
            screen.type("\x03")
            screen.wait_for("complete files are kept")
            screen.wait_for("mlx-spec: gemma-4-e2b is not here: the conversation goes on as before")
            screen.wait_for(READY)
            hub.breaks.set()
            _ask_for(screen, "gemma-4-e2b", "y")
            screen.wait_for("are here")
            screen.wait_for(f"loading {target}")
            screen.wait_for(READY)
            assert f"model: {target}" in screen.say("/show") and "turns: 1, " in screen.text
        with Screen(home=tmp_path, **variables) as screen:
            screen.wait_for(f"loading {target}, the pair used last")
            screen.wait_for(READY)


def _ask_for(screen: Screen, name: str, reply: str) -> None:
    screen.type(f"/model {name}\r")
    screen.wait_for(r": 0\.\d MB of 0\.\d MB to fetch")
    screen.wait_for("are free on the disk; memory: fits, about")
    screen.wait_for(r"Download\? \[y/N\] ")
    screen.type(f"{reply}\n")
