"""Show the stages of a long run: bars on a terminal, lines anywhere else."""

from __future__ import annotations

import time
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from mlx_spec.checkpoint.files import human_bytes


class StageProgress:
    """Report on `stream`, usually stderr."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._stage, self._said = "", 0.0

    def stage(self, text: str, *, tensors: int = 0, size: int = 0) -> None:
        """Begin a stage of `tensors` and `size` bytes, 0 if they are not counted."""
        self.end()
        if not self._stream.isatty():
            counted = [f"{tensors} tensors"] if tensors else []
            counted += [human_bytes(size)] if size else []
            print(f"{text} ({', '.join(counted)})" if counted else text, file=self._stream, flush=True)
            return
        columns: list[ProgressColumn] = [TextColumn("{task.description}", markup=False), BarColumn()]
        if size:
            columns += [DownloadColumn(), TimeRemainingColumn()]
        elif tensors:
            columns += [MofNCompleteColumn(), TextColumn("tensors")]
        self._begin(text, [*columns, TimeElapsedColumn()], size or tensors or None)

    def advance(self, amount: int = 1) -> None:
        """Count finished bytes, or finished tensors if the stage does not count bytes."""
        if self._bar is not None:
            self._bar.update(self._task, advance=amount)

    def show(self, stage: str, done: int, total: int, figures: str = "") -> None:
        """Show that `done` of `total` steps of a stage are done, and figures about it."""
        if not self._stream.isatty():
            line_seconds = 30.0  # between two lines about a stage of counted steps, without a terminal
            if stage != self._stage or done == total or time.monotonic() - self._said > line_seconds:
                print(f"{stage}: {done} of {total} {figures}".rstrip(), file=self._stream, flush=True)
                self._stage, self._said = stage, time.monotonic()
            return
        if stage != self._stage or self._bar is None:
            self.end()
            words = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[figures]}")
            self._begin(
                stage, [words[0], BarColumn(), words[1], TimeElapsedColumn(), TimeRemainingColumn()], total
            )
        assert self._bar is not None
        self._bar.update(self._task, completed=done, figures=figures)

    def _begin(self, text: str, columns: list[ProgressColumn], total: int | None) -> None:
        self._bar, self._stage = Progress(*columns, console=Console(file=self._stream)), text
        self._bar.start()
        self._task = self._bar.add_task(text, total=total, figures="")

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = None
