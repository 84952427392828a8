"""A conversation: every command and what is kept of it, in this process; keys and Ctrl-C on a terminal."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.hub_stand_in import ASSISTANT, E2B, serving
from support.screen import GOLDEN, PAIR, READY, STATUS, TINY, Screen, at_home
from support.spans import ROOT as SEEING
from support.waiting import wait_until

from mlx_spec.apps.chat import models
from mlx_spec.apps.chat.conversation import NoModelLeft
from mlx_spec.apps.chat.saved import FORMAT

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "code": {"enum": ["abc"]}},
    "required": ["ok", "code"],
    "additionalProperties": False,
}
PICTURE = SEEING / "a.png"
JOIN, SPLIT = "What does os.path.join do?", "And os.path.split?"


def answer_in(said: str) -> str:
    """The answer above the status line."""
    answer, status, *_ = said.split("\n")
    assert answer.strip() and re.match(STATUS, status), said
    return answer


def test_every_command_refuses_in_one_line(converse, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    half = tmp_path / "half.json"
    half.write_text(json.dumps(FORMAT | {"messages": [{"role": "user", "content": "x"}]}))
    hot = tmp_path / "hot.json"
    hot.write_text(json.dumps(FORMAT | {"messages": [], "settings": {"temperature": "hot"}}))
    refusals = {
        "/stats": "there is no answer yet",
        "/retry": "no message to answer again",
        "/undo": "nothing to undo",
        "/juggle": "there is no command /juggle: /help lists them",
        "/hlep": "did you mean /help?",
        "/stat": "did you mean /stats?",
        "/models": "did you mean /model?",
        "/set heat 3": "there is no setting heat: there are temperature",
        "/set top_p 7": "top_p=7 is not allowed",
        "/set max_tokens many": "'many' is not allowed",
        "/draft 99": "give auto, off, lookup or 1 to 16",
        f"/draft {'9' * 5000}": "give auto, off, lookup or 1 to 16",
        "/save": "give the name of a file",
        f"/load {tmp_path / 'none'}": "there is no file",
        f"/load {schema}": "is not a saved conversation",
        f"/load {half}": "half.json cannot be continued: a conversation goes by turns",
        f"/load {hot}": "hot.json cannot be continued: temperature='hot' is not allowed",
        f"/save {schema}": "take another name",
        f"/json {tmp_path}": "give a file with a JSON schema",
        "/image nothing.png": "is not the file of a picture",
        f"/image {PICTURE}": "this target reads no pictures: it is a text model",
        f"{PICTURE} What is it?": "this target reads no pictures: it is a text model",
        "/highlight maybe": "give on or off",
        "/highlight on": "there are no colours here",
        "/set temperature 9": "temperature=9 is not allowed: it is 0 to 2",
        "/rename 7": "give a number or name and the new name",
        "/delete 7": "there is no kept conversation 7",
        "/copy": "there is no answer yet",
        "/export": "give the name of a file",
        "/model nothing-like-that": "there is no folder nothing-like-that",
    }
    _, *said = converse(TINY, *refusals)
    for problem, line in zip(refusals.values(), said, strict=True):
        assert re.fullmatch(f"mlx-spec: .*{re.escape(problem)}.*\n", line)


def test_every_command(converse, tmp_path, monkeypatch):
    schema, talk = tmp_path / "schema.json", tmp_path / "talk.json"
    schema.write_text(json.dumps(SCHEMA))
    lines = {
        "/help": r"/help .*\n(.*\n)*/highlight ",
        "/draft off": "drafts: off",
        JOIN: "drafts: switched off",
        "/draft 3": "drafts: by .*, 3 tokens in each pass",
        "/retry": "tokens drafted",
        "/stats": "accepted by position:",
        "/draft lookup": "drafts: by lookup",
        "/retry ": STATUS,
        "/draft auto": "as many tokens as pay",
        "/stats ": r"first token after \d+\.\d\d s\n(.*\n)*drafts: .*\npeak memory: \d",
        f"/save {talk}": "1 turn saved",
        f"/export {tmp_path / 'talk'}": "1 turn written to .*talk.md",
        "/copy": "copied with pbcopy",
        "/rename 1 paths": "it is named paths now",
        "/undo": "0 turns left",
        f"/load {talk}": "1 turn loaded",
        "/show": "turns: 1, ",
        "/clear": "a new conversation begins",
        "/set temperature 0.5": "temperature 0.5",
        "/show ": "settings: temperature 0.5, max_tokens 20\n(.*\n)*turns: 0, ",
        "/set": r"temperature +0\.5\n(.*\n)*seed +off\n",
        "/set temperature off": "temperature 0.0",
        "/system Answer in verse.": "new system prompt, 0 turns kept",
        "/system": "system prompt: Answer in verse.",
        "/system off": "no system prompt",
        "/model": r"\* demo .*yes, (.*\n)*  smollm2 .*(.*\n)*  gemma-4-e2b",
        f"/json {schema}": f"answers match {schema}",
        "What does zip do?": r'\A\{.*"ok".*\}\n',
        "/json off": "answers are free",
        "/race What is zlib for?": r"with drafts +[\d.]+ tokens/s, .*\n(.*\n)*every token the same",
    }
    (tmp_path / "pbcopy").write_text(f"#!/bin/sh\ncat > {tmp_path}/clipboard\n")
    (tmp_path / "pbcopy").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    _, *answers = converse([*PAIR, "--max-tokens=20"], *lines)
    said = dict(zip(lines, answers, strict=True))
    for line, pattern in lines.items():
        assert re.search(pattern, said[line]), (line, said[line])
    names = set(re.findall(r"^/(\w+)", said["/help"], re.MULTILINE))
    wanted = "help exit clear system model draft set show stats save load image race edit "
    wanted += "retry undo json highlight rename delete copy export"
    assert names == set(wanted.split())
    assert answer_in(said[JOIN]) == answer_in(said["/retry"]) == answer_in(said["/retry "])
    text = answer_in(said[JOIN]).strip()
    assert (tmp_path / "clipboard").read_text() == text
    assert (tmp_path / "talk.md").read_text() == f"## Question\n\n{JOIN}\n\n## Answer\n\n{text}\n"
    assert json.loads(answer_in(said["What does zip do?"])).keys() == {"ok", "code"}


def test_saved_conversation_goes_on_the_same(converse, tmp_path):
    """Saved and loaded with another pair: the next answer is the one that would have come."""
    file, options = tmp_path / "talk.json", [*PAIR, "--max-tokens=12"]
    _, first, _, expected = converse(options, JOIN, f"/save {tmp_path / 'talk'}", SPLIT)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.glob(".*.tmp")] == []
    other, text = [*options, "--num-draft-tokens=2"], file.read_text()
    _, _, again, _, _, anew = converse(other, f"/load {file}", SPLIT, "/undo", "/undo", JOIN)
    assert answer_in(again) == answer_in(expected) and answer_in(anew) == answer_in(first)
    assert file.read_text() == text, "only /save writes it"


def test_what_a_file_says_cannot_steer_the_terminal(converse, tmp_path):
    content = {"format": "mlx_spec conversation", "version": 1, "messages": []}
    for name, added in ("a", {}), ("b", {"target": "owner/\x1b[2Jname", "system": "\x9b2J"}):
        text = json.dumps(content | added)
        (tmp_path / f"{name}.json").write_text(f"\ufeff{text}")  # with the mark of some editors
    lines = (f"/load {tmp_path / 'a'}", f"/load {tmp_path / 'b'}", "/system")
    assert converse(TINY, *lines)[1:] == [
        "0 turns loaded\n",
        "0 turns loaded\nit was held with owner/[2Jname: /model owner/[2Jname changes to that\n",
        "system prompt: 2J\n",
    ]


def test_figures_of_an_answer_are_those_of_the_pair_that_gave_it(converse):
    options = [*PAIR, "--max-tokens=8", "--num-draft-tokens=3"]
    _, said, _, _, stats = converse(options, JOIN, "/set max_tokens 100", "/draft lookup", "/stats")
    status = said.splitlines()[1]
    assert re.search(r"\d of 8 tokens drafted", status) and status.endswith(" · cut at --max-tokens")
    assert stats.splitlines()[0] == status and "drafter, accepted by position:" in stats


def test_drafts_return_to_the_drafter_of_the_command_line(converse):
    options = [TINY[0], f"--drafter={GOLDEN / 'assistant'}"]
    _, _, lookup, _, shown = converse(options, "/draft lookup", "/show", "/draft auto", "/show")
    assert "drafter: lookup, " in lookup and f"drafter: {GOLDEN / 'assistant'}, " in shown


def test_highlight(converse):
    options = [*PAIR, "--max-tokens=12", "--num-draft-tokens=3"]
    lines = JOIN, "/highlight on", "/retry", "/highlight off", "/retry", "/draft auto"
    _, *said = converse(options, *lines, has_styles=True)
    texts = [re.sub(r"\x1b\[[\d;]*m", "", one) for one in said]
    plain, shown, again = (answer_in(texts[i]) for i in (0, 2, 4))
    assert "drafted at position 1 2 3 4 5+" in texts[1] and "no highlighting" in texts[3]
    assert shown.replace("│", "") == plain == again and "\x1b[2m│" in said[2]
    assert "\x1b[38;5;34m" in said[2]  # drafted at position 1
    assert "as many tokens as pay" in texts[5]


# --- models


def _converted(home: Path, name: str) -> Path:
    """A pair where converted ones are kept."""
    place = Path(at_home(home)["XDG_DATA_HOME"]) / "mlx_spec" / "models" / name
    shutil.copytree(GOLDEN / "target", place / "target")
    shutil.copytree(GOLDEN / "assistant", place / "drafter")
    (place / "pair.json").write_text(json.dumps({"target": "target", "drafter": "drafter"}))
    return place


def test_first_run_takes_the_pair_used_last(converse, tmp_path):
    assert re.search("a small demo model .* /model smollm2 takes a real one", converse([])[0])
    place, other = _converted(tmp_path, "mine"), _converted(tmp_path, "other")
    os.utime(place / "target" / "config.json", (4e9, 4e9))
    lines = "hello", "/model mine", "/show", "/model", "/model other"
    greeting, _, switched, shown, listed, _ = converse(["--max-tokens=4"], *lines)
    assert f"loading {place}, the pair used last" in greeting  # the files say so
    assert "drafts: by" in switched and "turns: 1, " in shown
    assert re.search(rf"\* {place} .*yes, ", listed) and f"\n{other} " in listed
    assert f"loading {other}, the pair used last" in converse([])[0]  # so it was remembered


def _never_read(checkpoint: Path) -> None:
    """Whoever reads its weights waits for ever."""
    weights = checkpoint / "model.safetensors"
    weights.unlink()
    os.mkfifo(weights)


def opened_for_a_reader(pipe: Path) -> int:
    """A pipe, as soon as somebody reads from it; it must stay open."""
    opened: list[int] = []

    def opens() -> bool:
        with suppress(OSError):  # nobody does
            opened.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        return bool(opened)

    wait_until(opens)
    return opened[0]


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
            screen.press_ctrl_c("interrupted")
            screen.wait_for(f"mlx-spec: {stuck.parent} is not loaded: .* goes on as before")
            screen.wait_for(READY)
        screen.say("more")
        assert "turns: 2, " in screen.say("/show")
        _never_read(first)
        screen.type("/model stuck\r")
        writing = opened_for_a_reader(stuck / "model.safetensors")  # so the one before is gone
        screen.press_ctrl_c("interrupted")
        screen.press_ctrl_c("interrupted")  # while the one before is loaded again
        assert screen.leave() == 130
    os.close(writing)


def test_it_ends_without_any_model(converse, tmp_path):
    first, other = (shutil.copytree(GOLDEN / "target", tmp_path / name) for name in ("first", "other"))

    def change() -> str:
        for folder in (first, other):
            os.truncate(folder / "model.safetensors", 99)
        models.load.cache_clear()  # so that the former one is read again
        return f"/model {other}"

    with pytest.raises(NoModelLeft, match=r"other.*; and .*first, .* cannot be either: "):
        converse([f"--target={first}", "--drafter=none"], change, "hello")


def test_model_is_downloaded(converse, tmp_path, monkeypatch):
    """Size, free disk and memory first; fetched after a yes, and Ctrl-C only pauses that."""
    fetch = models.download

    def interrupted(name: str) -> bool:
        signal.raise_signal(signal.SIGINT)  # it reaches both programs
        monkeypatch.setattr(models, "download", fetch)
        return False

    monkeypatch.setattr(models, "download", interrupted)
    with serving({E2B: GOLDEN / "target", ASSISTANT: GOLDEN / "assistant"}) as hub:
        for name, value in hub.variables(tmp_path).items():
            if name.startswith("HF_"):
                monkeypatch.setenv(name, value)
        hub.take_place(monkeypatch, tmp_path / "hub")
        lines = ("hello", "/model", *["/model gemma-4-e2b"] * 3, "/show")
        _, _, listed, *asked, shown = converse([*TINY, "--max-tokens=4"], *lines, replies="nyy")
    assert re.search(f"gemma-4-e2b +{E2B}", listed)
    for said in asked:
        assert re.search(r"(: 0\.\d MB of 0\.\d MB to fetch\n)+.* are free on the disk; memory: yes, ", said)
    ends = ("nothing was downloaded", "gemma-4-e2b is not here: the conversation goes on as before")
    for said, end in zip(asked, (*ends, f"loading {E2B}"), strict=True):
        assert "Download? [y/N] " in said and end in said
    assert f"model: {E2B}" in shown and "turns: 1, " in shown


# --- keys and Ctrl-C, on terminals of their own


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


class Talk:
    """A conversation with a model that never ends, and the trace of its rounds."""

    def __init__(self, screen: Screen, trace: Path) -> None:
        self.screen, self.trace = screen, trace

    def turn(self) -> str:
        """The number of the last answer."""
        return (["", *re.findall(r'"turn": (\d+), ', self.trace.read_text())])[-1]

    def begin(self, message: str = "hello") -> None:
        """Send a message, and wait for the first round of its answer."""
        before = self.turn()
        self.screen.type(f"{message}\r")
        wait_until(lambda: self.turn() != before)

    def interrupt(self, status: str = "interrupted") -> None:
        self.screen.type("\x03")
        self.screen.wait_for(status)
        self.screen.wait_for(READY)


@pytest.fixture(scope="module")
def talk(endless, tmp_path_factory) -> Iterator[Talk]:
    """One process for the tests below. It keeps what is typed, and leaves the terminal as it was."""
    home = tmp_path_factory.mktemp("home")
    trace = home / "rounds.jsonl"
    with Screen(*endless, "--max-tokens=1000000", f"--trace={trace}", home=home) as screen:
        screen.wait_for(READY)
        talk = Talk(screen, trace)
        yield talk
        talk.begin()
        screen.type("\x04\x03")  # Ctrl-D leaves once the answer has ended
        assert screen.leave() == 0 and screen.echoes
        assert "Traceback" not in screen.text
    history = home / "xdg_state_home" / "mlx_spec" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600 and "+hello" in history.read_text()


def test_measuring_for_the_first_time_stays_on_one_line(tmp_path):
    """Each share that was done became a line of its own beside the spinner."""
    with Screen(*PAIR, home=tmp_path, XDG_CACHE_HOME=str(tmp_path / "new")) as screen:
        screen.wait_for(READY)
        assert "measuring what demo takes on this machine" in screen.text
        lines = re.findall(r"once: [0-9]{1,3}%\s*\n", screen.text)
        assert len(lines) <= 1, "the last one is rubbed out"


def test_interrupts(talk):
    def delays() -> tuple[float, float]:
        """Seconds from the end of the last round to the prompt, and those of a command."""
        talk.begin()
        talk.interrupt(STATUS + " · interrupted")
        ended: float = json.loads(talk.trace.read_text().splitlines()[-1])["time"]
        began = time.time()
        screen.say("/draft")
        return began - ended, time.time() - began

    screen = talk.screen
    screen.say("/clear")
    screen.type("half a line\x03")  # in one write: it comes between a character and the next wait
    screen.wait_for(READY)
    waits = [delays(), delays()]
    assert "turns: 2, " in screen.say("/show")
    # A command, too, takes longer where other programs run.
    while (late := all(wait > max(0.1, 2 * command) for wait, command in waits)) and len(waits) < 10:
        screen.say("/undo")
        waits.append(delays())
    assert not late, waits
    for message in ("more", "x" * 1023):  # the editor reads 1024 characters at a time
        screen.type(f"{message}\r\x03")  # behind the message, before the answer
        screen.wait_for("interrupted")
        screen.wait_for(READY)
    screen.process.send_signal(signal.SIGINT)  # not as a key
    screen.wait_for(READY)


def test_interrupts_of_commands(talk, tmp_path):
    """Nobody ever writes into that pipe, and Ctrl-C ends the wait for what it holds."""
    screen, pipe = talk.screen, tmp_path / "pipe.json"
    os.mkfifo(pipe)
    for command in ("load", "save", "json"):
        screen.type(f"/{command} {pipe}\r")
        writer = opened_for_a_reader(pipe)
        talk.interrupt()
        os.close(writer)
        screen.type(f"/{command} {pipe}\r")
        talk.interrupt()  # before it waits
    assert "turns: " in screen.say("/show")


def test_keys_while_an_answer_streams(talk, tmp_path):
    """They are not seen within it, and Enter sends them after it; not after Ctrl-C."""
    screen = talk.screen
    screen.say("/clear")
    screen.say("/set max_tokens 80")
    talk.begin()
    screen.process.send_signal(signal.SIGSTOP)  # so that it is typed in the middle
    screen.type("/show\r")
    screen.process.send_signal(signal.SIGCONT)
    screen.wait_for(STATUS + ".* · cut at")
    assert "/show" not in screen.text.rpartition("hello")[2].partition(" · cut at")[0]
    screen.wait_for("turns: 1, ")
    screen.wait_for(READY)
    screen.say("/set max_tokens 1000000")
    talk.begin()
    assert not screen.echoes
    screen.process.send_signal(signal.SIGSTOP)  # as after Ctrl-Z; the shell wants to see its keys
    screen.echoes = True
    screen.process.send_signal(signal.SIGCONT)
    wait_until(lambda: not screen.echoes)
    screen.type("one\rtwo\r")
    talk.interrupt()
    screen.wait_for("… two")
    talk.begin("")
    talk.interrupt()
    screen.say(f"/save {tmp_path / 'talk'}")
    messages = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert messages[-2]["content"] == "one\ntwo"
