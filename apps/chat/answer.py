"""One turn: stream the answer to the terminal, then say how it went."""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import dataclass

from mlx_spec.apps.chat.arguments import Options
from mlx_spec.apps.chat.interrupts import Interrupts
from mlx_spec.apps.chat.status import details, status_line
from mlx_spec.apps.chat.terminal import Terminal
from mlx_spec.apps.command import INTERRUPTED
from mlx_spec.sampling import Sampling
from mlx_spec.session import Session


@dataclass(frozen=True)
class Answerer:
    """Answers messages on a terminal, with the options of the command line."""

    options: Options
    sampling: Sampling
    terminal: Terminal
    interrupts: Interrupts

    def answer(self, session: Session, message: str) -> int:
        """Stream one answer and report on it. Returns 0, or INTERRUPTED. Raises SpecError."""
        before = session.statistics
        with self.interrupts.answering(), suppress(KeyboardInterrupt):
            self._stream(session, message)
        self.terminal.end(interrupted=self.interrupts.pressed)
        if session.statistics is before:  # stopped before the prompt was ready
            self.terminal.note("interrupted")
            return INTERRUPTED
        self.report(session, full=self.options.stats)
        return 0 if session.statistics.finish_reason else INTERRUPTED

    def report(self, session: Session, *, full: bool) -> None:
        """The status line of the last answer, and with `full` the lines under it."""
        statistics = session.statistics
        self.terminal.note(status_line(statistics, self.options.max_tokens))
        for line in details(statistics) if full else ():
            self.terminal.note(line)

    def _stream(self, session: Session, message: str) -> None:
        options = self.options
        pieces = session.stream(
            message, sampling=self.sampling, max_tokens=options.max_tokens, thinking=options.think
        )
        with closing(pieces):
            for piece in pieces:
                self.interrupts.begun()
                self.terminal.piece(piece.text, piece.kind)
                if self.interrupts.pressed:
                    self.interrupts.settle()
                    return
