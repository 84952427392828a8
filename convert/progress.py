"""How far a conversion is: a line that redraws itself on a terminal, else one line a stage."""

from __future__ import annotations

import time
from typing import TextIO

REDRAW = 0.1  # seconds


class Progress:
    """Reports on `stream`, usually stderr."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._text = ""  # of the running stage; empty between two
        self._tensors = self._size = self._done = self._moved = 0
        self._started = self._drawn = time.monotonic()

    def stage(self, text: str, *, tensors: int = 0, size: int = 0) -> None:
        """Begin a stage of so many tensors and bytes; 0 where that is not counted."""
        self.end()
        self._begin(text, tensors, size)
        if self._live:
            self._draw()
        else:
            print(self._head(), file=self._stream, flush=True)

    def count(self) -> None:
        """One more tensor is done."""
        self._done += 1
        self._redraw()

    def advance(self, size: int) -> None:
        """So many more bytes are done."""
        self._moved += size
        self._redraw()

    def note(self, text: str) -> None:
        """A line of its own."""
        if self._live:
            self._stream.write("\r\033[K")
        print(text, file=self._stream, flush=True)

    def end(self) -> None:
        """End the running stage."""
        if self._live and self._text:
            self._draw()
            self._stream.write("\n")
            self._stream.flush()
        self._text = ""

    def _begin(self, text: str, tensors: int, size: int) -> None:
        self._text, self._tensors, self._size = text, tensors, size
        self._done, self._moved = 0, 0
        self._started = self._drawn = time.monotonic()

    def _redraw(self) -> None:
        if self._live and self._text and time.monotonic() - self._drawn > REDRAW:
            self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        parts = [self._text]
        if self._tensors:
            parts.append(f"{self._done}/{self._tensors} tensors")
        if self._size:
            parts.append(f"{shown_size(self._moved)} of {shown_size(self._size)}")
            parts.append(self._remaining())
        self._stream.write("\r\033[K" + "  ".join(part for part in parts if part))
        self._stream.flush()

    def _remaining(self) -> str:
        elapsed = self._drawn - self._started
        if not 0 < self._moved < self._size or elapsed < 1:
            return ""
        seconds = int(elapsed * (self._size - self._moved) / self._moved)
        return f"{seconds // 60}:{seconds % 60:02d} left"

    def _head(self) -> str:
        counted = [f"{self._tensors} tensors"] if self._tensors else []
        counted += [shown_size(self._size)] if self._size else []
        return f"{self._text} ({', '.join(counted)})" if counted else self._text


def shown_size(size: int) -> str:
    """Bytes as a user reads them."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
