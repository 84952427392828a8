"""What does the server add to a round, against the bare engine, with one client?

The same greedy request, to three processes: a server, which streams the answer or sends it whole, and two in
which a session of the library decodes it ("engine" and "engine, again", the null arm). They take turns of
`--burst` seconds: those whose turn it is not are stopped, and their clocks with them. All of them start anew
with each series, because two processes that do the same differ by where their memory lies. End-of-text tokens
are banned, so that all answers are long, and with a fixed draft length all arms do the same rounds.

Compared are seconds a token: of sessions and streams between the first text and the last, as whoever reads
them sees it; of whole answers between the replies to a short and a long request. Ratios are to the
mean of the two engines in a block, the first blocks of a series are dropped. Geometric means of medians,
bootstrap 95 % intervals, questions of a series drawn first.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing.connection import Connection
from signal import SIGCONT, SIGSTOP
from typing import Any, Protocol

from serving import CHAT, Serving, questions, serving
from timing import finish, interval, parser, table

BASE, AGAIN = "engine", "engine, again"
SHORT = 8  # tokens of the short request

Block = dict[str, float]  # seconds a token by arm
Mark = tuple[float, int]  # seconds, and tokens so far


@dataclass(frozen=True)
class Given:
    """Options of a pair."""

    drafter: str | None
    number: int | None  # of draft tokens; None: adaptive

    @property
    def options(self) -> list[str]:
        if self.number is not None:
            return ["--num-draft-tokens", str(self.number)]
        return [] if self.drafter is None else ["--drafter", self.drafter]


@dataclass
class Engine:
    """A session in a process of its own; see `Task`."""

    pid: int
    pipe: Connection
    done: bool = True
    marks: list[Mark] = field(default_factory=list)

    def ask(self, question: str, tokens: int) -> None:
        self.done = False
        self.pipe.send((question, tokens))

    def fileno(self) -> int:
        return self.pipe.fileno()

    def take(self, clock: Clock) -> None:
        self.marks = [(clock.at(when), tokens) for when, tokens in self.pipe.recv()]
        self.done = True


@dataclass
class Request:
    """A request to a server, and what came of the reply; see `Task`."""

    pid: int
    connection: socket.socket
    done: bool = False
    parts: list[tuple[float, bytes]] = field(default_factory=list)  # with the time at which each came

    def fileno(self) -> int:
        return self.connection.fileno()

    def take(self, clock: Clock) -> None:
        data = self.connection.recv(2**20)
        self.parts.append((clock.at(time.perf_counter()), data))
        self.done = not data

    @property
    def seconds(self) -> float:
        """Return the time that the server had until its reply was complete."""
        return self.parts[-1][0]

    @property
    def chunks(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """Yield the chunks of a stream, each with its time."""
        left = b""
        for when, data in self.parts:
            *lines, left = (left + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    yield when, json.loads(line[6:])


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--series", type=int, default=4)
    options.add_argument("--repeats", type=int, default=5, help="blocks a question; the first is dropped")
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--burst", type=float, default=0.1)
    options.add_argument("--drafter", help="none: plain decoding; a number of draft tokens fixes it")
    settings = options.parse_args()
    if settings.quick:
        settings.series, settings.repeats, settings.tokens = 1, 2, 24
    started = time.time()
    text = settings.drafter
    given = Given(None, int(text)) if str(text).isdigit() else Given(text, None)
    asked = questions()[: 1 if settings.quick else 3]
    cells: list[list[Block]] = []
    for _ in range(settings.series):
        with opened(given, settings.tokens, settings.burst) as arena:
            blocks = [[arena.block(q, repeat) for q in asked] for repeat in range(settings.repeats)]
        cells += [list(chain(*cell)) for cell in zip(*blocks[1:], strict=True)]
    results = summary(cells, settings.seed)
    rows = [[name, *results[name]] for name in (AGAIN, "stream", "whole")]
    table(["seconds a token, to the engine", "mean", "low", "high"], rows)
    finish("server_overhead", results, settings, started)


@dataclass(frozen=True)
class Arena:
    """The processes of a series, stopped while it is not their turn."""

    server: Serving
    engines: tuple[Engine, Engine]
    banned: list[int]
    tokens: int
    burst: float

    def block(self, question: str, turn: int) -> list[Block]:
        """Return two blocks: the engines beside a stream, and beside a whole answer."""
        return [self._streamed(question, turn), self._whole(question, turn)]

    def _streamed(self, question: str, turn: int) -> Block:
        asked = self._ask(question, self.tokens, stream=True)
        found = self._beside(asked, question, turn)
        chunks = list(asked.chunks)
        figures = [(when, chunk["mlx_spec"]) for when, chunk in chunks if "mlx_spec" in chunk]
        marks = [(when, f["statistics"]["predicted_n"]) for when, f in figures if "statistics" in f]
        return found | {"stream": pace(marks)}

    def _whole(self, question: str, turn: int) -> Block:
        asked = self._ask(question, self.tokens + SHORT, stream=False)
        found = self._beside(asked, question, turn)
        short = self._ask(question, SHORT, stream=False)
        in_turns([short], self.burst)
        return found | {"whole": (asked.seconds - short.seconds) / self.tokens}

    def _beside(self, asked: Request, question: str, turn: int) -> Block:
        for one in self.engines:
            one.ask(question, self.tokens)
        tasks = [self.engines[0], asked, self.engines[1]]
        in_turns(tasks if turn % 2 else tasks[::-1], self.burst)
        return {BASE: pace(self.engines[0].marks), AGAIN: pace(self.engines[1].marks)}

    def _ask(self, question: str, tokens: int, *, stream: bool) -> Request:
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": tokens, "temperature": 0}
        body |= {"logit_bias": {str(token): -100 for token in self.banned}}
        body |= {"stream": True, "stream_options": {"include_draft": True}} if stream else {}
        raw = json.dumps(body).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
        connection = socket.create_connection((self.server.host, self.server.port))
        connection.sendall(head.encode() + raw)
        return Request(self.server.process.pid, connection)


@contextmanager
def opened(given: Given, tokens: int, burst: float) -> Iterator[Arena]:
    """Start the processes of a series and stop them until their turn."""
    with ExitStack() as stack:
        server = stack.enter_context(serving(*given.options))
        engines = stack.enter_context(engine(given)), stack.enter_context(engine(given))
        banned = [one.pipe.recv() for one in engines]
        pids = [server.process.pid, *(one.pid for one in engines)]
        try:
            for pid in pids:
                stop(pid)
            yield Arena(server, engines, banned[0], tokens, burst)
        finally:
            for pid in pids:
                go_on(pid)


@contextmanager
def engine(given: Given) -> Iterator[Engine]:
    """Start a bare engine in a process of its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=sessions, args=(there, given))
    process.start()
    assert process.pid is not None
    try:
        yield Engine(process.pid, here)
    finally:
        here.send(None)
        process.join()


def sessions(pipe: Connection, given: Given) -> None:
    """Answer questions, each in a session of its own, until there are no more."""
    import mlx_spec
    from mlx_spec.sampling import Sampling

    pair = mlx_spec.load("demo", given.drafter, num_draft_tokens=given.number)
    banned = sorted(pair.text.eos)
    sampling = Sampling(logit_bias=dict.fromkeys(banned, -100.0))
    for _ in pair.session().stream("Hello", sampling=sampling, max_tokens=16):
        pass
    pipe.send(banned)
    while (asked := pipe.recv()) is not None:
        marks: list[Mark] = []
        count = 0
        for piece in pair.session().stream(asked[0], sampling=sampling, max_tokens=asked[1]):
            if piece.round is not None:
                count += len(piece.round.tokens)
                marks.append((time.perf_counter(), count))
        pipe.send(marks)


def pace(marks: list[Mark]) -> float:
    """Return seconds a token between the first text and the last."""
    (first, few), (last, many) = marks[0], marks[-1]
    return (last - first) / (many - few)


def summary(cells: list[list[Block]], seed: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: interval([[_ratio(b, name) for b in cell if name in b] for cell in cells], seed)
        for name in ("stream", "whole")
    }
    blocks = [block for cell in cells for block in cell]
    null = [block[AGAIN] / block[BASE] for block in blocks]
    found[AGAIN] = interval([[block[AGAIN] / block[BASE] for block in cell] for cell in cells], seed)
    found["null, quartiles"] = [round(x, 3) for x in statistics.quantiles(null)]
    found["blocks"] = len(blocks)
    found["ms a token"] = round(1000 * statistics.median(block[BASE] for block in blocks), 2)
    return found


def _ratio(block: Block, name: str) -> float:
    return 2 * block[name] / (block[BASE] + block[AGAIN])


class Task(Protocol):
    """Work of another process."""

    @property
    def pid(self) -> int: ...

    @property
    def done(self) -> bool: ...

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is something to take."""
        ...

    def take(self, clock: Clock) -> None:
        """Read what has arrived."""
        ...


@dataclass
class Clock:
    """The running time of a process by `time.perf_counter()`, which all processes share."""

    begun: float
    stops: list[tuple[float, float]] = field(default_factory=list)  # when it was stopped and went on

    def at(self, moment: float) -> float:
        """Return the seconds since the beginning in which the process was not stopped."""
        lost = sum(min(end, moment) - begin for begin, end in self.stops if begin < moment)
        return moment - self.begun - lost


def stop(pid: int) -> None:
    os.kill(pid, SIGSTOP)


def go_on(pid: int) -> None:
    os.kill(pid, SIGCONT)


def in_turns(tasks: Sequence[Task], seconds: float) -> None:
    """Run tasks of stopped processes to their ends, one at a time; leave the processes stopped."""
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


if __name__ == "__main__":
    main()
