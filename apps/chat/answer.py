"""One turn: stream the answer to the terminal, and keep what there is to say about it."""

from __future__ import annotations

import time
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field

import mlx.core as mx

from mlx_spec.apps.chat.input import hidden_typing
from mlx_spec.apps.chat.interrupts import Interrupts
from mlx_spec.apps.chat.report import Trace
from mlx_spec.apps.chat.terminal import BORDER, DIM, Origins, Terminal
from mlx_spec.sampling import Sampling
from mlx_spec.session import Piece, Session, Statistics


@dataclass(frozen=True)
class Asked:
    """A message and how to answer it."""

    message: str
    sampling: Sampling
    max_tokens: int
    think: bool
    origins: Origins


@dataclass(frozen=True)
class Outcome:
    """How an answer went."""

    statistics: Statistics
    answer: str
    thoughts: str
    first_seconds: float | None  # until the first round was done; None: there was none
    peak_bytes: int  # of memory as MLX counts it, weights included

    @property
    def interrupted(self) -> bool:
        """Whether it was stopped before its end."""
        return self.statistics.finish_reason is None


@dataclass
class _Seen:
    """What came of an answer so far."""

    texts: dict[str, list[str]] = field(default_factory=lambda: {"answer": [], "thinking": []})
    first_seconds: float | None = None


@dataclass
class Answerer:
    """Answers messages on a terminal."""

    terminal: Terminal
    interrupts: Interrupts
    trace: Trace | None = None
    highlights: bool = False
    shows: bool = True  # False: nothing but what comes back
    talks: bool = False  # in a conversation: Markdown at the end, and keys wait for the next prompt

    def answer(self, session: Session, asked: Asked) -> Outcome:
        """Stream one answer. Ctrl-C ends it early. Raises SpecError."""
        mx.reset_peak_memory()
        before, seen = session.statistics, _Seen()
        keys = hidden_typing() if self.talks else nullcontext()
        with keys, self.interrupts.answering(), suppress(KeyboardInterrupt):
            self._stream(session, asked, seen)
        if self.shows:
            self.terminal.end(interrupted=self.interrupts.pressed)
        if self.talks and not self.highlights and not self.interrupts.pressed:
            self.terminal.render()
        statistics = session.statistics
        if statistics is before:  # stopped before the prompt was ready
            statistics = Statistics()
        texts = {kind: "".join(parts).strip() for kind, parts in seen.texts.items()}
        return Outcome(
            statistics, texts["answer"], texts["thinking"], seen.first_seconds, mx.get_peak_memory()
        )

    def _stream(self, session: Session, asked: Asked, seen: _Seen) -> None:
        start = time.perf_counter()
        pieces = session.stream(
            asked.message, sampling=asked.sampling, max_tokens=asked.max_tokens, thinking=asked.think
        )
        if self.trace is not None:
            self.trace.begin(asked.origins)
        with closing(pieces):
            for piece in pieces:
                self.interrupts.begun()
                if seen.first_seconds is None:
                    seen.first_seconds = time.perf_counter() - start
                seen.texts[piece.kind].append(piece.text)
                if self.trace is not None:
                    self.trace.piece(piece)
                if self.shows:
                    self._show(piece, asked.origins)
                if self.interrupts.pressed:
                    self.interrupts.settle()
                    return

    def _show(self, piece: Piece, origins: Origins) -> None:
        if not (self.highlights and self.terminal.has_styles):
            self.terminal.piece(piece.text, piece.kind)
            return
        for span in piece.spans:
            self.terminal.piece(span.text, piece.kind, origins.style(span))
        if piece.round is not None and piece.text:
            self.terminal.piece(BORDER, piece.kind, DIM)
