"""The chat program as its user meets it: one answer, its errors, and what it writes for programs."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import mac
from support.commands import file_that_takes_nothing
from support.screen import GOLDEN, LIMIT, PAIR, STATUS, TINY, Screen
from support.waiting import wait_until

from mlx_spec.apps.chat import main
from mlx_spec.apps.chat.answer import ChatState
from mlx_spec.apps.chat.arguments import Options
from mlx_spec.apps.chat.conversation import Conversation
from mlx_spec.apps.chat.interrupts import Interrupts
from mlx_spec.apps.chat.models import choose, open_pair
from mlx_spec.apps.chat.saved import Journal
from mlx_spec.apps.chat.settings import from_options
from mlx_spec.apps.chat.terminal import Terminal
from mlx_spec.cli.command import parse
from mlx_spec.device import awake
from mlx_spec.model.target import LMTarget


def lines_of(text: str) -> list[str]:
    """The lines of a text but for the one about measuring, which comes once on a machine."""
    return [line for line in text.splitlines() if not line.startswith("measuring what ")]


def only_line(text: str) -> str:
    (line,) = lines_of(text)
    return line


def answer(monkeypatch, *arguments: str, stdin: bytes | None = b"") -> int:
    """The exit status of the program, run in this process with `stdin` piped in, or closed."""
    with tempfile.TemporaryFile() as file:
        file.write(stdin or b"")
        file.seek(0)
        monkeypatch.setattr(sys, "stdin", None if stdin is None else io.TextIOWrapper(file))
        return main(arguments)


# --- one answer


def test_one_answer_to_a_prompt(monkeypatch, capfd):
    """It needs no stdin."""
    options = ("demo", "-p", "What does os.path.join do?", "--max-tokens=12")
    assert answer(monkeypatch, *options, stdin=None) == 0
    out, err = capfd.readouterr()
    assert out.endswith("\n") and out.strip() and "\x1b" not in out + err
    assert re.fullmatch(STATUS + ".*", only_line(err))


def test_prompt_and_pipe_are_one_message(monkeypatch, capfd):
    said = []
    for given, piped in (["--prompt=Explain this:"], b"import os\n"), ([], b"Explain this:\n\nimport os"):
        assert answer(monkeypatch, *PAIR, "--stats", "--max-tokens=5", *given, stdin=piped) == 0
        out, err = capfd.readouterr()
        said.append((out, re.search(r"prompt: (\d+) tokens, 0 reused", err)[1]))
    assert said[0] == said[1]


def test_options_reach_the_model(endless, monkeypatch, capfdbinary):
    plain = ["--max-tokens=6", "--prompt=hello", "--drafter=none"]
    sampled = [*plain, "--temperature=5", "--top-k=50", "--min-p=0.001", "--top-p=0.99", "--seed=1"]
    texts = []
    for options in (plain, [*plain, "--system=Be brief.", "--kv-bits=4"], sampled, sampled):
        assert answer(monkeypatch, endless[0], *options) == 0
        out, err = capfdbinary.readouterr()
        assert b"drafts: switched off" in err
        texts.append(out)
    assert texts[2] == texts[3]
    assert len(set(texts)) == 3


def test_sampling_is_the_model_s_own_unless_options_say_otherwise(monkeypatch, capfd, tmp_path):
    folder = Path(shutil.copytree(GOLDEN / "target", tmp_path / "model"))
    file = folder / "generation_config.json"
    written = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**written, "do_sample": True, "temperature": 5.0, "top_k": 50}))
    said = {}
    for options in (
        ("--seed=1",),
        ("--seed=1", "--temperature=5", "--top-k=50", "--top-p=0.95"),
        ("--temperature=0",),
    ):
        assert (
            answer(monkeypatch, str(folder), *options, "--prompt=hello", "--max-tokens=8", "--drafter=none")
            == 0
        )
        said[options] = capfd.readouterr()
    own, same, greedy = said.values()
    words = "sampling as in the model's generation_config.json: temperature 5, top_k 50"
    assert words in own.err and words in same.err and own.out == same.out
    assert "generation_config.json" not in greedy.err and greedy.out != own.out


THINK = ["--prompt=hello", "--max-tokens=8", "--think"]


def test_thoughts_stay_out_of_pipes(endless, monkeypatch, capfd):
    assert answer(monkeypatch, *endless, *THINK) == 0
    out, err = capfd.readouterr()
    assert out == "" and "tokens/s" in err.splitlines()[-1]


# --- what goes wrong


def test_bad_target_is_one_line(tmp_path, monkeypatch, capfd):
    folder = shutil.copytree(GOLDEN / "target", tmp_path / "target")
    os.truncate(folder / "model.safetensors", 100_000)
    assert answer(monkeypatch, f"--target={folder}", "--json", "--prompt=hello") == 1
    out, err = capfd.readouterr()
    line = only_line(err)
    assert out == "" and line.startswith("mlx-spec: ") and "promises" in line and str(folder) in line


@pytest.mark.parametrize(
    ("arguments", "stdin", "said"),
    [
        ([], b" \n", "the prompt is empty"),
        ([], b"caf\xe9", r"stdin is not UTF-8 \(byte 0xe9 at 3\)"),
        ([], b"word " * 5000, r"the prompt is too long: \d+ tokens > 4096 maximum, "),
        ([], None, "stdin is closed"),  # there is nobody to talk to
        (["--prompt=hi", "--system=\udcff"], b"", "--system is not valid text"),
        (["--prompt=hi", "--highlight"], b"", "--highlight: there are no colours here"),
    ],
)
def test_bad_prompt_is_one_line(arguments, stdin, said, monkeypatch, capfd):
    assert answer(monkeypatch, *TINY, *arguments, stdin=stdin) == 1
    out, err = capfd.readouterr()
    assert out == "" and re.match(f"mlx-spec: .*{said}", only_line(err))


def test_a_mac_stays_awake_while_an_answer_is_written(monkeypatch, capfd, tmp_path):
    calls = mac.caffeinate(tmp_path, monkeypatch)
    monkeypatch.setattr(awake, "sys", SimpleNamespace(platform="darwin"))
    assert answer(monkeypatch, *TINY, "--prompt=hello", "--max-tokens=9") == 0
    assert calls.read_text() == f"-i -w {os.getpid()}\n"


def test_closed_stdout(monkeypatch, capfd):
    monkeypatch.setattr(sys, "stdout", None)
    assert answer(monkeypatch, *TINY, "--prompt=hello", "--max-tokens=9") == 1
    assert only_line(capfd.readouterr().err).startswith("mlx-spec: stdout is closed")


def answer_into(stdout: int, monkeypatch, capfd) -> tuple[int, list[str]]:
    """The exit status of an answer that is written there, and the lines on stderr."""
    with open(stdout, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        status = answer(monkeypatch, *TINY, "--prompt=hello", "--max-tokens=9")
    return status, lines_of(capfd.readouterr().err)


def test_reader_that_goes_away(monkeypatch, capfd):
    """A closed pipe, as of `| head -1`, ends the program in silence."""
    read, write = os.pipe()
    os.close(read)
    assert answer_into(write, monkeypatch, capfd) == (0, [])


def test_stdout_that_takes_nothing(monkeypatch, capfd, tmp_path):
    status, (said,) = answer_into(file_that_takes_nothing(tmp_path), monkeypatch, capfd)
    assert status == 1 and said.startswith("mlx-spec: stdout: Bad file descriptor: ")


# --- what is written for programs


def test_result_as_json(monkeypatch, capfd):
    options = [*PAIR, "--max-tokens=12", "--prompt=What does zip do?"]
    assert answer(monkeypatch, *options) == 0
    text = capfd.readouterr().out.strip()
    assert answer(monkeypatch, *options, "--json", "--drafter=lookup", "--num-draft-tokens=3") == 0
    out, err = capfd.readouterr()
    found = json.loads(only_line(out))
    assert (lines_of(err), found["text"], found["thoughts"]) == ([], text, None)
    assert found["drafter"] == "lookup" and found["target"] == "demo"
    usage, timings, speculation = found["usage"], found["timings"], found["speculation"]
    assert 0 < usage["completion_tokens"] <= 12 and usage["prompt_tokens"] > 4 and not usage["reused_tokens"]
    assert 0 < timings["prompt_seconds"] <= timings["first_token_seconds"] < LIMIT
    assert timings["tokens_per_second"] == usage["completion_tokens"] / timings["decode_seconds"]
    assert (speculation["on"], speculation["reason"]) == (True, "fixed by user")
    assert sum(speculation["accepted_at"]) == speculation["accepted"] <= speculation["drafted"]
    assert found["peak_memory_bytes"] > 100_000


def test_trace(tmp_path, monkeypatch, capfd):
    file = tmp_path / "rounds.jsonl"
    options = [*PAIR, "--max-tokens=12", "--prompt=What does zip do?", "--num-draft-tokens=2"]
    assert answer(monkeypatch, *options, f"--trace={file}") == 0
    out = capfd.readouterr().out
    rounds = [json.loads(line) for line in file.read_text().splitlines()]
    assert [found["round"] for found in rounds] == list(range(1, len(rounds) + 1))
    spans = [span for found in rounds for span in found["spans"]]
    assert "".join(span["text"] for span in spans).strip() == out.strip()
    assert all((span["position"] > 0) == (span["drafter"] is not None) for span in spans)
    assert sum(len(found["tokens"]) for found in rounds) <= 12
    assert all(found["accepted"] <= found["drafted"] <= 2 for found in rounds)
    assert all((found["kind"] == "draft") == (found["drafted"] > 0) for found in rounds)
    assert [found["finish_reason"] for found in rounds[:-1]] == [None] * (len(rounds) - 1)
    assert rounds[-1]["finish_reason"] in ("stop", "length")


def test_trace_that_cannot_be_written(tmp_path, monkeypatch, capfd):
    full = "/dev/full" if Path("/dev/full").exists() else str(tmp_path)
    for file in (str(tmp_path), full):
        assert answer(monkeypatch, *TINY, "--prompt=hello", f"--trace={file}") == 1
        assert f"mlx-spec: --trace {file} cannot be written" in only_line(capfd.readouterr().err)


# --- interrupts


@pytest.mark.parametrize("json_wanted", [False, True])
def test_interrupt_of_one_answer(endless, json_wanted, tmp_path, monkeypatch, capfd):
    file = tmp_path / "rounds.jsonl"
    file.touch()

    def press() -> None:
        wait_until(lambda: file.stat().st_size)
        os.kill(os.getpid(), signal.SIGINT)

    extra = [f"--trace={file}", *(["--json"] if json_wanted else [])]
    presses = threading.Thread(target=press)
    presses.start()
    assert answer(monkeypatch, *endless, "--max-tokens=1000000", "--prompt=hello", *extra) == 130
    presses.join()
    out, err = capfd.readouterr()
    if json_wanted:
        assert lines_of(err) == [] and json.loads(only_line(out))["finish_reason"] == "interrupted"
    else:
        assert re.fullmatch(STATUS + " · interrupted", only_line(err))


def test_interrupt_before_the_answer(tmp_path):
    with Screen(stdin=subprocess.PIPE, home=tmp_path) as screen:
        screen.wait_for("reading the prompt from stdin until its end")
        screen.press_ctrl_c("interrupted")
        assert screen.leave() == 130
        assert screen.text.endswith("\nmlx-spec: interrupted\n") and "Traceback" not in screen.text


def test_one_interrupt_stops_the_reading_of_a_prompt(endless, monkeypatch, capfd):
    monkeypatch.setattr("mlx_spec.decode.running.PREFILL_STEP", 64)
    options = parse(Options, "chat", [*endless, "--max-tokens=8"])
    choice, settings = choose(options), from_options(options)
    pair = open_pair(choice)
    chunks, prefill = 0, LMTarget.prefill

    def pressed(*given, **options):
        nonlocal chunks
        chunks += 1
        if chunks == 3:
            signal.raise_signal(signal.SIGINT)
        return prefill(*given, **options)

    with Interrupts() as interrupts:
        chat, fresh = (
            ChatState(
                Conversation(pair, choice, settings, None),
                Terminal(),
                interrupts,
                Journal(None, print),
            )
            for _ in range(2)
        )
        assert not chat.answer("hello").is_interrupted
        with monkeypatch.context() as patch:
            patch.setattr(LMTarget, "prefill", pressed)
            assert chat.answer("word " * 1_000).is_interrupted
        assert chunks == 3
        interrupts.clear()
        assert chat.answer("more").statistics.finish_reason
        after = chat.answer("again").answer
        for message in ("hello", "more"):
            fresh.answer(message)
        assert fresh.answer("again").answer == after
