"""The chat program as a process, in pipes or on a terminal of its own."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from pathlib import Path

from support.forked import start_python
from support.waiting import LIMIT

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "e2b"
UNWANTED = ("NO_COLOR", "INPUTRC", "COLUMNS", "LINES")  # pytest-xdist sets COLUMNS
TINY = [f"--target={GOLDEN / 'target'}", "--drafter=lookup"]
PAIR = ["--target=demo"]
COMMAND = [sys.executable, "-m", "mlx_spec.chat"]
STATUS = (
    r"(as fast as plain · |(at least )?\d\.\d+( to \d\.\d)? × (faster|plain speed) · )?\d+ tokens/s · "
    r"(\d+ of \d+ tokens drafted([:,] [^·]*\b)?|drafts: [^·]*\b)"
)
READY = "¶"  # in the text of a screen: the editor waits for a message
EDITING = "\x1b[?2004h"  # it asks for pasted text to be marked
CODES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07)|\x1b(\[[0-9;?]*|\][^\x07]*)?$|[\r\b]")


def at_home(folder: Path) -> dict[str, str]:
    """An environment in which everything that is kept is kept in `folder`."""
    places = ("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME")
    return {"HOME": str(folder), **{name: str(folder / name.lower()) for name in places}}


class Screen:
    """The program on a terminal. `text` is what came without escape codes, READY for each prompt."""

    def __init__(self, *arguments: str, home: Path, stdin: int | None = None, **environment: str) -> None:
        self.raw = ""
        self._seen = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end in a character
        self._end, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 400, 0, 0))
        clean = {name: value for name, value in os.environ.items() if name not in UNWANTED}
        places = at_home(home)
        del places["XDG_CACHE_HOME"]  # that of all tests holds what passes cost here
        self.process = start_python()(
            [*COMMAND, *arguments],
            stdin=terminal if stdin is None else stdin,
            stdout=terminal,
            stderr=terminal,
            env=clean | {"TERM": "xterm"} | places | environment,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(terminal)

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:  # closes its stdin, waits
            self.process.kill()
        os.close(self._end)

    @property
    def text(self) -> str:
        return CODES.sub("", self.raw.replace(EDITING, READY))

    @property
    def echoes(self) -> bool:
        """Return True if the terminal echoes what is typed."""
        local = termios.tcgetattr(self._end)[3]
        assert isinstance(local, int)
        return bool(local & termios.ECHO)

    @echoes.setter
    def echoes(self, on: bool) -> None:
        modes = termios.tcgetattr(self._end)
        modes[3] = modes[3] | termios.ECHO if on else modes[3] & ~termios.ECHO
        termios.tcsetattr(self._end, termios.TCSANOW, modes)

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def say(self, line: str) -> str:
        """Enter a line; what came until the next prompt."""
        start = len(self.text)
        self.type(line + "\r")
        self.wait_for(READY)
        return self.text[start:]

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first match in what came after the last one."""
        found = None
        deadline = time.monotonic() + LIMIT
        while not (found := re.compile(pattern).search(self.text, self._seen)):
            assert self._read(deadline), f"{pattern!r} never came after {self.text[self._seen :]!r}"
        self._seen = found.end()
        return found

    def press_ctrl_c(self, pattern: str, again_s: float = 10) -> None:
        """Press Ctrl-C until the pattern comes.

        Python handles a signal after the read that began just then, and a pipe may block a read for good.
        """
        self.type("\x03")
        deadline = time.monotonic() + again_s
        while not re.compile(pattern).search(self.text, self._seen):
            if not self._read(deadline):
                self.type("\x03")
                break
        self.wait_for(pattern)

    def leave(self) -> int:
        """The exit status of a program that ends by itself."""
        deadline = time.monotonic() + LIMIT
        while self._read(deadline):
            pass
        return self.process.wait(LIMIT)

    def _read(self, deadline: float) -> bool:
        if not select.select([self._end], [], [], max(deadline - time.monotonic(), 0))[0]:
            return False
        try:
            new = os.read(self._end, 65536)
        except OSError:  # Linux, where the other end was closed
            return False
        self.raw += self._decoder.decode(new)
        return bool(new)


def _take_terminal() -> None:
    os.close(os.open(os.ttyname(1), os.O_RDWR))  # the first terminal that a session leader opens controls it
