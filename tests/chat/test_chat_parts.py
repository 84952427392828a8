"""The parts of the chat program that need no terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import stat
import struct
import sys
import termios
import threading
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from prompt_toolkit.application import Application
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.key_binding.key_processor import KeyPress
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import DummyOutput
from support.screen import GOLDEN, LIMIT

from mlx_spec.apps.chat import conversation
from mlx_spec.apps.chat import saved as files
from mlx_spec.apps.chat.answer import ChatState, Trace, details, repeats, status_line, wants_race
from mlx_spec.apps.chat.commands import Commands
from mlx_spec.apps.chat.conversation import Conversation
from mlx_spec.apps.chat.input import LineEditor, open_history
from mlx_spec.apps.chat.interrupts import CtrlC, Interrupts
from mlx_spec.apps.chat.markdown import rendered
from mlx_spec.apps.chat.models import open_pair, with_drafts
from mlx_spec.apps.chat.saved import Journal
from mlx_spec.apps.chat.settings import AnswerSettings, for_model, from_values, sampling_words
from mlx_spec.apps.chat.terminal import DIM, GAINED, Terminal, Wrapping
from mlx_spec.decode.statistics import Positions, Statistics
from mlx_spec.errors import BadCheckpoint, InvalidValue, NotFound, SpecError
from mlx_spec.hub.catalog import PairSpec
from mlx_spec.pair import Pair
from mlx_spec.types import Cost, Reason

CHOICE = PairSpec(str(GOLDEN / "target"), str(GOLDEN / "assistant"))
TURNS = [
    {"role": "user", "content": "What does zip do?"},
    {"role": "assistant", "content": "It yields tuples.", "reasoning_content": "Hm."},
]


@pytest.fixture(scope="module")
def model() -> Pair:
    return open_pair(CHOICE)


# --- reports

SPECULATED = Statistics(
    prompt_tokens=12,
    reused_tokens=5,
    generated_tokens=37,
    rounds=12,
    speculative_rounds=10,
    speculative_tokens=34,
    drafted=38,
    accepted=19,
    by_drafter={"mtp": Positions((10, 10, 9, 9), (10, 6, 3))},
    prefill_seconds=0.5,
    decode_seconds=2.0,
    compared_tokens=37,
    costs={"draft": (10, Cost("draft", 2.64))},
    finish_reason="stop",
    reasons={Reason.PAYS: 34, Reason.PROBE: 3},
)
PLAIN = Statistics(prompt_tokens=3, generated_tokens=1, rounds=1, decode_seconds=0.5, finish_reason="stop")


def line_of(statistics, max_tokens=2048):
    return "".join(text for text, _ in status_line(statistics, max_tokens))


def test_status_line():
    line = status_line(SPECULATED, 2048)
    assert line == [("1.4 × faster", GAINED), (" · 18 tokens/s · 19 of 37 tokens drafted, 3.1 a pass", DIM)]
    bounded = replace(SPECULATED, costs={"draft": (10, Cost("draft", 2.4, 0.1))})
    assert status_line(bounded, 2048)[0] == ("at least 1.2 × faster", GAINED)
    unknown = replace(SPECULATED, costs={})
    assert line_of(unknown) == "18 tokens/s · 19 of 37 tokens drafted, 3.1 a pass"
    none = replace(unknown, accepted=0, reasons={Reason.WAITING: 37})
    assert line_of(none) == "18 tokens/s · 0 of 37 tokens drafted: none found for this text"
    assert line_of(replace(none, reasons={Reason.FIXED: 37})) == "18 tokens/s · 0 of 37 tokens drafted"
    assert wants_race(replace(unknown, accepted=32))
    assert not wants_race(unknown) and not wants_race(replace(SPECULATED, accepted=32))
    assert status_line(PLAIN, 8)[0] == ("as fast as plain", DIM)
    cut = replace(SPECULATED, finish_reason="length")
    assert line_of(cut, 37).endswith(" · 19 of 37 tokens drafted, 3.1 a pass · cut at --max-tokens")
    assert line_of(cut, 38).endswith(" · cut: the context is full")
    assert line_of(replace(cut, finish_reason=None), 64).endswith(" drafted, 3.1 a pass · interrupted")
    assert (
        line_of(Statistics(prompt_tokens=9), 64)
        == "0 tokens/s · drafts: none, this model has no drafter · interrupted"
    )
    long = replace(cut, generated_tokens=2048, compared_tokens=2048, accepted=1222, decode_seconds=9.9)
    assert len(line_of(long)) <= 94

    part = replace(bounded, reasons={Reason.BUDGET: 23, Reason.PAYS: 14})
    assert (
        part.reason.is_on
        and part.reason_words == "on for 14 of 37 tokens; else off: they have lost time so far"
    )
    assert replace(part, accepted=0).reason_words == Reason.BUDGET.words


def test_an_answer_that_repeats_itself_is_noticed():
    assert repeats("It is " + "very " * 40) and repeats("a list\n" + "- one\n- two\n- three\n" * 12)
    assert not repeats("It is " + "very " * 20) and not repeats("word " + " " * 400) and not repeats("")
    assert not repeats(" ".join(f"{i} is the number after {i - 1}." for i in range(90)))


def test_settings_of_another_model_replace_those_that_the_model_brought():
    first, second = {"temperature": 0.7, "top_p": 0.8}, {"temperature": 1.0, "top_k": 64}
    settings = from_values({**first, "top_p": 0.5})
    found = for_model(settings, first, second)
    assert (found.temperature, found.top_p, found.top_k) == (1.0, 0.5, 64)
    assert for_model(found, second, {}).temperature == 0 and for_model(found, second, {}).top_k == 0
    words = sampling_words(found, second)
    assert words is not None and "temperature 1, top_k 64" in words
    assert sampling_words(found, {"temperature": 0.2}) is None


def test_details():
    assert details(SPECULATED, 0.55, 2_400_000_000) == [
        "prompt: 12 tokens, 5 reused, the rest read in 0.50 s (14.0 tokens/s)",
        "answer: 37 tokens in 12 passes and 2.00 s (18.5 tokens/s)",
        "first token after 0.55 s",
        "mostly 4 draft tokens in a pass, 19 of 38 accepted, 3.4 tokens for each draft",
        "drafter, accepted by position:",
        "   1 ████████████████████ 100%",
        "   2 ████████████░░░░░░░░  60%",
        "   3 ███████░░░░░░░░░░░░░  33%",
        "   4 ░░░░░░░░░░░░░░░░░░░░   0%",
        "gain: 1.40 x plain decoding",
        "every token exact",
        "drafts: they pay",
        "peak memory: 2.4 GB",
    ]
    again = details(replace(SPECULATED, reread_evicted=3, reread_no_place=4), None, 0)
    assert again[2] == "read again: 7 tokens, their caches were not in memory; no place to go back to"
    both = {"mtp": Positions((9, 9, 9), (9,)), "lookup": Positions((2, 1), (2, 1))}
    assert "copied from the text, accepted by position:" in details(
        replace(SPECULATED, by_drafter=both), None, 0
    )
    assert details(replace(PLAIN, reasons={Reason.DISABLED: 1}), None, 12_300_000)[2:] == [
        "gain: 1.00 x plain decoding",
        "every token exact",
        "drafts: switched off",
        "peak memory: 12.3 MB",
    ]


# --- conversations on the disk


def test_file_of_the_first_release(tmp_path):
    """Files of version 1 stay readable, also with fields of later minor releases."""
    text = (
        '{"format": "mlx_spec conversation", "version": 1, "target": "demo", "drafter": null, '
        '"system": "Be brief.", "settings": {"temperature": 0.5, "max_tokens": 9, "mood": "good"}, '
        '"messages": [{"role": "user", "content": "Hi", "time": 3}, '
        '{"role": "assistant", "content": "Hey"}], '
        '"colours": true}'
    )
    (tmp_path / "old.json").write_text(text)
    found = files.read(tmp_path / "old.json")
    assert (found["target"], found["system"], len(found["messages"])) == ("demo", "Be brief.", 2)
    settings = from_values(found["settings"])
    assert (settings.temperature, settings.max_tokens, settings.think) == (0.5, 9, False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not valid JSON"),
        ('{"format": "something else", "version": 1}', "is not a saved conversation"),
        ('{"format": "mlx_spec conversation", "version": 2}', "takes a newer mlx_spec"),
        (
            '{"format": "mlx_spec conversation", "version": 1, "messages": [3]}',
            "not hold a list of messages",
        ),
        ('{"format": "mlx_spec conversation", "version": 1, "system": "\\ud83d"}', "is not valid JSON"),
    ],
)
def test_files_that_are_no_conversation(text, said, tmp_path):
    file = tmp_path / "talk.json"
    file.write_text(text)
    with pytest.raises(BadCheckpoint, match=said):
        files.read(file)
    if '"mlx_spec conversation"' not in text:
        with pytest.raises(InvalidValue, match="take another name"):
            files.replaced(file)
        assert file.read_text() == text


def test_names_of_files(tmp_path):
    assert files.file_named("talk") == Path("talk.json") and files.file_named("a/b.txt") == Path("a/b.txt")
    for name in ("", ".", "/", "..", "a" * 252):
        with pytest.raises(InvalidValue, match="give "):
            files.file_named(name)
    with pytest.raises(NotFound, match="there is no file"):
        files.read(tmp_path / "none.json")
    with pytest.raises(InvalidValue, match="cannot be written"):
        files.write(tmp_path / "none" / "talk.json", {})


def test_loading_is_all_or_nothing(model):
    talk = Conversation(model, CHOICE, AnswerSettings(max_tokens=5), "Be brief.")
    talk.session.resume(TURNS)
    wrong = ({"temperature": -1}, {"temperature": "warm"}, {"max_tokens": 0}, {"think": "on"})
    for turns, settings in ((TURNS[::-1], {}), (TURNS[:1], {}), *((TURNS, each) for each in wrong)):
        with pytest.raises(InvalidValue):
            talk.load({"system": None, "messages": turns, "settings": settings})
        assert (talk.turns, talk.system, talk.settings.max_tokens) == (TURNS, "Be brief.", 5)
    talk.load({"system": None, "messages": [], "settings": {}})
    assert (talk.turns, talk.system, talk.settings) == ([], None, AnswerSettings())


def test_a_schema_that_is_refused_leaves_the_former_one(model):
    talk = Conversation(model, CHOICE, AnswerSettings(), None)
    talk.require_schema("good", '{"type": "integer"}')
    with pytest.raises(InvalidValue):
        talk.require_schema("bad", "{")
    assert talk.schema is not None and talk.schema.name == "good"


def test_another_model_goes_on(model):
    """Its answers match the schema. A conversation that asked to think goes on if the model cannot."""
    talk = Conversation(model, CHOICE, AnswerSettings(max_tokens=20), None)
    talk.require_schema("abc", '{"enum": ["abc"]}')
    talk.switch(PairSpec("demo", "none"))  # with another vocabulary
    assert "".join(piece.text for piece in talk.stream("hello")) == '"abc"'
    talk.switch(PairSpec(str(GOLDEN.parent / "vision" / "qwen"), "none"))
    assert model.tokenizer.may_think and not talk.pair.tokenizer.may_think
    talk.load({"system": None, "messages": TURNS, "settings": {"think": True}})
    assert talk.turns == TURNS and not talk.settings.think


@pytest.mark.parametrize("change", ["system", "load"])
def test_a_changed_conversation_shares_its_answers_as_before(model, change):
    model.earlier.ring("")
    before = model.earlier.nbytes
    talk = Conversation(model, CHOICE, AnswerSettings(max_tokens=5), None, key=change)
    if change == "system":
        talk.change_system("Be brief.")
    else:
        talk.load({"system": None, "messages": TURNS, "settings": {"max_tokens": 5}})
    for _ in talk.stream("hello"):
        pass
    assert model.earlier.nbytes > before  # a ring for this key


@pytest.mark.parametrize("reason", ["interrupted", "too long", "failed"])
def test_a_turn_stays_if_no_other_answer_comes(model, reason):
    talk = Conversation(model, CHOICE, AnswerSettings(max_tokens=5), None)
    turns = [{"role": "user", "content": "word " * 3000}, TURNS[1]] if reason == "too long" else TURNS
    talk.session.resume(turns)
    reads, writes = os.pipe()
    trace = Trace(Path(f"/dev/fd/{writes}")) if reason == "failed" else None
    os.close(reads)  # a trace cannot be written any more
    os.close(writes)
    with nullcontext() if trace is None else trace, Interrupts() as interrupts:
        chat = ChatState(talk, Terminal(), interrupts, Journal(None, print), trace)
        interrupts.pressed = reason == "interrupted"
        with nullcontext() if interrupts.pressed else pytest.raises(SpecError):
            Commands(chat).run("retry", "")
    assert talk.turns == turns


# --- drafts


def test_drafts_without_loading_again(model):
    """Off, a number and back: the same weights and caches, another policy."""
    own, talk = model.policies, Conversation(model, CHOICE, AnswerSettings(max_tokens=6), None)
    texts, reasons = set(), {}
    for word in ("2", "off", "auto"):
        talk.switch(with_drafts(CHOICE, word, CHOICE.drafter))
        assert talk.pair is model
        texts.add("".join(piece.text for piece in talk.stream("hello")))
        reasons[word] = talk.session.statistics.reason.value
        assert talk.session.statistics.reused_tokens > 0 or word == "2"
        talk.session.undo()
    assert len(texts) == 1 and (reasons["off"], reasons["2"]) == ("disabled by user", "fixed by user")
    assert model.policies is own


def test_the_former_model_returns_although_it_is_interrupted(tmp_path, monkeypatch):
    """The new one is refused at once, so the first Ctrl-C comes while the former one is loaded again."""
    opened = []

    def interrupted_once(choice: PairSpec, **settings: bool) -> Pair:
        assert not {"pair", "session"} & vars(talk).keys()  # there may be no memory for two
        opened.append(choice)
        if len(opened) == 2:
            raise KeyboardInterrupt
        return open_pair(choice, **settings)

    talk = Conversation(open_pair(CHOICE), CHOICE, AnswerSettings(), None)
    monkeypatch.setattr(conversation, "open_pair", interrupted_once)
    nothing = PairSpec(str(tmp_path))
    with pytest.raises(NotFound, match=r"config\.json"):
        talk.switch(nothing)
    assert opened == [nothing, CHOICE, CHOICE] and talk.choice == CHOICE
    assert "".join(piece.text for piece in talk.stream("hello"))


# --- Markdown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text\nof 2 * 3 * 4 and a_b_c, snake_case", None),
        ("**kwargs and *args", None),
        ("see <b> and :smile:\n\nnext", None),
        ("- one\n  * two", "<1> • </>one\n<1>   </><1> • </>two\n"),
        ("a `b*c*` and **bold**\nand *it* <b>", "a <36>b*c*</> and <1>bold</>\nand <3>it</> <b>\n"),
        ("see ![a cat](c.png) **here**", "see [image: a cat] <1>here</>\n"),
        (
            r"**so** \(a_1 * b_2 * c\) and \[x*y*z\], `\(`",
            r"<1>so</> \(a_1 * b_2 * c\) and \[x*y*z\], <36>\(</>" + "\n",
        ),
        (
            r"**so** $$a_1 \, b_1$$ or $x_1\,y_1$, *$5* or $6",
            r"<1>so</> $$a_1 \, b_1$$ or $x_1\,y_1$, <3>$5</> or $6" + "\n",
        ),
        ("[here](https://a.b)", "<94>here</> (<4;34>https://a.b</>)\n"),
    ],
)
def test_markdown(text, shown):
    expected = shown and re.sub(r"<([\d;]+)>", "\x1b[\\1m", shown).replace("</>", "\x1b[0m")
    assert rendered(text, 80) == expected


def test_code_and_tables():
    """Code is as it was, without a margin or line breaks, so that it can be copied."""
    code = f"def f(x):\n    return {'x + ' * 30}x"
    shown = rendered(f"```python\n{code}\n```\n| a | b |\n|---|---|\n| 1 | 22 |", 40)
    assert re.search(r"\x1b\[\d+(;49)?mdef", shown)
    shown = re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert shown.startswith(f"{code}\n\n")
    assert [line.split() for line in shown.splitlines()[4:7:2]] == [["a", "b"], ["1", "22"]]


def written(pieces: Iterable[str], lines: int, columns: int, *, renders: bool) -> str:
    """Return what a terminal of that size gets for an answer in pieces."""
    end, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    got = bytearray()

    def read() -> None:
        with suppress(OSError), open(end, "rb", buffering=0) as screen:  # OSError: the other end is closed
            while part := screen.read(65536):
                got.extend(part)

    reader = threading.Thread(target=read)
    reader.start()
    with open(terminal, "w") as stdout, pytest.MonkeyPatch.context() as patch:
        patch.delenv("NO_COLOR", raising=False)
        patch.setenv("TERM", "xterm")
        patch.setattr(sys, "stdout", stdout)
        shown = Terminal()
        shown.renders = renders
        for piece in pieces:
            shown.piece(piece, "answer")
        shown.end()
        shown.render()
    reader.join(LIMIT)
    return got.decode()


def test_rendered_at_the_end():
    """The streamed rows are taken back, and the rendered ones take their place."""
    expected = "**bold**\r\ntext\r\n\r\x1b[2A\x1b[J\x1b[1mbold\x1b[0m\r\ntext\r\n"
    assert written(["**bold**\ntext"], 24, 8, renders=False) == expected


def seen(text: str, lines: int) -> list[str]:
    """Return what a terminal of that height shows, with what has scrolled away."""
    screen, row, column = [""], 0, 0
    for code, move, char in re.findall(r"\x1b\[(\d*)(?:;\d+)*([A-Za-z])|(.)", text, re.DOTALL):
        if move == "A":
            assert int(code) < lines, "above the screen"
            row -= int(code)
        elif move == "J":
            del screen[row + 1 :]
            screen[row] = screen[row][:column]
        elif char == "\n":
            row, column = row + 1, 0
            screen += [""] * (row == len(screen))
        elif char == "\r":
            column = 0
        elif char:
            screen[row] = screen[row][:column].ljust(column) + char
            column += 1
    return [line.rstrip() for line in screen]


LONG = [f"Part **{i}**:\n\n1. *one* `x`\n2. two\n\n# Head\ntext\n\n" for i in range(9)]
ITEMS = [f"{i}. item **{i}**\n\n" for i in range(1, 31)]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    "parts", [LONG, ITEMS, ["plain\n\n", "```python\n", *["x = 1\n"] * 20, "```\n", "*a*"]]
)
def test_answers_longer_than_the_screen_are_rendered(parts, size):
    """Each block when it has ended, with what one rendering of all would show."""
    text = "".join(parts)
    pieces = (text[start : start + size] for start in range(0, len(text), size))
    lines = [line.split() for line in seen(written(pieces, 10, 60, renders=True), 10) if line]
    if parts[0] == "plain\n\n":  # code that is higher than the screen stays as it came
        assert lines[0] == ["plain"] and lines[-1] == ["a"] and "```python" in lines[1]
    else:
        whole = re.sub(r"\x1b\[[\d;]*m", "", rendered(text, 60) or "")
        assert lines == [line.split() for line in whole.splitlines() if line.strip()]


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        (["one two th", "ree", " four"], "one two th\x1b[9G\x1b[K\nthree four"),  # moved to the next line
        (["see https://", "example.org/a"], "see \nhttps://example.org/a"),
        (["a 漢字漢", "字漢字 b"], "a 漢字漢字\n漢字 b"),
    ],
)
def test_lines_end_between_words(pieces, shown):
    wrapping = Wrapping()
    assert "".join(wrapping.add(piece, "", 10) for piece in pieces) == shown


# --- the editor and Ctrl-C


@pytest.fixture
def keyboard() -> Iterator[PipeInput]:
    """What editors read keys from."""
    with create_pipe_input() as typed:
        yield typed


def open_editor(keyboard: PipeInput, interrupts: Interrupts, history: Path | None = None) -> LineEditor:
    commands = Commands(SimpleNamespace(terminal=None, conversation=None))
    return LineEditor(interrupts, commands.completer(), history, keyboard, DummyOutput())


def read(keyboard: PipeInput, keys: str, history: Path | None = None) -> str:
    """The message of a new editor; the keys are typed when it waits for them."""
    interrupts = Interrupts()
    interrupts.clear = lambda: keyboard.send_text(f"{keys}\r")
    return open_editor(keyboard, interrupts, history).read()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("\x1b[200~And this?\n# a second line\x1b[201~", "And this?\n# a second line"),  # pasted
        ('"""one\rtwo\x1b\rthree"""', '"""one\ntwo\nthree"""'),
        ("/hi\t", "/highlight"),
        ("/set temp\t", "/set temperature"),
        ("/model gemma-4-26b-a4b-8\t", "/model gemma-4-26b-a4b-8bit"),
        ("/load conv\t", "/load conversation-of-monday.json"),
        ("not /hi\t", "not /hi"),
    ],
)
def test_lines_and_completion(keyboard, keys, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conversation-of-monday.json").touch()
    assert read(keyboard, keys) == message


def test_history(keyboard, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for keys in ("/show again", "\x1b[A"):
        file = open_history(Terminal())
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert read(keyboard, keys, file) == "/show again"
        file.chmod(0o644)
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    assert open_history(Terminal()) is None
    assert "what you type is not kept" in capfd.readouterr().err


@pytest.mark.parametrize("key", [Keys.SIGINT, Keys.ControlC])
def test_ctrl_c_as_the_editor_ends_stops_the_answer(keyboard, key):
    with Interrupts() as interrupts, interrupts.acting(CtrlC.NOTE):
        editor = open_editor(keyboard, interrupts)
        waiting = editor._session.app.key_processor

        def type_or_press(app: Application[str]) -> None:
            if app.is_done:  # it has its message and reads no more keys
                waiting.feed(KeyPress(key))
            elif not app.current_buffer.text:
                keyboard.send_text("hello\r")

        editor._session.app.before_render += type_or_press
        assert editor.read() == "hello" and interrupts.pressed


def test_interrupts_of_an_answer(capfd):
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt), interrupts.acting(CtrlC.RAISE):  # while the prompt is read
            signal.raise_signal(signal.SIGINT)
        assert interrupts.action is CtrlC.EXIT
        with pytest.raises(KeyboardInterrupt), interrupts.acting(CtrlC.RAISE):  # it was pressed before
            pass
        interrupts.clear()
        with pytest.raises(SystemExit) as left, interrupts.acting(CtrlC.RAISE):
            interrupts.action = CtrlC.STOP
            signal.raise_signal(signal.SIGINT)
            assert interrupts.pressed
            interrupts.action = CtrlC.NOTE
            signal.raise_signal(signal.SIGINT)
            interrupts.action = CtrlC.STOP
            signal.raise_signal(signal.SIGINT)
    assert left.value.code == 130 and capfd.readouterr().err == "mlx-spec: interrupted\n"
