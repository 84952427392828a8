"""Show the stages of a long run: bars on a terminal, lines anywhere else."""

from __future__ import annotations

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

from mlx_spec.hub.files import human_bytes


class StageProgress:
    """Report on `stream`, usually stderr."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: Progress | None = None
        self._task = TaskID(0)

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
        self._bar = Progress(*columns, TimeElapsedColumn(), console=Console(file=self._stream))
        self._bar.start()
        self._task = self._bar.add_task(text, total=size or tensors or None)

    def advance(self, amount: int = 1) -> None:
        """Count finished bytes, or tensors in a stage that counts no bytes."""
        if self._bar is not None:
            self._bar.update(self._task, advance=amount)

    def end(self) -> None:
        """End the present stage."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = None
