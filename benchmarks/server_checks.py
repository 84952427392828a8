"""Does the server stay right with speculation on, under load, and for unlikely requests?

    python benchmarks/server_checks.py on_off         # are answers the same with speculation on and off?
    python benchmarks/server_checks.py soak           # does it survive half an hour of mixed load?
    python benchmarks/server_checks.py conformance    # does it keep to OpenAI's interface?

on_off: two servers on the same pair, one with a fixed draft length and one with `--drafter none`, get the
same random requests. They are greedy; with `--seeded`, half of them are sampled with a seed. Bodies must be
equal except for ids, times and `timings`. The chunks of a stream are joined first, because they follow
rounds.

soak: eight clients send valid requests of all kinds, hang up in the middle of streams, and send malformed
bodies and huge prompts. The answers to a fixed set of greedy requests are compared to the answers of a quiet
server. Twice the server is killed and started again. Counted are wrong answers (another text, or an
unexpected status), lost answers (the server was up and did not answer), the longest queue, memory and
threads.

conformance: schemathesis draws valid and invalid requests from an OpenAPI document of three paths, with the
types of openai-python and the documented error body. With `--pictures` it draws messages with pictures, for
the routes of all protocols that take them. Checked are statuses (documented, below 500), content types, and
bodies by schema.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL
from typing import Any

from openapi import picture_document, text_document
from serving import Serving, serving, start
from timing import finish, parser, table

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from support.random_requests import CHAT, RandomRequests, Reply, comparable, without_cache

MAX_WAITING, MAX_RUNNING = 3, 3  # of the server under load: eight clients must meet its limits
KNOWN_REQUESTS = 40  # requests whose answers are known
WARM_UP_S = 120.0  # after which a server's memory should be flat, or half of a shorter life
ACTS = {"known": 50, "other": 25, "hang_up": 12, "malformed": 8, "huge": 5}  # action of a client -> weight
MALFORMED = [
    (b"{", {400}),
    (b"[]", {400}),
    (b'{"messages": "hello"}', {400}),
    (b'{"messages": [], "n": -1}', {400}),
    (b'{"model": "none such", "messages": [{"role": "user", "content": "hi"}]}', {404}),
    (b"\xff\xfe\x00", {400}),
    (b'{"messages": [{"role": "user", "content": "hi"}], "stop": ["", 7]}', {400}),
]
CHECKS = "not_a_server_error,content_type_conformance,response_schema_conformance,status_code_conformance"
ERROR_WORDS = ("Traceback", "ERROR", "failed", "Error at ", "did not end well")  # in lines of a server's log


def main() -> None:
    options = parser(__doc__)
    options.add_argument("check", choices=["on_off", "soak", "conformance"])
    options.add_argument("--target", default="demo", help="on_off: demo, or a folder")
    options.add_argument("--requests", type=int, default=240, help="on_off: number of requests")
    options.add_argument("--num-draft-tokens", default="4", metavar="K", help="on_off: draft length")
    options.add_argument("--seeded", action="store_true", help="on_off: sample half of them with a seed")
    options.add_argument("--minutes", type=float, default=30, help="soak: how long")
    options.add_argument("--clients", type=int, default=8, help="soak: clients at once")
    options.add_argument("--examples", type=int, default=400, help="conformance: requests for each path")
    options.add_argument("--pictures", action="store_true", help="conformance: messages with pictures")
    settings = options.parse_args()
    started = time.time()
    if settings.check == "on_off":
        results = on_off(settings)
    elif settings.check == "soak":
        results = soak(settings)
    else:
        results = conformance(settings)
    finish(settings.check, results, settings, started)


def on_off(settings: argparse.Namespace) -> dict[str, Any]:
    """Send the same requests to a server with speculation and to one without; compare the answers."""
    count = 24 if settings.quick else settings.requests
    requests = RandomRequests(settings.seed, greedy=not settings.seeded)
    target = ["--target", settings.target]
    statuses: Counter[int] = Counter()
    different: list[dict[str, Any]] = []
    drafted = 0
    fixed = ["--num-draft-tokens", settings.num_draft_tokens]
    with serving(*target, *fixed) as on, serving(*target, "--drafter", "none") as off:
        for _ in range(count):
            path, body = requests.next()
            a, b = on.send(path, body), off.send(path, body)
            statuses[a.status] += 1
            drafted += draft_tokens(a)
            if (a.status, comparable(a)) != (b.status, comparable(b)):
                different.append({"path": path, "request": body, "on": comparable(a), "off": comparable(b)})
        errors = logged_errors(on) + logged_errors(off)
    head = ["requests", "statuses", "draft tokens", "different"]
    table(head, [[count, dict(statuses), drafted, len(different)]])
    for found in different[:3]:
        print(json.dumps(found, indent=1)[:3000])
    results = dict(zip(head, [count, dict(statuses), drafted, len(different)], strict=True))
    return results | {"errors logged": errors}


def draft_tokens(reply: Reply) -> int:
    """Return the draft tokens that a reply reports."""
    bodies = reply.chunks if reply.is_stream else [reply.json]
    return sum((body.get("timings") or {}).get("draft_n", 0) for body in bodies)


def logged_errors(server: Serving) -> int:
    """Return the number of errors in a server's log, and print them."""
    found = [line for line in server.log if any(word in line for word in ERROR_WORDS)]
    for line in found:
        print("logged:", line.strip())
    return len(found)


@dataclass
class Tally:
    """Counts of all clients, guarded by a lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    hung_up: int = 0

    def add(self, act: str, status: int, expected: set[int]) -> None:
        with self.lock:
            self.statuses[f"{act} {status}"] += 1
            if status not in expected:
                self.wrong.append(f"{act}: status {status}")


class Load:
    """The clients and the server they talk to."""

    def __init__(self, settings: argparse.Namespace) -> None:
        self.settings, self.tally = settings, Tally()
        self.options = ("--max-waiting", str(MAX_WAITING), "--parallel", str(MAX_RUNNING))
        self.server = start(*self.options)
        self.up, self.stopping = threading.Event(), threading.Event()
        self.up.set()
        requests = RandomRequests(settings.seed, max_tokens=16)
        self.known_requests = [requests.next() for _ in range(8 if settings.quick else KNOWN_REQUESTS)]
        replies = [self.server.send(path, body) for path, body in self.known_requests]
        self.answers = [(reply.status, comparable(reply)) for reply in replies]

    def client(self, number: int) -> None:
        """Send requests until the load stops."""
        chance = random.Random(f"{self.settings.seed} {number}")
        requests = RandomRequests(chance.randrange(2**30), greedy=False, max_tokens=32)
        while not self.stopping.is_set():
            self.up.wait()
            server = self.server
            (act,) = chance.choices(list(ACTS), list(ACTS.values()))
            try:
                getattr(self, act)(server, chance, requests)
            except (OSError, http.client.HTTPException) as error:
                if self.up.is_set() and server is self.server and not self.stopping.is_set():
                    with self.tally.lock:
                        self.tally.lost.append(f"{act}: {type(error).__name__} {error}")

    def known(self, server: Serving, chance: random.Random, requests: RandomRequests) -> None:
        """Send a request whose answer is known."""
        i = chance.randrange(len(self.known_requests))
        reply = server.send(*self.known_requests[i])
        self.tally.add("known", reply.status, {self.answers[i][0], 429})
        if reply.status == 429:
            time.sleep(min(float(reply.headers["retry-after"]), 2) * chance.random())
        elif without_cache(comparable(reply)) != without_cache(self.answers[i][1]):
            with self.tally.lock:
                self.tally.wrong.append(f"known {i}: another answer")

    def other(self, server: Serving, chance: random.Random, requests: RandomRequests) -> None:
        """Send any request."""
        self.tally.add("other", server.send(*requests.next()).status, {200, 429})

    def hang_up(self, server: Serving, chance: random.Random, requests: RandomRequests) -> None:
        """Close the connection before the answer is complete."""
        path, body = requests.next()
        connection = server.connect(timeout=60)
        streams = path == CHAT and chance.random() < 0.7
        raw = json.dumps(body | {"max_tokens": 400, "stream": streams}).encode()
        connection.request("POST", path, raw, {"Content-Type": "application/json"})
        time.sleep(chance.random() * 0.5)
        if streams:
            connection.getresponse().read(chance.randint(1, 400))
        if connection.sock is not None:
            connection.sock.close()
        connection.close()
        with self.tally.lock:
            self.tally.hung_up += 1

    def malformed(self, server: Serving, chance: random.Random, requests: RandomRequests) -> None:
        """Send a body that is not a valid request."""
        body, expected = chance.choice(MALFORMED)
        self.tally.add("malformed", server.send(CHAT, body).status, expected)

    def huge(self, server: Serving, chance: random.Random, requests: RandomRequests) -> None:
        """Send a prompt longer than the context, or a body longer than the limit."""
        words = chance.choice([20_000, 3_000_000])
        body = {"messages": [{"role": "user", "content": "word " * words}], "max_tokens": 4}
        try:
            status = server.send(CHAT, body).status
        except (BrokenPipeError, ConnectionResetError):  # refused before all of it was sent
            if words == 20_000:  # it is not: the server was killed meanwhile
                raise
            status = 413
        self.tally.add("huge", status, {400, 429} if words == 20_000 else {413})


def soak(settings: argparse.Namespace) -> dict[str, Any]:
    """Put a server under load and kill it twice; report what the clients saw."""
    seconds = 20.0 if settings.quick else 60 * settings.minutes
    load = Load(settings)
    clients = [threading.Thread(target=load.client, args=(i,)) for i in range(settings.clients)]
    for client in clients:
        client.start()
    shares = [1.0] if settings.quick else [0.2, 0.2, 0.6]  # the last server lives longest
    lives = [watch(load, shares[0] * seconds)]
    for share in shares[1:]:
        load.up.clear()
        load.server.stop(SIGKILL)
        load.server = start(*load.options)
        load.up.set()
        lives.append(watch(load, share * seconds))
    load.stopping.set()
    for client in clients:
        client.join()
    results = report_soak(load, lives)
    load.server.stop()
    return results


def watch(load: Load, seconds: float) -> dict[str, Any]:
    """Sample memory and queue of the server for the given time."""
    memory: list[tuple[float, int]] = []
    queues: list[int] = []
    begun, threads = time.monotonic(), load.server.threads
    while (age := time.monotonic() - begun) < seconds:
        memory.append((age, load.server.resident_bytes))
        health = load.server.send("/health", timeout=60).json
        queues.append(int(health["waiting"]) + int(health["running"]))
        time.sleep(min(2.0, seconds / 20))
    begin = min(WARM_UP_S, seconds / 2)
    part = (seconds - begin) / 4
    warm = statistics.median(m for age, m in memory if begin <= age < begin + part)
    late = statistics.median(m for age, m in memory if age >= seconds - part)
    return {
        "minutes": round(seconds / 60, 2),
        "MB after warm-up": round(warm / 1e6, 1),
        "MB at the end": round(late / 1e6, 1),
        "growth": round(late / warm - 1, 4),
        "most admitted": max(queues),
        "threads at first and last": [threads, load.server.threads],
        "errors logged": logged_errors(load.server),
    }


def report_soak(load: Load, lives: list[dict[str, Any]]) -> dict[str, Any]:
    tally = load.tally
    end = load.server.send(*load.known_requests[0])
    same = without_cache(comparable(end)) == without_cache(load.answers[0][1])
    alive = end.status == load.answers[0][0] and same
    table(["request and status", "times"], sorted(tally.statuses.items()))
    table(list(lives[0]), [list(life.values()) for life in lives])
    print(f"hung up: {tally.hung_up}; wrong: {len(tally.wrong)}; lost: {len(tally.lost)}; alive: {alive}")
    for problem in [*tally.wrong[:5], *tally.lost[:5]]:
        print("  ", problem)
    return {
        "statuses": dict(tally.statuses),
        "hung up": tally.hung_up,
        "wrong": len(tally.wrong),
        "lost": len(tally.lost),
        "servers": lives,
        "limit of those admitted": MAX_WAITING + MAX_RUNNING,
        "answers at the end": alive,
    }


def conformance(settings: argparse.Namespace) -> dict[str, Any]:
    """Run schemathesis against a server."""
    document, models = text_document, list[str]()
    if settings.pictures:
        eyes = Path(__file__).resolve().parents[1] / "tests" / "golden" / "vision" / "e2b"
        document, models = picture_document, ["--model", f"eyes={eyes}", "--pin", "eyes", "--pin", "demo"]
    with tempfile.TemporaryDirectory() as folder, serving(*models) as server:
        file = Path(folder) / "openapi.json"
        file.write_text(json.dumps(document()))
        command = [str(Path(sys.executable).with_name("schemathesis")), "run", str(file), "--url", server.url]
        command += ["--phases", "coverage,fuzzing", "--mode", "all", "--checks", CHECKS]
        command += ["--max-examples", "20" if settings.quick else str(settings.examples)]
        command += ["--seed", str(settings.seed), "--generation-database", "none", "--no-color"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        alive = server.send("/health").json["status"] == "ok"
        errors = logged_errors(server)
    cases = re.search(r"(\d+) generated", done.stdout)
    found = re.search(r"(\d+) unique failures", done.stdout)
    failures = int(found[1]) if found else 0 if done.returncode == 0 else -1
    print(done.stdout[-4000:] if done.returncode else "")
    results = {
        "cases": int(cases[1]) if cases else 0,
        "failures": failures,
        "errors logged": errors,
        "alive": alive,
    }
    table(list(results), [list(results.values())])
    return results


if __name__ == "__main__":
    main()
