"""Compile grammars in a child process first, where endless work and crashes do no harm.

llguidance limits most of the cost of a grammar, but not all: the intersection of patterns can take forever,
and a chain of thousands of rules overflows the stack. Run as a script, this file is the child.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

from mlx_spec.errors import InvalidValue, SpecError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

# One way to write each value, so that some tokens must follow. Unknown keywords are refused, not ignored.
JSON_FORM: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class CompileSandbox:
    """Compiles grammars in a child process, which starts when it is needed and ends with this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._closing = False
        atexit.register(self.close)

    def compile(self, name: str, request: dict[str, Any], limit_s: float) -> float:
        """Compile the grammar of `request` in the child, or see it refused. Return the CPU seconds it took.

        Raises InvalidValue, with `name` in its message, if it takes more than `limit_s` CPU seconds or
        crashes the child. CPU time, so that a busy machine refuses the same grammars as an idle one.
        """
        with self._lock:
            if self._closing:
                raise SpecError(f"the {name} was not compiled: this process ends")
            process = self._running_process()
            if taken := _answer(process, request | {"limit_s": limit_s}):
                return float(taken)
            late = process.wait() == -signal.SIGPROF
            self._end()
        reason = f"takes more than {limit_s:g} s to compile" if late else "is nested too deeply"
        raise InvalidValue(f"the {name} {reason}: make it simpler")

    def close(self) -> None:
        """End the child and refuse the grammar that it compiles. The next grammar starts a new child."""
        self._closing = True
        while not self._lock.acquire(timeout=0.05):  # seconds between two attempts to end the child
            process = self._process
            if process is not None:
                process.kill()  # the thread that waits for it releases the lock
        try:
            self._end()
            self._closing = False
        finally:
            self._lock.release()

    def _running_process(self) -> subprocess.Popen[str]:
        """Return the child; start one with the import path of this process if there is none."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],  # by its path: `mlx_spec.grammar` would import MLX
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": path},
        )
        if not _answer(self._process, {"limit_s": 0.0}):  # it could not import llguidance
            self._end()
            raise SpecError(f"{sys.executable} does not run {__name__}, which structured output needs")
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        with contextlib.suppress(OSError), process:  # closes its pipes, which may hold a request
            pass


SANDBOX = CompileSandbox()  # the one of this process


def _answer(process: subprocess.Popen[str], request: dict[str, Any]) -> str:
    """Send a request. Return the answer, which is empty if the process ends or has ended."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
    return process.stdout.readline()


def build_parser(kind: str, source: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Return a parser that has read nothing and has computed its first mask, or one in its error state.

    Raises ValueError for a malformed JSON schema.
    """
    from llguidance import LLMatcher, LLParserLimits

    if kind == "regex":
        grammar = LLMatcher.grammar_from_regex(source)
    elif kind == "lark":
        grammar = LLMatcher.grammar_from_lark(source)
    else:
        grammar = LLMatcher.grammar_from_json_schema(source, overrides=JSON_FORM)
    parser = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if not parser.is_error():
        parser.compute_bitmask()
    return parser


def _serve() -> None:
    """Compile the grammars on standard input, one JSON object a line. Answer each with the seconds it took.

    A line without a grammar checks that the child runs. A refused grammar has the same answer: the parent
    compiles it again and gets the refusal itself.
    """
    from llguidance import LLTokenizer

    @functools.lru_cache(maxsize=8)
    def tokenizer(serialized: str, size: int) -> LLTokenizer:
        return LLTokenizer(serialized, n_vocab=size, eos_token=0)

    for line in sys.stdin:
        request = json.loads(line)
        with contextlib.suppress(ValueError):
            if "kind" in request:
                text = tokenizer(*request["tokenizer"])
                signal.setitimer(signal.ITIMER_PROF, request["limit_s"])  # then it ends this process
                build_parser(request["kind"], request["source"], text)
        left, _ = signal.setitimer(signal.ITIMER_PROF, 0)
        print(request["limit_s"] - left, flush=True)


def _limit_memory() -> None:
    """Bound the memory of this process, where the system can: a grammar may ask for all of it."""
    most = 4 * 2**30  # bytes of address space; llguidance and a large vocabulary take 1 GB
    with contextlib.suppress(ValueError, OSError):  # macOS refuses
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    _limit_memory()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # although a program that starts this one ignores it
    threading.stack_size(2**22)  # half the stack of a server thread: the child overflows first
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()
