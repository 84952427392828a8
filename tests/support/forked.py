"""Start Python programs as forks of a process that has imported mlx_spec: an import takes a second of CPU.

This file, run as a program, is that process. A fork has its own command line, environment and files. It runs
and ends as any Python program does.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

PROGRAMS = ("mlx_spec.load", "mlx_spec.apps.chat.repl", "mlx_spec.apps.server.app")
MEASURING_S = 0.1  # a tenth of what programs take for users: the passes of tiny models are short
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of Linux


class Forked(subprocess.Popen[str]):
    """A `Popen` of a Python program. The command begins with `sys.executable`.

    Instead of a `preexec_fn`, the leader of a new session takes the terminal of its stdout.
    """

    def _execute_child(self, command: Sequence[str], *rest: Any) -> None:
        # The arguments of this private method, by place, are those of Python 3.11 to 3.13.
        environment, *pipes = rest[5], *rest[9:15]
        streams = (pipes[0], pipes[3], pipes[5])
        asked = {
            "command": command[1:],
            "environment": dict(os.environ if environment is None else environment),
            "folder": os.fspath(rest[4] or os.getcwd()),
            "new_session": rest[20],
        }
        adopts = ctypes.CDLL(None).prctl
        adopts(SUBREAPER, 1, 0, 0, 0)  # the copy becomes a child of this process once its parent has ended
        try:
            files = [i if stream == -1 else stream for i, stream in enumerate(streams)]
            channel, _ = _original()
            socket.send_fds(channel, [json.dumps(asked).encode()], files)
            self.pid = int(channel.recv(32))
        finally:
            adopts(SUBREAPER, 0, 0, 0, 0)
        self._child_created = True
        self._close_pipe_fds(*pipes)


def start_python() -> type[subprocess.Popen[str]]:
    """Return the class that starts a Python program. A fork cannot use a GPU that its parent has opened."""
    import mlx.core as mx

    return Forked if sys.platform == "linux" and not mx.cuda.is_available() else subprocess.Popen


def start_servers_as_forks(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let `module` start servers as forks where it can. Return the ports they are told, a list that grows."""
    ports, start = list[int](), start_python()

    def start_fork(words: list[str], **rest: Any) -> subprocess.Popen[str]:
        ports.append(int(words[-1]))
        return start([words[0], *words[2:]], **rest)  # without -P, an option of Python

    monkeypatch.setattr(module, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": start_fork}))
    return ports


def measure_shortly() -> None:
    """Let this process take less time to measure what passes cost: tests load pairs again and again."""
    from mlx_spec.pair import Pair

    Pair.measuring_s = MEASURING_S


@cache
def _original() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start the process that is copied, which ends with this one. Return how to ask it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        number = theirs.fileno()
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # a copy would lack the threads of NumPy's
        command = [sys.executable, __file__, str(number)]
        return ours, subprocess.Popen(command, pass_fds=[number], env=environment)


def _serve(channel: socket.socket) -> None:
    """Start a copy for each message. Returns in the copy, with its program to run."""
    while True:
        message, files, _, _ = socket.recv_fds(channel, 1 << 20, 3)
        if not message:
            sys.exit()
        reading, writing = os.pipe()
        if parent := os.fork():
            os.waitpid(parent, 0)
            channel.send(os.read(reading, 32))  # once its parent has ended
            for file in (*files, reading, writing):
                os.close(file)
        elif pid := os.fork():
            os.write(writing, b"%d" % pid)
            os._exit(0)
        else:
            os.close(reading)
            os.close(writing)
            channel.close()
            _become(json.loads(message), files)
            return


def _become(asked: dict[str, Any], files: Sequence[int]) -> None:
    """Take the place of a new process of Python."""
    for i, file in enumerate(files):
        os.dup2(file, i)
        os.close(file)
    if asked["new_session"]:
        os.setsid()
        if os.isatty(1):
            os.close(os.open(os.ttyname(1), os.O_RDWR))  # the first one that a leader opens controls it
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    for i, name in enumerate(("stdin", "stdout", "stderr")):
        errors = "backslashreplace" if i == 2 else "strict"
        buffering = 1 if i == 2 or os.isatty(i) else -1
        mode = "w" if i else "r"
        stream = os.fdopen(i, mode, buffering, encoding="utf-8", errors=errors, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = asked["command"]


def _run(first: str, *words: str) -> None:
    if first == "-c":
        sys.argv = ["-c", *words[1:]]
        exec(words[0], {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = list(words)
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    sys.path[0] = ""  # as with -m
    for name in PROGRAMS:
        import_module(name)
    measure_shortly()
    gc.collect()
    gc.freeze()  # copies share its pages until they write: no collection marks them
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        _serve(channel)
    _run(*sys.argv)
