"""The chat program as its user meets it: real processes, pipes and terminals, on a real pair."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_spec.apps.chat import main
from mlx_spec.apps.chat.answer import Answerer
from mlx_spec.apps.chat.arguments import parse
from mlx_spec.apps.chat.interrupts import INTERRUPTED, Interrupts
from mlx_spec.apps.chat.models import pair_of, sampling_of
from mlx_spec.apps.chat.status import details, status_line
from mlx_spec.apps.chat.terminal import Terminal
from mlx_spec.session import Statistics
from mlx_spec.types import Reason

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden" / "e2b"
TINY = [f"--target={GOLDEN / 'target'}", "--drafter=lookup"]
DEMO = ROOT / "mlx_spec" / "demo"
HAS_DEMO = all((DEMO / part / "model.safetensors").is_file() for part in ("target", "drafter"))
PAIR = [] if HAS_DEMO else TINY
COMMAND = [sys.executable, "-m", "mlx_spec.chat"]
STATUS = r"\d+\.\d tokens/s(, \d+\.\d\d x plain)? · .*speculation (on|off): .* · \d+ tokens?"
LIMIT = 120  # seconds until a process counts as hung


def run(*arguments: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    source = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    return subprocess.run([*COMMAND, *arguments], capture_output=True, timeout=LIMIT, **source)


def only_line(text: str | bytes) -> str:
    (line,) = (text.decode() if isinstance(text, bytes) else text).splitlines()
    return line


def answer(monkeypatch, *arguments: str, stdin: bytes = b"") -> int:
    """The exit status of the program, run in this process with `stdin` piped in."""
    with tempfile.TemporaryFile() as file:
        file.write(stdin)
        file.seek(0)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(file))
        return main(arguments)


class Screen:
    """The program on a terminal of its own."""

    def __init__(self, *arguments: str, stdin: int | None = None) -> None:
        self.text = ""
        self._seen = 0
        self._end, terminal = pty.openpty()
        clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "INPUTRC")}
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=terminal if stdin is None else stdin,
            stdout=terminal,
            stderr=terminal,
            env=clean | {"TERM": "xterm"},
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(terminal)

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:  # closes its stdin, waits
            self.process.kill()
        os.close(self._end)

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first match in what came after the last one."""
        found = None
        deadline = time.monotonic() + LIMIT
        while not (found := re.compile(pattern).search(self.text, self._seen)):
            assert self._read(deadline), f"{pattern!r} never came after {self.text[self._seen :]!r}"
        self._seen = found.end()
        return found

    def leave(self) -> int:
        """The exit status of a program that ends by itself."""
        deadline = time.monotonic() + LIMIT
        while self._read(deadline):
            pass
        return self.process.wait(LIMIT)

    def _read(self, deadline: float) -> bool:
        if not select.select([self._end], [], [], max(deadline - time.monotonic(), 0))[0]:
            return False
        try:
            new = os.read(self._end, 65536)
        except OSError:  # Linux, where the other end was closed
            return False
        self.text += new.decode(errors="replace")
        return bool(new)


def _take_terminal() -> None:
    os.close(os.open(os.ttyname(1), os.O_RDWR))  # the first terminal that a session leader opens controls it


# --- arguments


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-tokens", "0"], "at least 1"),
        (["--num-draft-tokens", "-1"], "at least 0"),
        (["--num-draft-tokens", "many"], "'many'"),
        (["--top-k", "-5"], "at least 0"),
        (["--seed", "1.5"], "'1.5'"),
        (["--kv-bits", "3"], "4, 8"),
        (["--temperature", "warm"], "'warm'"),
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--temperature", "nan"], "temperature=nan"),
        (["--top-p", "0"], "top_p=0"),
        (["--top-p", "1.1"], "top_p=1.1"),
        (["--min-p", "2"], "min_p=2.0"),
        (["--prompt"], "expected one argument"),
        (["--temp", "1"], "--temp"),
        (["hello\nthere"], "hello there"),
    ],
)
def test_bad_arguments_are_one_line(arguments, said, monkeypatch, capfd):
    with pytest.raises(SystemExit) as left:
        answer(monkeypatch, *arguments, stdin=b"hello")
    out, err = capfd.readouterr()
    assert (left.value.code, out) == (2, "")
    assert said in only_line(err)
    assert err.startswith("mlx-spec: ") and "--help" in err


def test_arguments_reach_the_options():
    options = parse(
        ["-p", "hi", "--seed=-3", "--top-k=5", "--kv-bits=8", "--num-draft-tokens=0", "--system=Be."]
    )
    assert options.sampling == {"seed": -3, "top_k": 5}
    assert (options.prompt, options.kv_bits, options.num_draft_tokens, options.system) == ("hi", 8, 0, "Be.")


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_needs_no_mlx(argument):
    code = f"""
import sys
from mlx_spec.apps.chat import main
try:
    main([{argument!r}])
finally:
    assert not {{"mlx", "numpy", "mlx_lm", "transformers"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=LIMIT)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"mlx-spec" in done.stdout


# --- the status line

SPECULATED = Statistics(
    prompt_tokens=12,
    reused_tokens=5,
    generated_tokens=37,
    rounds=12,
    speculative_rounds=10,
    speculative_tokens=34,
    drafted=38,
    accepted=19,
    drafted_at=(10, 10, 9, 9),
    accepted_at=(10, 6, 3),
    prefill_seconds=0.5,
    decode_seconds=2.0,
    plain_seconds=2.1,
    compared_seconds=1.5,
    finish_reason="stop",
    reason=Reason.PAYS,
)
PLAIN = Statistics(prompt_tokens=3, generated_tokens=1, rounds=1, decode_seconds=0.5, finish_reason="stop")


def test_status_of_a_speculative_answer():
    assert status_line(SPECULATED, 2048) == (
        "18.5 tokens/s, 1.40 x plain · K=4, 50% accepted, 3.4 tokens/round · speculation on: pays · "
        "37 tokens, 5 of 12 prompt tokens reused"
    )


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (Reason.NO_DRAFTER, "speculation off: no drafter"),
        (Reason.DISABLED, "speculation off: disabled by user"),
        (Reason.COST, "speculation off: verification costs more than it gains"),
        (Reason.ACCEPTANCE, "speculation off: too few draft tokens accepted"),
        (Reason.FIXED, "speculation on: fixed by user"),
        (Reason.WARMING_UP, "speculation on: warming up"),
        (Reason.PROBE, "speculation on: probing"),
    ],
)
def test_status_says_why(reason, said):
    assert status_line(replace(PLAIN, reason=reason), 8) == f"2.0 tokens/s · {said} · 1 token"


def test_status_says_what_cut_the_answer():
    cut = replace(SPECULATED, finish_reason="length", reused_tokens=0)
    assert status_line(cut, 37).endswith(" · 37 tokens · cut at --max-tokens 37")
    assert status_line(cut, 38).endswith(" · 37 tokens · cut: the context is full")
    assert status_line(replace(cut, finish_reason=None), 64).endswith("tokens · interrupted")
    assert status_line(Statistics(prompt_tokens=9), 64) == "0.0 tokens/s · 0 tokens · interrupted"


def test_details():
    assert details(SPECULATED) == [
        "prompt: 12 tokens, 5 reused, the rest read in 0.50 s (14.0 tokens/s)",
        "answer: 37 tokens in 12 rounds and 2.00 s",
        "draft tokens: 38 in 10 rounds, 19 accepted (50%)",
        "accepted by position: 1 100%, 2 60%, 3 33%, 4 0%",
    ]
    assert len(details(PLAIN)) == 2


# --- one answer


def test_one_answer_to_a_prompt():
    done = run(*PAIR, "-p", "What does os.path.join do?", "--max-tokens=12")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(b"\n") and done.stdout.strip()
    assert re.fullmatch(STATUS + ".*", only_line(done.stderr))
    assert b"\x1b" not in done.stdout + done.stderr


def test_prompt_and_pipe_are_one_message(monkeypatch, capfd):
    said = []
    for given, piped in (["--prompt=Explain this:"], b"import os\n"), ([], b"Explain this:\n\nimport os"):
        assert answer(monkeypatch, *PAIR, "--stats", "--max-tokens=5", *given, stdin=piped) == 0
        out, err = capfd.readouterr()
        said.append((out, re.search(r"prompt: (\d+) tokens, 0 reused", err)[1]))
    assert said[0] == said[1]


def test_options_reach_the_model(monkeypatch, capfdbinary):
    plain = ["--max-tokens=16", "--prompt=hello", "--drafter=none"]
    sampled = [*plain, "--temperature=5", "--top-k=50", "--min-p=0.001", "--top-p=0.99", "--seed=1"]
    texts = []
    for options in (plain, [*plain, "--system=Be brief.", "--kv-bits=4"], sampled, sampled):
        assert answer(monkeypatch, TINY[0], *options) == 0
        out, err = capfdbinary.readouterr()
        assert b"speculation off: disabled by user" in err
        texts.append(out)
    assert texts[2] == texts[3]
    assert len(set(texts)) == 3


@pytest.fixture(scope="module")
def endless(tmp_path_factory) -> list[str]:
    """Options for a target that never ends by itself, reads long prompts, and thinks at once if asked."""
    folder = shutil.copytree(GOLDEN / "target", tmp_path_factory.mktemp("endless") / "target")
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    config["eos_token_id"] = text["eos_token_id"] = None
    text["max_position_embeddings"] = 1_000_000
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with (folder / "chat_template.jinja").open("a") as template:
        template.write("{% if enable_thinking %}<|channel>thought\n{% endif %}")
    return [f"--target={folder}", "--drafter=lookup"]


THINK = ["--prompt=hello", "--max-tokens=8", "--think"]


def test_thoughts_stay_out_of_pipes(endless, monkeypatch, capfd):
    assert answer(monkeypatch, *endless, *THINK) == 0
    out, err = capfd.readouterr()
    assert out == "" and " 8 tokens" in only_line(err)


@pytest.mark.parametrize(
    ("no_color", "shown"),
    [("", r"(\x1b\[2m[^\x1b]+\x1b\[0m)+\r\n"), ("1", r"\(thinking\)\r\n[^\x1b]+\r\n")],
)
def test_thoughts_are_dimmed(endless, monkeypatch, capfd, no_color, shown):
    monkeypatch.setenv("NO_COLOR", no_color)
    end, terminal = pty.openpty()
    with open(terminal, "w") as stdout, open(end, "rb", buffering=0) as screen:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert answer(monkeypatch, *endless, *THINK) == 0
        seen = b""
        while not re.fullmatch(shown, seen.decode(errors="replace")):
            assert select.select([screen], [], [], 5)[0], seen
            seen += screen.read(65536)


# --- what goes wrong


def _missing(folder: Path) -> str:
    shutil.rmtree(folder)
    return "there is no folder"


def _truncated(folder: Path) -> str:
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 100)
    return "promises"


def _malformed(folder: Path) -> str:
    (folder / "config.json").write_text('{"model_type": ')
    return "not valid JSON"


@pytest.mark.parametrize("damage", [_missing, _truncated, _malformed])
def test_bad_target_is_one_line(damage, tmp_path, monkeypatch, capfd):
    folder = shutil.copytree(GOLDEN / "target", tmp_path / "target")
    said = damage(folder)
    assert answer(monkeypatch, f"--target={folder}", "--prompt=hello") == 1
    out, err = capfd.readouterr()
    assert out == ""
    line = only_line(err)
    assert line.startswith("mlx-spec: ") and said in line and str(folder) in line


def test_wrong_vocabulary_is_one_line(tmp_path, monkeypatch, capfd):
    folder = shutil.copytree(GOLDEN / "target", tmp_path / "drafter")
    tokenizer = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(tokenizer.replace("<|turn>", "<|turned>"))
    assert answer(monkeypatch, TINY[0], f"--drafter={folder}", "--prompt=hello") == 1
    line = only_line(capfd.readouterr().err)
    assert line.startswith("mlx-spec: token ") and str(folder) in line and str(GOLDEN / "target") in line


def test_over_long_prompt_is_one_line(monkeypatch, capfd):
    assert answer(monkeypatch, *TINY, stdin=b"word " * 5000) == 1
    line = only_line(capfd.readouterr().err)
    assert re.fullmatch(r"mlx-spec: the prompt has \d+ tokens .* 4096: .*", line)


def test_no_thinking_mode_is_one_line(tmp_path, monkeypatch, capfd):
    folder = shutil.copytree(GOLDEN / "target", tmp_path / "target")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert answer(monkeypatch, f"--target={folder}", "--drafter=none", *THINK) == 1
    assert "leave out --think" in only_line(capfd.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "stdin", "said"),
    [
        ([], b" \n", "the prompt is empty"),
        (["--prompt= "], b"", "the prompt is empty"),
        ([], b"caf\xe9", "stdin is not UTF-8 (byte 0xe9 at 3)"),
        (["--prompt=caf\udce9"], b"", "the prompt is not valid text"),
        (["--prompt=hi", "--system=\udcff"], b"", "--system is not valid text"),
    ],
)
def test_bad_prompt_is_one_line(arguments, stdin, said, monkeypatch, capfd):
    assert answer(monkeypatch, *arguments, stdin=stdin) == 1
    out, err = capfd.readouterr()
    line = only_line(err)
    assert out == "" and line.startswith("mlx-spec: ") and said in line


def test_reader_that_goes_away():
    read, write = os.pipe()
    os.close(read)
    command = [*COMMAND, *PAIR, "--prompt=hello", "--max-tokens=9"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=write, stderr=subprocess.PIPE, timeout=LIMIT
    )
    os.close(write)
    assert (done.returncode, only_line(done.stderr)) == (
        1,
        "mlx-spec: cannot write to stdout (Broken pipe): the answer stops here",
    )


# --- on a terminal


def test_conversation():
    with Screen(*PAIR, "--max-tokens=12") as screen:
        if HAS_DEMO:
            screen.wait_for("demo.*--target REPO_OR_FOLDER")
        screen.wait_for("> ")
        screen.type("What does os.path.join do?\n")
        screen.wait_for(r"join do\?\r\n(.*\S.*)\r\n\x1b\[2m" + STATUS)
        screen.wait_for("> ")
        screen.type("\x1b[200~And os.path.split?\n# a second line\x1b[201~\n")  # as a terminal pastes
        screen.wait_for(STATUS + r", \d+ of \d+ prompt tokens reused")
        screen.wait_for("> ")
        screen.type("/stats\n")
        screen.wait_for(STATUS + r"[^\n]*\n.*prompt: \d+ tokens, \d+ reused")
        screen.wait_for("> ")
        screen.type("/dance\n")
        screen.wait_for("mlx-spec: there is no command /dance: /help lists them")
        screen.type("/system Answer in verse.\n/system\n/clear\n/help\n")
        screen.wait_for("new conversation(.|\n)*system prompt: Answer in verse.(.|\n)*forgotten(.|\n)*/exit")
        screen.wait_for("> ")
        screen.type("\x04")
        assert screen.leave() == 0
        assert "Traceback" not in screen.text
        assert screen.text.count(" tokens/s · ") == 3  # two answers, /stats


def test_interrupts_of_a_conversation(endless):
    with Screen(*endless, "--max-tokens=1000000") as screen:
        screen.wait_for("> ")
        screen.type("half a line")
        screen.wait_for("half a line")
        time.sleep(0.3)  # CPython's readline misses a signal between a character and its next wait
        screen.type("\x03")
        for message, status in (("hello", " · interrupted"), ("more", ", .* reused · interrupted")):
            screen.wait_for("> ")
            screen.type(f"{message}\n")
            screen.wait_for(f"{message}\\r\\n(\\x1b\\[\\?2004l\\r)?[^\\x1b]+")
            screen.type("\x03")
            screen.wait_for(STATUS + status)
        screen.wait_for("> ")
        screen.type("/exit\n")
        assert screen.leave() == 0
        assert "Traceback" not in screen.text


def test_interrupt_of_one_answer(endless):
    command = [*COMMAND, *endless, "--max-tokens=1000000", "--prompt=hello"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe) as process:
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 130
    assert re.fullmatch(STATUS + " · interrupted", only_line(err))


def test_interrupt_before_the_answer():
    with Screen(stdin=subprocess.PIPE) as screen:
        screen.wait_for("reading the prompt from stdin until its end")
        screen.type("\x03")
        assert screen.leave() == 130
        assert screen.text.endswith("\r\nmlx-spec: interrupted\r\n") and "Traceback" not in screen.text


def test_one_interrupt_stops_the_reading_of_a_prompt(endless, capfd):
    options = parse([*endless, "--max-tokens=8"])
    pair = pair_of(options)
    session = pair.session()

    def press() -> None:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    with Interrupts() as interrupts:
        answerer = Answerer(options, sampling_of(options), Terminal(), interrupts)
        assert answerer.answer(session, "hello") == 0
        pressing = threading.Thread(target=press)
        pressing.start()
        assert answerer.answer(session, "word " * 20_000) == INTERRUPTED
        pressing.join()
        assert "interrupted" in capfd.readouterr().err
        with interrupts.prompting():
            pass
        assert answerer.answer(session, "more") == 0
        after = capfd.readouterr().out
        fresh = pair.session()
        answerer.answer(fresh, "hello")
        capfd.readouterr()
        answerer.answer(fresh, "more")
        assert capfd.readouterr().out == after
