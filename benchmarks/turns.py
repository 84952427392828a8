"""Processes that take turns of a fraction of a second, so that whatever the machine does meets them alike."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from signal import SIGCONT, SIGSTOP
from typing import Protocol


class Task(Protocol):
    """Something that a process of its own does."""

    @property
    def pid(self) -> int: ...

    @property
    def done(self) -> bool: ...

    def fileno(self) -> int:
        """What becomes readable when there is something to take."""
        ...

    def take(self, clock: Clock) -> None:
        """Take what has come."""
        ...


@dataclass
class Clock:
    """The time that a process had, of `time.perf_counter()`, which is the same in all processes."""

    begun: float
    stops: list[tuple[float, float]] = field(default_factory=list)  # when it was stopped and went on

    def at(self, moment: float) -> float:
        """Seconds since the beginning, less those in which the process was stopped."""
        lost = sum(min(end, moment) - begin for begin, end in self.stops if begin < moment)
        return moment - self.begun - lost


def stop(pid: int) -> None:
    os.kill(pid, SIGSTOP)


def go_on(pid: int) -> None:
    os.kill(pid, SIGCONT)


def in_turns(tasks: Sequence[Task], seconds: float) -> None:
    """Run tasks of stopped processes to their ends, one at a time, and leave the processes stopped."""
    started = time.perf_counter()
    clocks = {id(task): Clock(started) for task in tasks}
    stopped = dict.fromkeys(clocks, started)
    while any(not task.done for task in tasks):
        for task in (task for task in tasks if not task.done):
            clock, begun = clocks[id(task)], time.perf_counter()
            clock.stops.append((stopped[id(task)], begun))
            go_on(task.pid)
            while not task.done and (left := begun + seconds - time.perf_counter()) > 0:
                if select.select([task], [], [], left)[0]:
                    task.take(clock)
            stop(task.pid)
            stopped[id(task)] = time.perf_counter()
