"""The parts of the chat program that need no terminal."""

from __future__ import annotations

import fcntl
import io
import pty
import re
import select
import signal
import struct
import sys
import termios
from dataclasses import replace
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from screen import GOLDEN, LIMIT

from mlx_spec.apps.chat import conversation as files
from mlx_spec.apps.chat.conversation import Conversation, SavedConversation
from mlx_spec.apps.chat.input import CommandCompleter, is_open, unquoted
from mlx_spec.apps.chat.interrupts import Interrupts
from mlx_spec.apps.chat.markdown import rendered, rows
from mlx_spec.apps.chat.models import LoadedPair, PairChoice, open_pair, reuse_weights, with_drafts
from mlx_spec.apps.chat.report import details, status_line
from mlx_spec.apps.chat.settings import (
    NAMES,
    AnswerSettings,
    changed,
    from_values,
    shown,
    values,
)
from mlx_spec.apps.chat.terminal import (
    COPIED,
    DRAFTED,
    FORCED,
    Terminal,
    legend,
    origin_name,
    origin_style,
)
from mlx_spec.errors import BadCheckpoint, InvalidValue, NotFound
from mlx_spec.session import Positions, Session, Statistics
from mlx_spec.text.stream import Span
from mlx_spec.types import Reason

TARGET = str(GOLDEN / "target")
TURNS = [
    {"role": "user", "content": "What does zip do?"},
    {"role": "assistant", "content": "It yields tuples.", "reasoning_content": "Hm."},
]


@pytest.fixture(scope="module")
def model() -> LoadedPair:
    return open_pair(PairChoice(TARGET, str(GOLDEN / "assistant")))


def texts(session: Session, message: str, max_tokens: int = 12) -> str:
    return "".join(piece.text for piece in session.stream(message, max_tokens=max_tokens))


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
    by_drafter={0: Positions((10, 10, 9, 9), (10, 6, 3))},
    prefill_seconds=0.5,
    decode_seconds=2.0,
    compared_tokens=30,
    plain_seconds=2.1,
    compared_seconds=1.5,
    finish_reason="stop",
    last_reason=Reason.PAYS,
)
PLAIN = Statistics(prompt_tokens=3, generated_tokens=1, rounds=1, decode_seconds=0.5, finish_reason="stop")


def test_status_of_a_speculative_answer():
    assert status_line(SPECULATED, ["mtp"], 2048) == (
        "18.5 tokens/s, 1.40 x plain · mtp K=4, 50% accepted · speculation pays · "
        "37 tokens, 5 of 12 prompt tokens reused"
    )
    both = replace(SPECULATED, by_drafter={0: Positions((9, 9, 9), (9,)), 2: Positions((2, 1), (2, 1))})
    assert " · mtp + grammar K=3, " in status_line(both, ["mtp", "lookup"], 2048)


@pytest.mark.parametrize(
    ("figures", "gain"),
    [({"compared_tokens": 23}, None), ({"plain_seconds": 1.2}, "0.80 x plain")],
)
def test_speculation_without_a_gain_does_not_pay(figures, gain):
    statistics = replace(SPECULATED, **figures)
    line = status_line(statistics, ["mtp"], 2048)
    assert " · learning · " in line and ("x plain" in line) == (gain is not None) and (gain or "") in line
    assert any(line.startswith("gain: ") for line in details(statistics, None, 0)) == (gain is not None)


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (Reason.NO_DRAFTER, "speculation off: no drafter"),
        (Reason.COST, "speculation off: verification costs more than it gains"),
        (Reason.FIXED, "fixed by user"),
        (Reason.LEARNING, "learning"),
    ],
)
def test_status_tells_the_reason(reason, text):
    assert status_line(replace(PLAIN, last_reason=reason), [], 8) == f"2.0 tokens/s · {text} · 1 token"


def test_status_tells_what_cut_the_answer():
    cut = replace(SPECULATED, finish_reason="length", reused_tokens=0)
    assert status_line(cut, ["mtp"], 37).endswith(" · 37 tokens · cut at --max-tokens 37")
    assert status_line(cut, ["mtp"], 38).endswith(" · 37 tokens · cut: the context is full")
    assert status_line(replace(cut, finish_reason=None), ["mtp"], 64).endswith("tokens · interrupted")
    assert status_line(Statistics(prompt_tokens=9), [], 64) == "0.0 tokens/s · 0 tokens · interrupted"


def test_details():
    assert details(SPECULATED, 0.55, 2_400_000_000, ["mtp"]) == [
        "prompt: 12 tokens, 5 reused, the rest read in 0.50 s (14.0 tokens/s)",
        "answer: 37 tokens in 12 rounds and 2.00 s (18.5 tokens/s)",
        "first token after 0.55 s",
        "drafts: by mtp, mostly K=4, 19 of 38 tokens accepted, 3.4 tokens a round",
        "accepted by position:",
        "   1 ████████████████████ 100%",
        "   2 ████████████░░░░░░░░  60%",
        "   3 ███████░░░░░░░░░░░░░  33%",
        "   4 ░░░░░░░░░░░░░░░░░░░░   0%",
        "gain: 1.40 x plain decoding",
        "speculation on: pays",
        "peak memory: 2.4 GB",
    ]
    assert details(replace(PLAIN, last_reason=Reason.DISABLED), None, 12_300_000)[2:] == [
        "speculation off: disabled by user",
        "peak memory: 12.3 MB",
    ]


# --- conversations on the disk


def test_saved_and_read(tmp_path):
    file = tmp_path / "talk.json"
    talk = SavedConversation(
        "demo", "lookup", "Be brief.", TURNS, values(AnswerSettings(max_tokens=7, think=True))
    )
    files.write(file, talk)
    assert files.read(file) == talk
    files.write(file, replace(talk, system=None))  # over one of ours
    assert files.read(file).system is None
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]


def test_file_of_the_first_release(tmp_path):
    """What version 1 wrote, with what a later minor release may have added, is read for ever."""
    text = (
        '{"format": "mlx_spec conversation", "version": 1, "target": "demo", "drafter": null, '
        '"system": "Be brief.", "settings": {"temperature": 0.5, "max_tokens": 9, "mood": "good"}, '
        '"messages": [{"role": "user", "content": "Hi", "time": 3}, '
        '{"role": "assistant", "content": "Hey"}], '
        '"colours": true}'
    )
    (tmp_path / "old.json").write_text(text)
    found = files.read(tmp_path / "old.json")
    assert (found.target, found.drafter, found.system, len(found.messages)) == ("demo", None, "Be brief.", 2)
    settings = from_values(found.settings)
    assert (settings.sampling.temperature, settings.max_tokens, settings.think) == (0.5, 9, False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "is no conversation of ours"),
        ('{"format": "something else", "version": 1}', "is no conversation of ours"),
        ('{"format": "mlx_spec conversation", "version": 2}', "takes a newer mlx_spec"),
        ('{"format": "mlx_spec conversation", "version": 1}', "holds no list of messages"),
        ('{"format": "mlx_spec conversation", "version": 1, "messages": [3]}', "holds no list of messages"),
    ],
)
def test_files_that_are_no_conversation(text, said, tmp_path):
    file = tmp_path / "talk.json"
    file.write_text(text)
    with pytest.raises(BadCheckpoint, match=said):
        files.read(file)
    if '"mlx_spec conversation"' not in text:
        with pytest.raises(InvalidValue, match="take another name"):
            files.write(file, SavedConversation("demo", None, None, []))
        assert file.read_text() == text


def test_names_of_files(tmp_path):
    assert files.file_named("talk") == Path("talk.json") and files.file_named("a/b.txt") == Path("a/b.txt")
    with pytest.raises(NotFound, match="there is no file"):
        files.read(tmp_path / "none.json")
    for name, said in (
        ("~nobody-of-that-name/talk", "home of nobody"),
        ("a\0b", "NUL"),
        ("", "give the name"),
    ):
        with pytest.raises(InvalidValue, match=said):
            files.file_named(name)
    with pytest.raises(InvalidValue, match="cannot be written"):
        files.write(tmp_path / "none" / "talk.json", SavedConversation("demo", None, None, []))


def test_loading_is_all_or_nothing(model):
    talk = Conversation(model, AnswerSettings(max_tokens=5), "Be brief.")
    talk.session.resume(TURNS)
    for turns, settings in (
        (TURNS[::-1], {}),
        (TURNS[:1], {}),
        (TURNS, {"temperature": -1}),
        (TURNS, {"temperature": "warm"}),
        (TURNS, {"max_tokens": 0}),
        (TURNS, {"think": "on"}),
    ):
        with pytest.raises(InvalidValue):
            talk.load(SavedConversation("demo", None, None, turns, settings))
        assert (talk.turns, talk.system, talk.settings.max_tokens) == (TURNS, "Be brief.", 5)
    talk.load(SavedConversation("demo", None, None, [], {}))
    assert (talk.turns, talk.system, talk.settings) == ([], None, AnswerSettings())


# --- sessions


def test_session_goes_on_from_messages(model):
    whole, resumed = model.pair.session("Be brief."), model.pair.session("Be brief.")
    texts(whole, "What does zip do?")
    resumed.resume([message for message in whole.messages if message["role"] != "system"])
    assert resumed.messages == whole.messages
    assert texts(resumed, "And map?") == texts(whole, "And map?")


def test_undo(model):
    session = model.pair.session()
    assert session.undo() == []
    first = texts(session, "What does zip do?")
    second = texts(session, "And map?")
    assert [turn["role"] for turn in session.undo()] == ["user", "assistant"]
    assert len(session.messages) == 2
    assert texts(session, "And map?") == second
    session.undo()
    session.undo()
    assert texts(session, "What does zip do?") == first


def test_spans_make_up_the_text(model):
    session = model.pair.session()
    pieces = list(session.stream("What does zip do?", max_tokens=24))
    assert all("".join(span.text for span in piece.spans) == piece.text for piece in pieces)
    drafted = [span for piece in pieces for span in piece.spans if span.position]
    assert all(span.drafter is not None for span in drafted)


# --- settings


def test_settings():
    settings = changed(AnswerSettings(), "temperature", "0.5")
    settings = changed(changed(changed(settings, "seed", "-3"), "think", "on"), "max_tokens", "9")
    assert (settings.sampling.temperature, settings.sampling.seed) == (0.5, -3)
    assert (settings.think, settings.max_tokens) == (True, 9)
    assert from_values(values(settings)) == settings and set(values(settings)) == set(NAMES)
    assert changed(settings, "seed", "off").sampling.seed is None
    assert changed(changed(settings, "max_tokens", "default"), "think", "off").max_tokens == 2048
    assert [shown(value) for value in (True, False, None, 0.5)] == ["on", "off", "off", "0.5"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("temperature", "warm", "'warm' is not allowed"),
        ("top_k", "1.5", "integer of at least 0"),
        ("max_tokens", "0", "at least 1"),
        ("think", "hard", "give on or off"),
    ],
)
def test_settings_that_make_no_sense(name, text, said):
    with pytest.raises(InvalidValue, match=said):
        changed(AnswerSettings(), name, text)


# --- drafts


@pytest.mark.parametrize(
    ("before", "word", "after"),
    [
        (PairChoice("t"), "off", PairChoice("t", None, 0)),
        (PairChoice("t", None, 0), "auto", PairChoice("t")),
        (PairChoice("t", "d", 3, 8), "auto", PairChoice("t", "d", None, 8)),
        (PairChoice("t", "lookup"), "auto", PairChoice("t")),
        (PairChoice("t", "d"), "lookup", PairChoice("t", "lookup")),
        (PairChoice("t", "lookup"), "4", PairChoice("t", "lookup", 4)),
        (PairChoice("t", "none"), "4", PairChoice("t", None, 4)),
    ],
)
def test_words_for_drafts(before, word, after):
    assert with_drafts(before, word) == after


def test_drafts_without_loading_again(model):
    """Off, a number and back: the same weights, another policy; other drafters are another matter."""
    pair, own = model.pair, model.pair.policies
    reasons = {}
    for word in ("off", "2", "auto"):
        found = reuse_weights(model, with_drafts(model.choice, word))
        assert found is not None and found.pair is pair
        session = pair.session()
        reasons[word] = (texts(session, "hello", 6), session.statistics.reason.value)
    assert len({text for text, _ in reasons.values()}) == 1
    assert reasons["off"][1] == "disabled by user" and reasons["2"][1] == "fixed by user"
    assert pair.policies is own
    assert reuse_weights(model, with_drafts(model.choice, "lookup")) is None
    fixed = replace(model, choice=replace(model.choice, num_draft_tokens=2), adaptive=None)
    assert reuse_weights(fixed, with_drafts(fixed.choice, "auto")) is None


# --- what is typed


@pytest.mark.parametrize(
    ("text", "open", "message"),
    [
        ("hello ", False, "hello"),
        ('"""', True, '"""'),
        ('"""""', True, '"""""'),
        ('"""a', True, '"""a'),
        ('"""a\nb"""', False, "a\nb"),
        ('"""\n  a\n"""  ', False, "  a"),
        ('""""""', False, ""),
        ('say """', False, 'say """'),
    ],
)
def test_blocks(text, open, message):
    assert (is_open(text), unquoted(text)) == (open, message)


def test_completions(tmp_path):
    for name in ("talk.json", "tall.json", ".hidden"):
        (tmp_path / name).touch()
    (tmp_path / "tales").mkdir()
    completer = CommandCompleter(["draft", "load", "lull"], {"draft": lambda: ("auto", "off")}, ["load"])
    for typed, expected in {
        "/l": ["/load", "/lull"],
        "/draft ": ["auto", "off"],
        "/draft o": ["off"],
        f"/load {tmp_path}/tal": [f"{tmp_path}/{name}" for name in ("tales/", "talk.json", "tall.json")],
        f"/load {tmp_path}/.h": [f"{tmp_path}/.hidden"],
    }.items():
        found = list(completer.get_completions(Document(typed), CompleteEvent()))
        assert [completion.text for completion in found] == expected
        assert all(typed.endswith(each.text[: -each.start_position]) for each in found)
    for typed in ("hello", "l", "/lull ", "/draft off on", "/l\nm", f"/load {tmp_path}/none/x"):
        assert not list(completer.get_completions(Document(typed), CompleteEvent()))


# --- Markdown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text\nof 2 * 3 * 4 and a_b_c, snake_case", None),
        ("**kwargs and *args", None),
        ("see <b> and :smile:\n\nnext", None),
        ("# Title #\ntext", "<1;4>Title</>\n\ntext\n"),
        ("- one\n  * two", "<1> • </>one\n<1>   </><1> • </>two\n"),
        ("1. one\n2. two", "<36> 1 </>one\n<36> 2 </>two\n"),
        ("a `b*c*` and **bold**\nand *it* <b>", "a <36>b*c*</> and <1>bold</>\nand <3>it</> <b>\n"),
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


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 1),
        ("a\n\nb", 3),
        ("a" * 10, 1),
        ("a" * 11, 2),
        ("a" + "漢" * 9 + "b", 3),  # a wide character is not cut in two
        ("e\u0301" * 10, 1),
        ("a\tb", None),
    ],
)
def test_rows(text, count):
    assert rows(text, 10) == count


@pytest.mark.parametrize(
    ("pieces", "columns", "again"),
    [
        (["**bo", "ld** text"], 80, "\x1b[1A\x1b[J\x1b[1mbold\x1b[0m text\r\n"),
        (["**bold** text"], 8, "\x1b[2A\x1b[J\x1b[1mbold\x1b[0m\r\ntext\r\n"),
        (["nothing to change"], 80, ""),
        (["**bold**" + "\n" * 30], 80, ""),  # higher than the screen
    ],
)
def test_rendered_at_the_end(pieces, columns, again, monkeypatch):
    end, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    monkeypatch.delenv("NO_COLOR", raising=False)
    with open(terminal, "w") as stdout, open(end, "rb", buffering=0) as screen:
        monkeypatch.setattr(sys, "stdout", stdout)
        shown = Terminal()
        for piece in pieces:
            shown.piece(piece, "answer")
        shown.end()
        streamed = "".join(pieces).removesuffix("\n").replace("\n", "\r\n") + "\r\n"
        assert _read(screen, len(streamed)) == streamed
        shown.render()
        shown.piece("!", "answer")
        assert _read(screen, len(again) + 1) == again + "!"


def _read(screen: io.FileIO, count: int) -> str:
    """So many characters of ASCII, and what came with them: a terminal hands them on as it likes."""
    seen = b""
    while len(seen) < count:
        assert select.select([screen], [], [], LIMIT)[0], seen
        seen += screen.read(65536)
    return seen.decode()


# --- origins


def test_origins():
    drafters = ("assistant", "lookup")
    names = [origin_name(drafters, index) for index in (None, 0, 1, 2)]
    assert names == [None, "assistant", "lookup", "grammar"]
    spans = [Span("a", *origin) for origin in ((None, 0), (0, 1), (0, 99), (1, 2), (2, 1))]
    styles = [origin_style(span, drafters) for span in spans]
    assert styles == ["", DRAFTED[0], DRAFTED[-1], COPIED, FORCED]
    assert {style for _, style in legend()} >= {*DRAFTED, COPIED, FORCED}


# --- Ctrl-C


def test_interrupts_of_an_answer(capfd):
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt), interrupts.raising():  # while the prompt is read
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), interrupts.raising():  # it was pressed before
            pass
        interrupts.clear()
        with pytest.raises(SystemExit) as left, interrupts.raising():
            interrupts.begin_rounds()
            signal.raise_signal(signal.SIGINT)
            assert interrupts.pressed
            interrupts.settle()
            signal.raise_signal(signal.SIGINT)
            interrupts.begin_rounds()
            signal.raise_signal(signal.SIGINT)
    assert left.value.code == 130 and capfd.readouterr().err == "mlx-spec: interrupted\n"
