"""Answers on a terminal: stream one, then report how it went."""

from __future__ import annotations

import time
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass

import mlx.core as mx

from mlx_spec.session import Piece, Statistics

from .conversation import Conversation
from .input import hidden_typing
from .interrupts import Interrupts
from .report import Trace, details, status_line
from .terminal import BORDER, DIM, Terminal, origin_style


@dataclass(frozen=True)
class Outcome:
    """The texts and figures of one answer."""

    statistics: Statistics
    answer: str
    thinking: str
    first_seconds: float | None  # until the first round was done; None if there was none
    peak_bytes: int  # of memory as MLX counts it, weights included

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
    trace: Trace | None = None
    highlight: bool = False  # colour tokens by their origin
    full_reports: bool = False
    shows_answers: bool = True
    is_interactive: bool = False  # render Markdown at the end, and keep keys for the next prompt
    last: Outcome | None = None

    def answer(self, message: str) -> Outcome:
        """Stream one answer. Ctrl-C ends it early. Raises SpecError."""
        mx.reset_peak_memory()
        session = self.conversation.session
        before, start = session.statistics, time.perf_counter()
        texts, first_seconds = {"answer": "", "thinking": ""}, None
        keys = hidden_typing() if self.is_interactive else nullcontext()
        with (
            keys,
            suppress(KeyboardInterrupt),
            self.interrupts.raising(),
            closing(self.conversation.stream(message)) as pieces,
        ):
            if self.trace is not None:
                self.trace.begin(self.conversation.pair.drafter_names)
            for piece in pieces:
                self.interrupts.begin_rounds()
                first_seconds = first_seconds or time.perf_counter() - start
                texts[piece.kind] += piece.text
                if self.trace is not None:
                    self.trace.add(piece)
                if self.shows_answers:
                    self._show(piece)
                if self.interrupts.pressed:
                    break
            self.interrupts.settle()
        if self.shows_answers:
            self.terminal.end(interrupted=self.interrupts.pressed)
        if self.is_interactive and not self.highlight and not self.interrupts.pressed:
            self.terminal.render()
        # A prompt that was interrupted while it was read has no statistics of its own.
        statistics = Statistics() if session.statistics is before else session.statistics
        answer, thinking = texts["answer"].strip(), texts["thinking"].strip()
        return Outcome(statistics, answer, thinking, first_seconds, mx.get_peak_memory())

    def answer_and_report(self, message: str) -> Outcome:
        """Stream one answer, then show the status line. Raises SpecError."""
        outcome = self.answer(message)
        if outcome.statistics.prompt_tokens:
            self.last = outcome
            self.report(outcome, full=self.full_reports)
        else:
            self.terminal.note("interrupted")
        if self.is_interactive:
            self.conversation.pair.check_costs()
        return outcome

    def report(self, outcome: Outcome, *, full: bool) -> None:
        """Show the status line of an answer, and with `full` the lines of `/stats`."""
        statistics, drafters = outcome.statistics, self.conversation.pair.drafter_names
        self.terminal.note(status_line(statistics, drafters, self.conversation.settings.max_tokens))
        if full:
            for line in details(statistics, outcome.first_seconds, outcome.peak_bytes, drafters):
                self.terminal.note(line)

    def _show(self, piece: Piece) -> None:
        if not (self.highlight and self.terminal.has_styles):
            self.terminal.piece(piece.text, piece.kind)
            return
        drafters = self.conversation.pair.drafter_names
        for span in piece.spans:
            self.terminal.piece(span.text, piece.kind, origin_style(span, drafters))
        if piece.round is not None and piece.text:
            self.terminal.piece(BORDER, piece.kind, DIM)
