"""Stream an answer to a terminal, and report its figures: the status line, `/stats`, JSON, a trace."""

from __future__ import annotations

import json
import time
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import mlx.core as mx

from mlx_spec.checkpoint.files import human_bytes
from mlx_spec.decode.statistics import Positions, Statistics, source_words
from mlx_spec.device.awake import Awake
from mlx_spec.errors import InvalidValue, SpecError
from mlx_spec.pair import PairInfo
from mlx_spec.session import Piece
from mlx_spec.types import Reason

from .conversation import Conversation
from .input import BLOCK_MARK, hidden_typing, key_waits, unquoted
from .interrupts import CtrlC, Interrupts
from .pictures import Content, Part, dropped, read_part, stored, with_text
from .saved import Journal
from .terminal import BORDER, DIM, GAINED, Terminal, origin_style


@dataclass(frozen=True)
class Outcome:
    """The texts and figures of one answer."""

    statistics: Statistics
    answer: str
    thinking: str
    first_seconds: float | None  # until the first round was done; None without a round
    peak_bytes: int  # MLX's peak memory, weights included
    max_tokens: int  # the limit of its tokens

    @property
    def is_interrupted(self) -> bool:
        """Return True if the answer was stopped before its end."""
        return self.statistics.finish_reason is None


@dataclass
class ChatState:
    """A conversation on a terminal, and how its answers are shown."""

    conversation: Conversation
    terminal: Terminal
    interrupts: Interrupts
    journal: Journal
    trace: Trace | None = None
    highlight: bool = False  # colour tokens by their origin
    full_reports: bool = False
    shows_answers: bool = True
    is_interactive: bool = False  # render Markdown at the end, and keep keys for the next prompt
    last: Outcome | None = None
    pictures: list[Part] = field(default_factory=list)  # attached to the next message
    shows_race: bool = True  # True until /race was recommended once

    def attach(self, file: Path) -> None:
        """Attach a picture to the next message. Raises SpecError."""
        part, about = read_part(file, self.conversation.pair)
        self.pictures.append(part)
        self.terminal.note(f"picture {len(self.pictures)}: {about}")

    def message(self, text: str) -> Content:
        """Return a typed message with its pictures: attached ones, and files whose paths begin the text.

        Raises SpecError.
        """
        if text.lstrip().startswith(BLOCK_MARK):
            return self.with_pictures(unquoted(text))
        files, text = dropped(text)
        before = len(self.pictures)
        try:
            for file in files:
                self.attach(file)
        except SpecError:
            del self.pictures[before:]
            raise
        return self.with_pictures(text) if files or text else ""

    def with_pictures(self, text: str) -> Content:
        """Return a message with the attached pictures before its text."""
        return with_text(self.pictures, text)

    def answer(self, message: Content) -> Outcome:
        """Stream one answer. Ctrl-C ends it early. Raises SpecError."""
        mx.reset_peak_memory()
        session = self.conversation.session
        before, start = session.statistics, time.perf_counter()
        texts, first_seconds = {"answer": "", "thinking": ""}, None
        keys = hidden_typing() if self.is_interactive else nullcontext()
        self.journal.ask(stored(message), self.conversation.save())
        self.terminal.renders = self.is_interactive and not self.highlight
        with (
            keys,
            suppress(KeyboardInterrupt),
            self.interrupts.acting(CtrlC.RAISE),
            closing(self.conversation.stream(message)) as pieces,
            Awake(),
        ):
            if self.trace is not None:
                self.trace.begin()
            for piece in pieces:
                self.interrupts.action = CtrlC.STOP
                first_seconds = first_seconds or time.perf_counter() - start
                texts[piece.kind] += piece.text
                self.journal.add(piece)
                if self.trace is not None:
                    self.trace.add(piece)
                if self.shows_answers:
                    self._show(piece)
                if self.interrupts.pressed:
                    break
            self.interrupts.action = CtrlC.NOTE
        if self.shows_answers:
            self.terminal.end(interrupted=self.interrupts.pressed)
        if self.is_interactive and not self.highlight and not self.interrupts.pressed:
            self.terminal.render()
        # An answer that was interrupted before its first round has no statistics.
        statistics = Statistics() if session.statistics is before else session.statistics
        answer, thinking = texts["answer"].strip(), texts["thinking"].strip()
        peak, most = mx.get_peak_memory(), self.conversation.settings.max_tokens
        return Outcome(statistics, answer, thinking, first_seconds, peak, most)

    def answer_and_report(self, message: Content) -> Outcome:
        """Stream one answer, then show the status line. Raises SpecError."""
        outcome = self.answer(message)
        sent = list(map(id, message))  # /retry sends an old message: attached pictures then stay
        self.pictures[:] = [picture for picture in self.pictures if id(picture) not in sent]
        if outcome.statistics.prompt_tokens:
            self.last = outcome
            self.report(outcome, full=self.full_reports)
            if outcome.statistics.finish_reason != "stop" and repeats(outcome.answer or outcome.thinking):
                way = "/set repetition_penalty 1.1 or /set temperature 0.7, then /retry"
                way = way if self.is_interactive else "--temperature 0.7"
                self.terminal.note(f"the answer repeats itself: {way} may help")
            if self.is_interactive and self.shows_race and wants_race(outcome.statistics):
                self.shows_race = False
                self.terminal.note("/race answers again with drafts and without, to show what they gain here")
        else:
            self.terminal.note("interrupted")
        if self.is_interactive:
            self.terminal.note("")
            with hidden_typing():
                self.conversation.pair.check_costs(lambda: self.interrupts.pressed or key_waits(), most_s=1.0)
        return outcome

    def report(self, outcome: Outcome, *, full: bool) -> None:
        """Show the status line of an answer, and with `full` the lines of `/stats`."""
        statistics = outcome.statistics
        self.terminal.styled(status_line(statistics, outcome.max_tokens))
        if full:
            self.terminal.note(*details(statistics, outcome.first_seconds, outcome.peak_bytes))

    def _show(self, piece: Piece) -> None:
        if not (self.highlight and self.terminal.has_styles):
            self.terminal.piece(piece.text, piece.kind)
            return
        for span in piece.spans:
            self.terminal.piece(span.text, piece.kind, origin_style(span))
        if piece.round is not None and piece.text:
            self.terminal.piece(BORDER, piece.kind, DIM)


# --- reports


def repeats(text: str, shortest: int = 160, times: int = 4) -> bool:
    """Return True if a text ends with one piece `times` times or more, over `shortest` characters."""
    for length in range(1, min(len(text) // times, 400) + 1):
        piece = text[-length:]
        if piece.strip() and text.endswith(piece * max(times, -(-shortest // length))):
            return True
    return False


def status_line(statistics: Statistics, max_tokens: int) -> list[tuple[str, str]]:
    """Return texts with SGR styles that make up a line.

    It has gain, speed, how many tokens were drafted or why none was, and why the answer was cut.
    """
    count, reason = statistics.generated_tokens, statistics.reason
    drafts = f"{statistics.accepted} of {count} tokens drafted"
    if not statistics.drafted:
        drafts = f"drafts: {statistics.reason_words}"
    elif reason is Reason.FAILED or (not statistics.accepted and reason is not Reason.FIXED):
        drafts += f": {statistics.reason_words}"
    elif statistics.accepted and statistics.tokens_per_pass is not None:
        drafts += f", {statistics.tokens_per_pass:.1f} a pass"
    words_of = [f"{statistics.tokens_per_second:.0f} tokens/s", drafts]
    if statistics.finish_reason is None:
        words_of.append("interrupted")
    elif statistics.finish_reason == "length":
        words_of.append("cut: the context is full" if count < max_tokens else "cut at --max-tokens")
    if (words := statistics.gain_words) is None:
        return [(" · ".join(words_of), DIM)]
    is_faster = (statistics.gain or 0.0) > 1
    return [(words, GAINED if is_faster else DIM), (" · " + " · ".join(words_of), DIM)]


def wants_race(statistics: Statistics) -> bool:
    """Return True if many draft tokens were accepted, and the gain is not known."""
    return statistics.known_gain is None and statistics.accepted >= 32


def details(statistics: Statistics, first_seconds: float | None, peak_bytes: int) -> list[str]:
    """Return the lines that `--stats` and `/stats` add to the status line."""
    read, wrote = statistics.read_tokens, statistics.generated_tokens
    lines = [
        f"prompt: {statistics.prompt_tokens} tokens, {statistics.reused_tokens} reused, "
        f"the rest read in {statistics.prefill_seconds:.2f} s{_rate(read, statistics.prefill_seconds)}",
        f"answer: {wrote} tokens in {statistics.rounds} passes "
        f"and {statistics.decode_seconds:.2f} s{_rate(wrote, statistics.decode_seconds)}",
    ]
    if statistics.reread_words:
        lines.append(f"read again: {statistics.reread_tokens} tokens, {statistics.reread_words}")
    if statistics.drafter_cold:
        lines.append(f"drafter: {statistics.drafter_cold} of the reused tokens are new to it")
    if first_seconds is not None:
        lines.append(f"first token after {first_seconds:.2f} s")
    if statistics.drafted:
        lines += [
            f"mostly {statistics.draft_length} draft tokens in a pass, "
            f"{statistics.accepted} of {statistics.drafted} accepted, "
            f"{statistics.acceptance_length:.1f} tokens for each draft",
            *(line for name, positions in statistics.by_drafter.items() for line in _bars(name, positions)),
        ]
    if tried := statistics.ahead_hits + statistics.ahead_misses:
        lines.append(f"drafted ahead: {statistics.ahead_hits} of {tried} drafts were there at once")
    if statistics.known_gain is not None:
        lines.append(f"gain: {statistics.known_gain:.2f} x plain decoding")
    elif statistics.gain_words is not None:
        lines.append(f"gain: {statistics.gain_words}; few rounds were timed beside plain ones")
    if statistics.generated_tokens:
        lines.append(statistics.exact_words)
    return [*lines, f"drafts: {statistics.reason_words}", f"peak memory: {human_bytes(peak_bytes)}"]


def as_json(outcome: Outcome, info: PairInfo) -> dict[str, Any]:
    """Return an answer and its figures in seconds, bytes and tokens."""
    figures, finish_reason = outcome.statistics.as_dict(), outcome.statistics.finish_reason
    return {
        "text": outcome.answer,
        "thoughts": outcome.thinking or None,
        "target": info.target,
        "drafter": info.drafter,
        "finish_reason": finish_reason or "interrupted",
        "usage": {
            **{name: figures[name] for name in ("prompt_tokens", "reused_tokens", "reread_tokens")},
            "completion_tokens": figures["generated_tokens"],
        },
        "timings": {
            "first_token_seconds": outcome.first_seconds,
            "prompt_seconds": figures["prefill_seconds"],
            "prompt_tokens_per_second": figures["prompt_per_second"],
            **{name: figures[name] for name in ("decode_seconds", "tokens_per_second", "gain", "known_gain")},
        },
        "speculation": {**figures, "on": figures["speculation"] == "on"},
        "peak_memory_bytes": outcome.peak_bytes,
    }


class Trace:
    """A file that gets one line of JSON for each round, as a context manager. Raises InvalidValue."""

    def __init__(self, file: Path) -> None:
        self._name = file
        self._turn, self._round = 0, 0
        self._spans: list[dict[str, Any]] = []
        try:
            self._file = file.open("w", encoding="utf-8")
        except OSError as error:
            raise self._failure(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # a failed write was reported when it failed
            self._file.close()

    def begin(self) -> None:
        """Count a new turn: its rounds are numbered from 1."""
        self._turn, self._round, self._spans = self._turn + 1, 0, []

    def add(self, piece: Piece) -> None:
        """Add a piece; the last one of a round writes its line. Raises InvalidValue."""
        self._spans += [
            {
                "text": span.text,
                "kind": piece.kind,
                "drafter": span.source,
                "position": span.position,
            }
            for span in piece.spans
        ]
        if (round := piece.round) is None:
            return
        self._round += 1
        line = {
            "turn": self._turn,
            "round": self._round,
            "time": time.time(),
            "kind": round.kind,
            "tokens": round.tokens,
            "drafted": round.drafted,
            "accepted": round.accepted,
            "reason": round.reason,
            "seconds": round.seconds,
            "plain_seconds": round.plain_seconds,
            "finish_reason": round.finish_reason,
            "drafter": round.source,
            "spans": self._spans,
        }
        self._spans = []
        try:
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> InvalidValue:
        return InvalidValue(f"--trace {self._name} cannot be written ({error.strerror}): take another file")


def _bars(source: str, positions: Positions) -> list[str]:
    """Return a bar for each position: the accepted share of the tokens that a drafter drafted there."""
    accepted = (*positions.accepted, *[0] * len(positions.drafted))
    lines = [f"{source_words(source)}, accepted by position:"]
    for position, drafted in enumerate(positions.drafted, 1):
        share = accepted[position - 1] / drafted
        cells = round(share * 20)
        lines.append(f"{position:4} {'█' * cells}{'░' * (20 - cells)} {share:4.0%}")
    return lines


def _rate(tokens: int, seconds: float) -> str:
    return f" ({tokens / seconds:.1f} tokens/s)" if seconds > 0 else ""
