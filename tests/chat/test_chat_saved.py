"""Nothing is lost: how a conversation is kept and goes on, and what is asked before it is replaced."""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import struct
import termios
from pathlib import Path

import pytest
from support.screen import PAIR, READY, TINY, Screen, at_home
from support.waiting import wait_until

from mlx_spec.apps.chat import saved
from mlx_spec.errors import InvalidValue
from mlx_spec.session import Piece

FEW = "--max-tokens=6"
TURN = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hey"}]


def kept(home: Path) -> list[Path]:
    return sorted((Path(at_home(home)["XDG_DATA_HOME"]) / "mlx_spec" / "conversations").glob("*.jsonl"))


def test_a_conversation_is_kept_and_continued(converse, tmp_path):
    options = [*PAIR, FEW]
    converse(options, "/show", "/clear")
    assert kept(tmp_path) == [], "nothing was asked"
    converse(options, "What does zip do?", "And map?", "/undo", "And set?", "/set temperature 0.5")
    (file,) = kept(tmp_path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    converse([*options, "--no-history"], "Not this")
    greeting, shown, _, listed, loaded, named = converse(
        ["-c", FEW], "/show", "More", "/load", "/load 1", f"/load {file.stem}"
    )
    assert "2 turns loaded, the last question was:\nAnd set?" in greeting
    assert "turns: 2" in shown and "temperature 0.5" in shown and "model: demo" in shown
    assert kept(tmp_path) == [file], "the same file goes on"
    assert re.search(rf"1 .* 3 turns .*What does zip do\? .*{file.stem}\n", listed)
    assert "3 turns loaded" in loaded and "3 turns loaded" in named
    lines = ("/clear", "Other", "/load", "/load 2", "/load 0")
    _, _, other, cleared, again, zero = converse(["-c", *options], *lines)
    assert "there is no file 0.json" in zero
    assert len(kept(tmp_path)) == 2 and "Other" not in other
    assert cleared.index("Other") < cleared.index("What does zip do?") and "3 turns loaded" in again


def test_changes_keep_the_turns(converse, tmp_path, monkeypatch):
    """A new system prompt goes on; /edit answers the changed message in place of the last one."""
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nsed -i.old "s/zip/map/" "$1"\n')
    editor.chmod(0o755)
    monkeypatch.setenv("VISUAL", str(editor))
    lines = ("zip?", "/system Be a pirate.", "/show", "/edit", "/edit", "/undo", "/undo")
    _, _, system, shown, edited, same, left, nothing = converse([*PAIR, FEW], *lines)
    assert "new system prompt, 1 turn kept" in system and "turns: 1" in shown
    assert "> map?\n" in edited and "the message is as it was" in same
    assert "0 turns left" in left and "nothing to undo" in nothing
    monkeypatch.setenv("VISUAL", "false")
    assert "ended with status 1" in converse([*PAIR, FEW], "/edit")[1]


def test_save_asks_before_it_replaces_another_conversation(converse, tmp_path):
    save = f"/save {tmp_path / 'talk'}"
    lines = ("hello", save, "more", save, "/clear", save, save)
    _, _, _, _, more, _, kept_as_it_was, replaced = converse([*TINY, FEW], *lines, replies="ny")
    assert "2 turns saved" in more, "it only grew"
    assert "holds another conversation (2 turns)" in kept_as_it_was and "nothing was saved" in kept_as_it_was
    assert "0 turns saved" in replaced


def test_words_that_mean_a_command(converse):
    _, shown, *said = converse([*TINY, FEW], "/SHOW", "exit", "QUIT", "help", "?", '"""help"""')
    assert "turns: 0" in shown
    for hint, command in zip(said[:4], ("exit", "exit", "help", "help"), strict=True):
        assert f"/{command} is the command" in hint
    assert "tokens" in said[4]


def test_killed_in_an_answer(endless, converse, tmp_path):
    """The pieces that were shown are there. Ctrl-C in a menu of completions is not an error."""
    with Screen(*endless, "--max-tokens=1000000", home=tmp_path) as screen:
        screen.wait_for(READY)
        fcntl.ioctl(screen._end, termios.TIOCSWINSZ, struct.pack("HHHH", 8, 60, 0, 0))
        screen.type("/model \t")
        screen.wait_for("gemma-4")
        screen.type("\x03")
        screen.wait_for(READY)
        assert "Unhandled" not in screen.text and "Traceback" not in screen.text
        screen.type("hello\r")
        wait_until(lambda: [file for file in kept(tmp_path) if file.read_text().count('"kind"') > 2])
        screen.process.kill()
    (file,) = kept(tmp_path)
    text = file.read_text()
    pieces = [json.loads(line)["text"] for line in text.split("\n") if '"kind": "answer"' in line]
    file.write_text(text + '{"kind": "answer", "te')  # the kill came in a write
    greeting, shown, _ = converse(["-c", *endless, FEW], "/show", "more")
    assert "1 turn loaded, the last question was:\nhello" in greeting and "turns: 1" in shown
    messages = saved.read(file)["messages"]
    assert messages[1]["content"] == "".join(pieces).strip() and len(messages) == 4


def test_a_conversation_of_another_process_is_copied(tmp_path):
    said: list[str] = []
    talk = {"messages": list(TURN), "system": None, "settings": {}}
    first, second = saved.Journal(tmp_path, said.append), saved.Journal(tmp_path, said.append)
    first.ask("Hi", talk | {"messages": []})
    first.add(Piece("Hey", "answer", None))
    first.keep(talk)
    (file,) = tmp_path.iterdir()
    second.go_on(file, talk)
    second.ask("More", talk)
    first.ask("", talk)
    first.keep(talk)  # no answer came
    texts = {path.name: saved.read(path)["messages"] for path in tmp_path.iterdir()}
    assert list(texts.values()) == [TURN, TURN] and said == []
    first.close()
    second.go_on(file, talk)
    second.close()
    assert saved.read(file)["messages"] == TURN


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path):
    said: list[str] = []
    (tmp_path / "file").touch()
    journal = saved.Journal(tmp_path / "file", said.append)
    for _ in range(2):
        journal.ask("Hi", {"messages": []})
        journal.keep({"messages": TURN})
    assert len(said) == 1 and "is not kept" in said[0] and os.listdir(tmp_path) == ["file"]


def test_a_journal_writes_only_files_of_its_folder_and_all_that_changed(tmp_path):
    talk = {"messages": list(TURN), "system": None, "settings": {}}
    file, folder = tmp_path / "talk.json", tmp_path / "kept"
    saved.write(file, talk)
    before = file.read_bytes()
    journal = saved.Journal(folder, print)
    journal.go_on(file, talk)
    journal.ask("Hi", talk)
    journal.keep(talk | {"messages": TURN * 2, "settings": {"temperature": 0.5}})
    journal.close()
    assert file.read_bytes() == before
    (own,) = folder.iterdir()
    found = saved.read(own)
    assert found["messages"] == TURN * 2 and found["settings"] == {"temperature": 0.5}


@pytest.mark.usefixtures("home")
def test_a_file_that_was_cut_inside_a_character_keeps_all_other_turns():
    """As a full disk cuts it. A chat that was killed before its first line leaves an empty file."""
    journal, messages = saved.Journal(saved.kept_folder(), lambda text: None), []
    for i in range(3):
        journal.ask(f"问题 {i}", {"messages": list(messages), "system": None, "settings": {}})
        journal.add(Piece("回答" * 9, "answer", None))
        messages += [{"role": "user", "content": f"问题 {i}"}, {"role": "assistant", "content": "回答" * 9}]
        journal.keep({"messages": list(messages), "system": None, "settings": {}})
    journal.close()
    (file,) = saved.kept_files()
    whole = file.read_bytes()
    first = saved.read(file)["messages"][:2]
    for cut in range(len(whole) - 60, len(whole)):
        file.write_bytes(whole[:cut])
        assert saved.read(file)["messages"][:2] == first
    (saved.kept_folder() / f"z{saved.KEPT_SUFFIX}").touch()
    assert saved.newest() == file and len(saved.kept_rows()) == 1


def test_a_kept_conversation_is_renamed_and_deleted(home):
    journal = saved.Journal(saved.kept_folder(), print)
    now = {"messages": [], "system": None}
    journal.ask("hello", now)
    new = saved.rename(saved.find_kept("1"), "about zip")
    assert saved.find_kept("about zip") == new and kept(home) == [new]
    for name in ("../up", "7", ".hidden", "about zip"):
        with pytest.raises(InvalidValue):
            saved.rename(new, name)
    saved.delete(new)
    journal.leave_deleted()
    journal.ask("again", now)
    assert len(kept(home)) == 1 and kept(home) != [new]
    journal.close()
