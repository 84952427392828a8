"""Does the server stay well under mixed load for half an hour?

Eight clients at once: good requests of all kinds (the greedy ones of a fixed set are compared with the
answers that a quiet server gave to them), streams that are hung up on in the middle, malformed bodies, huge
prompts. Twice the server is killed with SIGKILL and started anew, as a supervisor would. Counted: wrong
answers (another body than before, a status that is none of the expected), lost ones (no answer although the
server was up), statuses, the longest queue against its limit, memory (after warm-up against the end),
threads, and whether it still answers at the end.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from signal import SIGKILL
from typing import Any

from mixture import Mixture
from on_off import check_log, stable
from serving import CHAT, Serving, start
from timing import finish, parser, table

WAITING, RUNNING = 3, 3  # of the server under load: eight clients must meet its limits
FIXED = 40  # requests whose answers are known
WARM_UP = 120.0  # seconds after which a server's memory should be flat, or half of a shorter life
MALFORMED = [
    (b"{", {400}),
    (b"[]", {400}),
    (b'{"messages": "hello"}', {400}),
    (b'{"messages": [], "n": -1}', {400}),
    (b'{"model": "none such", "messages": [{"role": "user", "content": "hi"}]}', {404}),
    (b"\xff\xfe\x00", {400}),
    (b'{"messages": [{"role": "user", "content": "hi"}], "stop": ["", 7]}', {400}),
]


@dataclass
class Tally:
    """What all clients saw. Guarded by its lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    hung_up: int = 0

    def add(self, what: str, status: int, expected: set[int]) -> None:
        with self.lock:
            self.statuses[f"{what} {status}"] += 1
            if status not in expected:
                self.wrong.append(f"{what}: status {status}")


class Load:
    """The clients and the server they talk to."""

    def __init__(self, settings: argparse.Namespace) -> None:
        self.settings, self.tally = settings, Tally()
        self.options = ("--max-waiting", str(WAITING), "--max-running", str(RUNNING))
        self.server = start(*self.options)
        self.up, self.stopping = threading.Event(), threading.Event()
        self.up.set()
        mixture = Mixture(settings.seed, most=16)
        self.fixed = [mixture.next() for _ in range(8 if settings.quick else FIXED)]
        replies = [self.server.send(path, body) for path, body in self.fixed]
        self.answers = [(reply.status, stable(reply)) for reply in replies]

    def client(self, number: int) -> None:
        chance = random.Random(f"{self.settings.seed} {number}")
        mixture = Mixture(chance.randrange(2**30), greedy=False, most=32)
        while not self.stopping.is_set():
            self.up.wait()
            server = self.server
            act = chance.choices([self.known, self.other, self.hang_up, self.malformed, self.huge], ACTS)[0]
            try:
                act(server, chance, mixture)
            except (OSError, http.client.HTTPException) as error:
                if self.up.is_set() and server is self.server and not self.stopping.is_set():
                    with self.tally.lock:
                        self.tally.lost.append(f"{act.__name__}: {type(error).__name__} {error}")

    def known(self, server: Serving, chance: random.Random, mixture: Mixture) -> None:
        """A request whose answer is known."""
        i = chance.randrange(len(self.fixed))
        reply = server.send(*self.fixed[i])
        self.tally.add("known", reply.status, {self.answers[i][0], 429})
        if reply.status == 429:
            time.sleep(min(float(reply.headers["retry-after"]), 2) * chance.random())
        elif without_cache(stable(reply)) != without_cache(self.answers[i][1]):
            with self.tally.lock:
                self.tally.wrong.append(f"known {i}: another answer")

    def other(self, server: Serving, chance: random.Random, mixture: Mixture) -> None:
        """Any request."""
        self.tally.add("other", server.send(*mixture.next()).status, {200, 429})

    def hang_up(self, server: Serving, chance: random.Random, mixture: Mixture) -> None:
        """A request that nobody waits for to the end."""
        path, body = mixture.next()
        connection = server.connect(timeout=60)
        streams = path == CHAT and chance.random() < 0.7
        raw = json.dumps(body | {"max_tokens": 400, "stream": streams}).encode()
        connection.request("POST", path, raw, {"Content-Type": "application/json"})
        time.sleep(chance.random() * 0.5)
        if streams:
            answer = connection.getresponse()
            answer.read(chance.randint(1, 400))
        if connection.sock is not None:
            connection.sock.close()
        connection.close()
        with self.tally.lock:
            self.tally.hung_up += 1

    def malformed(self, server: Serving, chance: random.Random, mixture: Mixture) -> None:
        """What is no request."""
        body, expected = chance.choice(MALFORMED)
        self.tally.add("malformed", server.send(CHAT, body).status, expected)

    def huge(self, server: Serving, chance: random.Random, mixture: Mixture) -> None:
        """A prompt longer than the context, or a body longer than the limit."""
        words = chance.choice([20_000, 3_000_000])
        body = {"messages": [{"role": "user", "content": "word " * words}], "max_tokens": 4}
        try:
            status = server.send(CHAT, body).status
        except (BrokenPipeError, ConnectionResetError):  # refused before all of it was sent
            status = 413
        self.tally.add("huge", status, {400, 429} if words == 20_000 else {413})


ACTS = (50, 25, 12, 8, 5)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--minutes", type=float, default=30)
    options.add_argument("--clients", type=int, default=8)
    settings = options.parse_args()
    seconds = 20.0 if settings.quick else 60 * settings.minutes
    started = time.time()
    load = Load(settings)
    clients = [threading.Thread(target=load.client, args=(i,)) for i in range(settings.clients)]
    for client in clients:
        client.start()
    lives: list[dict[str, Any]] = []
    parts = 1 if settings.quick else 3
    shares = [1.0] if settings.quick else [0.2, 0.2, 0.6]  # the last server lives longest
    for part in range(parts):
        lives.append(watch(load, shares[part] * seconds))
        if part < parts - 1:
            load.up.clear()
            load.server.stop(SIGKILL)
            load.server = start(*load.options)
            load.up.set()
    load.stopping.set()
    for client in clients:
        client.join()
    results = report(load, lives)
    load.server.stop()
    finish("soak", results, settings, started)


def watch(load: Load, seconds: float) -> dict[str, Any]:
    """The life of one server: memory and queue, sampled."""
    memory: list[tuple[float, int]] = []
    queues: list[int] = []
    begun, threads = time.monotonic(), load.server.threads
    while (age := time.monotonic() - begun) < seconds:
        memory.append((age, load.server.resident))
        health = load.server.send("/health", timeout=60).json
        queues.append(int(health["waiting"]) + int(health["running"]))
        time.sleep(min(2.0, seconds / 20))
    begin = min(WARM_UP, seconds / 2)
    part = (seconds - begin) / 4
    warm = [m for age, m in memory if begin <= age < begin + part]
    late = [m for age, m in memory if age >= seconds - part]
    return {
        "minutes": round(seconds / 60, 2),
        "MB after warm-up": round(statistics.median(warm) / 1e6, 1),
        "MB at the end": round(statistics.median(late) / 1e6, 1),
        "growth": round(statistics.median(late) / statistics.median(warm) - 1, 4),
        "most admitted": max(queues),
        "threads at first and last": [threads, load.server.threads],
        "errors logged": check_log(load.server),
    }


def report(load: Load, lives: list[dict[str, Any]]) -> dict[str, Any]:
    tally, last = load.tally, load.server
    end = last.send(*load.fixed[0])
    alive = (end.status, without_cache(stable(end))) == (200, without_cache(load.answers[0][1]))
    table(["request and status", "times"], sorted(tally.statuses.items()))
    table(list(lives[0]), [list(life.values()) for life in lives])
    print(f"hung up on: {tally.hung_up}; wrong: {len(tally.wrong)}; lost: {len(tally.lost)}; alive: {alive}")
    for problem in [*tally.wrong[:5], *tally.lost[:5]]:
        print("  ", problem)
    return {
        "statuses": dict(tally.statuses),
        "hung up": tally.hung_up,
        "wrong": len(tally.wrong),
        "lost": len(tally.lost),
        "servers": lives,
        "limit of those admitted": WAITING + RUNNING,
        "answers at the end": alive,
    }


def without_cache(value: Any) -> Any:
    """A body without what was found in a cache: that depends on who asked before."""
    if isinstance(value, dict):
        return {key: without_cache(v) for key, v in value.items() if key != "prompt_tokens_details"}
    return [without_cache(v) for v in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
