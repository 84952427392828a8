"""Pictures of a conversation: dropped, named, kept, and answered as the same parts from Python."""

from __future__ import annotations

import json
import os
import re
import shutil
from functools import cache
from pathlib import Path

import pytest
from support.checkpoints import float32_copy
from support.screen import PAIR, at_home
from support.spans import ROOT, file

from mlx_spec.apps.chat.arguments import Options
from mlx_spec.apps.chat.interrupts import Interrupts
from mlx_spec.apps.chat.models import choose, open_pair
from mlx_spec.apps.chat.pictures import dropped
from mlx_spec.apps.chat.repl import run
from mlx_spec.apps.chat.terminal import Terminal
from mlx_spec.cli.command import parse

QUESTION = "What is this?"
TWO = ("a", QUESTION), ("b", "And it?")


class Eyes:
    """A target that reads pictures."""

    def __init__(self, folder: Path) -> None:
        self.options = [f"--target={folder}", "--drafter=none", "--max-tokens=6"]

    @cache  # noqa: B019
    def expected(self, *turns: tuple[str, ...]) -> list[str]:
        """Return the answers to turns of pictures and a text."""
        session = open_pair(choose(parse(Options, "chat", self.options))).session()
        answers = []
        for *names, text in turns:
            parts = [{"type": "image", "image": file(name)} for name in names]
            pieces = session.stream([*parts, {"type": "text", "text": text}], max_tokens=6)
            answers.append("".join(piece.text for piece in pieces).strip())
        assert all(answers), "an empty answer is part of any"
        return answers


@pytest.fixture(scope="session")
def eyes(tmp_path_factory: pytest.TempPathFactory) -> Eyes:
    return Eyes(float32_copy(ROOT / "e2b", tmp_path_factory.mktemp("eyes") / "target"))


def flat(said: str) -> str:
    return " ".join(said.split())


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    return Path(shutil.copy(ROOT / "a.png", tmp_path / "it's a (1).png"))


def test_paths_as_terminals_drop_them(odd, tmp_path):
    escaped = re.sub(r"([' ()])", r"\\\1", str(odd))
    plain = shutil.copy(odd, tmp_path / "b c.PNG")
    for text in (escaped, f'"{odd}"', str(odd), f"{escaped} ", odd.as_uri()):
        assert dropped(text) == ([odd], "")
        if text != str(odd):
            assert dropped(f"{text} why {escaped}") == ([odd], f"why {escaped}")
    assert dropped(f"'{plain}' {escaped}\nwhy") == ([plain, odd], "why")
    for text in (
        "none.png why",
        f"see {escaped}",
        f"{tmp_path} why",
        "don't",
        "x\0.png",
        "~nobody/a.png",
        "",
    ):
        assert dropped(text) == ([], text)


def test_dropped_and_named_pictures_are_answered_alike(converse, eyes, odd):
    first, second = eyes.expected(*TWO)
    escaped = re.sub(r"([' ()])", r"\\\1", str(odd))
    lines = [f"{escaped} {QUESTION}", "/retry", f"/image {ROOT / 'b.png'}", "And it?", "/undo", "/undo"]
    (damaged := odd.with_name("damaged.png")).write_text("no picture")
    lines += [f"/image {ROOT / 'a.png'} {QUESTION}", "/image off", "/race", "/clear"]
    lines += [f"{escaped} {damaged} {QUESTION}", "/image"]
    _, drop, again, named, more, _, _, at_once, _, race, _, refused, none = converse(eyes.options, *lines)
    assert re.search(r"picture 1: it's a \(1\)\.png, \d+ x \d+, \d+ tokens\n", drop)
    for said, answer in ((drop, first), (again, first), (more, second), (at_once, first)):
        assert flat(answer) in flat(said)
    assert "picture 1: b.png" in named and "the next message has 1 picture\n" in named
    assert "a race is of text" in race and "damaged.png: " in refused and "has 0 pictures" in none


def test_pictures_are_saved_and_kept(converse, eyes, tmp_path):
    _, second = eyes.expected(("a", QUESTION), ("And it?",))
    save = tmp_path / "talk.json"
    converse(eyes.options, f"{ROOT / 'a.png'} {QUESTION}", f"/save {save}")
    (kept,) = (Path(at_home(tmp_path)["XDG_DATA_HOME"]) / "mlx_spec" / "conversations").glob("*.jsonl")
    content = json.loads(save.read_text())["messages"][0]["content"]
    assert content[0]["image"].startswith("data:image/png;base64,") and content[1]["text"] == QUESTION
    assert content[0]["image"] in kept.read_text()
    greeting, *_ = converse(["-c", *eyes.options])
    assert f"[picture] {QUESTION}" in greeting
    for name in (save, kept):
        _, loaded, more = converse([*eyes.options, "--no-history"], f"/load {name}", "And it?")
        assert "1 turn loaded" in loaded and flat(second) in flat(more)
    _, loaded, refused, *_ = converse([*PAIR, "--no-history"], f"/load {save}", "And it?", "/retry")
    assert "1 turn loaded" in loaded and "reads no pictures" in refused


def test_other_answers_keep_a_picture_that_waits(converse, eyes, monkeypatch):
    """/retry and /edit answer the last message again, with its own pictures."""
    first, _ = eyes.expected(*TWO)
    edited, second = eyes.expected(("a", "Where is this?"), ("b", "And it?"))
    monkeypatch.setenv("EDITOR", "sed -i.old s/What/Where/")
    lines = [f"/image {ROOT / 'b.png'}", "/retry", "/edit", "/image", "And it?", "/image"]
    _, asked, _, again, other, waiting, then, none = converse(
        eyes.options, f"{ROOT / 'a.png'} {QUESTION}", *lines
    )
    for said, answer in ((asked, first), (again, first), (other, edited), (then, second)):
        assert flat(answer) in flat(said)
    assert "has 1 picture\n" in waiting and "has 0 pictures" in none


def test_a_photo_of_an_iphone_is_read_where_macos_converts_it(converse, eyes, monkeypatch, tmp_path):
    heic, programs = tmp_path / "photo.heic", tmp_path / "programs"
    heic.write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    programs.mkdir()
    first, _ = eyes.expected(*TWO)
    _, refused = converse(eyes.options, f"/image {heic}")
    assert refused.endswith("photo.heic: HEIC is read on macOS alone: convert it to JPEG first\n")
    sips = programs / "sips"  # as macOS has it
    sips.write_text(f'#!/bin/sh\ntest "$*" = "-s format jpeg {heic} --out $6" && cp {ROOT}/a.png "$6"\n')
    sips.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    _, named, said = converse(eyes.options, f"/image {heic}", QUESTION)
    assert "picture 1: photo.heic, " in named and flat(first) in flat(said)
    sips.write_text("#!/bin/sh\nexit 4\n")
    _, refused = converse(eyes.options, f"/image {heic}")
    assert "macOS cannot read this HEIC file: convert it to JPEG first" in refused


def test_one_answer_about_pictures(eyes, capfd):
    pictures = [f"--image={ROOT / name}.png" for name in "ab"]
    options = parse(Options, "chat", [*eyes.options, *pictures, "-p", QUESTION])
    with Interrupts() as interrupts:
        run(options, QUESTION, Terminal(), interrupts, None)
    (first,) = eyes.expected(("a", "b", QUESTION))
    assert flat(first) in flat(capfd.readouterr().out)
