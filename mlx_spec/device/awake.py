"""Put off the sleep of a Mac while an answer runs, or while other Macs wait for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from types import TracebackType


class Awake:
    """Keeps a Mac from falling asleep between `hold` and `release`; elsewhere it does nothing.

    A Mac whose lid is closed sleeps anyway, and goes on with the answer when it wakes. One thread uses it.
    """

    def __init__(self) -> None:
        self._program = shutil.which("caffeinate") if sys.platform == "darwin" else None
        self._process: subprocess.Popen[bytes] | None = None

    def hold(self) -> None:
        """Put off sleep. It costs nothing while sleep is put off already."""
        if self._program is None or self._process is not None:
            return
        quiet = subprocess.DEVNULL
        command = [self._program, "-i", "-w", str(os.getpid())]  # -w: it ends when this process does
        with suppress(OSError):
            # Without closing files Python takes posix_spawn, which does not copy the map of a large memory.
            self._process = subprocess.Popen(
                command, stdin=quiet, stdout=quiet, stderr=quiet, close_fds=False
            )

    def release(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def __enter__(self) -> None:
        self.hold()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
