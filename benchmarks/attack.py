"""Does a server under attack answer its good clients as before, without pauses and in the same memory?

Twenty clients ask greedy questions and read the streams. Beside them attackers send what advisories of this
kind of software describe, at random: `KINDS`. A second model has a template without end. Every good answer is
compared with the text alone. A pause is a time in which no good client gets anything. The time in which a
thread of the server was ready and had no CPU is the machine's, and subtracted. Needs Linux.

    python benchmarks/attack.py --seconds 600
"""

from __future__ import annotations

import http.client
import itertools
import json
import multiprocessing
import random
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from serving import Serving, serving
from support.fuzz import Valid, damaged
from support.random_requests import questions

CHAT = "/v1/chat/completions"
TOKENS = 24  # of a good answer
CLIENTS, ATTACKERS = 20, 6
ROUTES = (CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate", "/infill")
ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ messages[0].content }}"
)

Attack = Callable[[random.Random, int], "int | str"]


def chat(content: Any, **fields: Any) -> bytes:
    """Return the body of a chat."""
    messages = [{"role": "user", "content": content}]
    return json.dumps({"messages": messages, "max_tokens": 4, "temperature": 0, **fields}).encode()


# --- attacks: each returns a status, or a word


def post(port: int, path: str, body: bytes, timeout: float = 60, **headers: str) -> int:
    """Send a body and read the answer. Return its status."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        sent = {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        connection.request("POST", path, body, sent)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def raw(
    port: int, *parts: bytes, pause_s: float = 0.0, reads: bool = True, half_closes: bool = False
) -> str | int:
    """Send bytes with pauses. Return the status that comes back, if any."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(pause_s)
        if half_closes:
            connection.shutdown(socket.SHUT_WR)
        if not reads:
            return "hung up"
        got = connection.recv(4096)
        while got.startswith(b"HTTP/1.1 1"):  # 100 Continue
            got = got.partition(b"\r\n\r\n")[2] or connection.recv(4096)
    return int(got.split()[1]) if got.startswith(b"HTTP/1.1 ") else "closed"


def head(body: bytes, path: str = CHAT, more: str = "") -> bytes:
    """Return the head of a request."""
    length = f"Content-Length: {len(body)}\r\nContent-Type: application/json\r\n"
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{length}{more}\r\n".encode()


def _hang_up(chance: random.Random, port: int) -> str | int:
    body = chat("Write a long text", max_tokens=4000, n=chance.choice((1, 4)), stream=chance.random() < 0.5)
    return raw(port, head(body) + body, pause_s=chance.uniform(0, 1), reads=False)


def _idle(chance: random.Random, port: int) -> str:
    opened = []
    with suppress(OSError):
        opened += [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(100)]
    time.sleep(3)
    for connection in opened:
        connection.close()
    return "closed"


def _fuzzed(chance: random.Random, port: int) -> int:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    content = [{"type": "text", "text": "Hi"}]
    body = json.loads(chat(content, tools=[tool], stop=["a"], prompt="Hi", input="Hi", max_output_tokens=3))
    data = damaged(chance, Valid(json.dumps(body).encode(), "json"), ())
    return post(port, chance.choice(ROUTES), data)


def _unread(chance: random.Random, port: int) -> str | int:
    """A stream that is asked for and not read for seconds."""
    body = chat("Count to a thousand", max_tokens=60, stream=True)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(head(body) + body)
        time.sleep(3)
        return int(connection.recv(64).split()[1])


def _grammar(chance: random.Random, port: int) -> int:
    patterns = ("(a|aa)+$", "(.{0,999}){0,999}", "((a{0,99}){0,99}){0,99}", "[^x]" * 3000)
    nested: dict[str, Any] = {}
    for _ in range(200):
        nested = (
            {"anyOf": [nested, {"type": "array", "items": nested}]}
            if chance.random() < 0.1
            else {"not": nested}
        )
    schemas = [{"type": "string", "pattern": pattern} for pattern in patterns] + [nested]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": chance.choice(schemas)}}
    return post(port, CHAT, chat("Hi", response_format=form))


def _odd_path(chance: random.Random, port: int) -> str | int:
    paths = (
        "/v1/responses/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//evil/",
        "/v1/models/%00",
        "/" + "a" * 9000,
    )
    return raw(port, f"GET {chance.choice(paths)} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())


def _foreign(chance: random.Random, port: int) -> int:
    headers = chance.choice(
        ({"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Origin": "null"})
    )
    return post(port, CHAT, chat("Hi"), **headers)


def _half_closed(chance: random.Random, port: int) -> str | int:
    body = chat("hi", max_tokens=2)
    status = raw(port, head(body) + body, half_closes=True)
    assert status in (200, 429, 503), f"a half-closed client got {status}"
    return status


def _slow(chance: random.Random, port: int) -> str | int:
    body = chat("Hi")
    return raw(port, head(body), *(body[i : i + 1] for i in range(8)), pause_s=0.5, reads=False)


def _garbage(chance: random.Random, port: int) -> str | int:
    return raw(port, chance.randbytes(chance.choice((1, 100, 70_000))) + b"\r\n\r\n")


def _pipelined(chance: random.Random, port: int) -> str | int:
    return raw(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)


def _ollama(chance: random.Random, port: int) -> int:
    path = chance.choice(("/api/pull", "/api/create", "/api/push", "/api/show"))
    return post(port, path, json.dumps({"model": "evil.example/a/b", "name": "../../x"}).encode())


def _bodies() -> dict[str, bytes]:
    """Return large bodies, which are made once."""
    url = {"type": "image_url", "image_url": {"url": "data:," * 3000 + "data:image/png;base64,AAAA"}}
    scans = b"\xff\xd8\xff" + b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00" * 5000
    import base64

    jpeg = {
        "type": "image_url",
        "image_url": {"url": "data:image/jpeg;base64," + base64.b64encode(scans).decode()},
    }
    quote = b'{"messages":[{"role":"user","content":"'
    return {
        "spaces": chat("x" + " " * 10_200_000 + "x"),
        "backslashes": quote + b"\\\\" * (15 << 20) + b'"}]}',
        "surrogates": quote + b"\\ud83d" * (1 << 20) + b'"}]}',
        "template without end": chat("hi", model="bad"),
        "nested data URLs": chat([url]),
        "scans of a JPEG": chat([jpeg]),
        "nested JSON": b'{"messages":' + b"[" * 200_000,
        "commas": b'{"messages":[' + b"1," * (6 << 20) + b"1]}",
        "many stop strings": chat("Hi", stop=[str(i) for i in range(50_000)]),
    }


KINDS: dict[str, Attack] = {
    "hang-ups": _hang_up,
    "idle connections": _idle,
    "damaged bodies": _fuzzed,
    "unread streams": _unread,
    "grammars": _grammar,
    "odd paths": _odd_path,
    "foreign hosts and origins": _foreign,
    "half-closed clients": _half_closed,
    "slow bodies": _slow,
    "garbage": _garbage,
    "pipelined requests": _pipelined,
    "models of others": _ollama,
}


# --- processes


def attack(port: int, seconds: float, seed: int, found: Any) -> None:
    """Attack until the time is over. Put the number of each outcome of each kind into a queue."""
    bodies, end = _bodies(), time.monotonic() + seconds
    kinds: dict[str, Attack] = {
        **KINDS,
        **{name: lambda chance, port, body=body: post(port, CHAT, body) for name, body in bodies.items()},
    }
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    log = list[tuple[float, float, str]]()

    def work(number: int) -> None:
        chance = random.Random(f"{seed} {number}")
        while time.monotonic() < end:
            name, begun = chance.choice(list(kinds)), time.monotonic()
            try:
                outcome = str(kinds[name](chance, port))
            except AssertionError as error:
                outcome = str(error)
            except (OSError, http.client.HTTPException, ValueError, IndexError) as error:
                outcome = "timeout" if isinstance(error, TimeoutError) else "closed"
            outcomes[name][outcome] += 1
            log.append((begun, time.monotonic(), name))
            time.sleep(chance.uniform(0, 0.3))

    _run_threads(work, ATTACKERS)
    found.put(({name: dict(counts) for name, counts in sorted(outcomes.items())}, log))


def ask_well(port: int, seconds: float, known: dict[str, str], found: Any) -> None:
    """Ask questions, and compare the answers. Put times and counts into a queue."""
    end, times, pauses = time.monotonic() + seconds, list[float](), list[float]()
    counts: Counter[str] = Counter()
    wrong: list[str] = []

    def work(number: int) -> None:
        chance = random.Random(number)
        while time.monotonic() < end:
            question = chance.choice(list(known))
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            try:
                connection.request("POST", CHAT, chat(question, max_tokens=TOKENS, stream=True))
                answer, text, last, longest = connection.getresponse(), "", 0.0, 0.0
                if answer.status != 200:
                    counts[str(answer.status)] += 1
                    time.sleep(0.5)
                    continue
                for line in answer:
                    now = time.monotonic()
                    times.append(now)
                    longest = max(longest, now - last) if last else 0.0
                    last = now
                    if line.startswith(b"data: {"):
                        choices = json.loads(line[6:])["choices"]
                        text += choices[0]["delta"].get("content") or "" if choices else ""
                pauses.append(longest)
                counts["answers"] += 1
                if text != known[question]:
                    wrong.append(f"{question}: {text!r} instead of {known[question]!r}")
            except (OSError, http.client.HTTPException, ValueError) as error:
                counts[type(error).__name__] += 1
            finally:
                connection.close()

    _run_threads(work, CLIENTS)
    times.sort()
    gaps = [(a, b) for a, b in itertools.pairwise(times) if b - a > 0.5]
    found.put({"counts": dict(counts), "wrong": wrong[:5], "gaps": gaps, "pauses": pauses})


def watch_machine(pid: int, seconds: float, found: Any, step_s: float = 0.1) -> None:
    """Note when a thread of the server was ready to run and had no CPU, as the kernel counts it.

    Puts (begin, end, seconds of the thread that waited most) of each step into a queue.
    """
    end, waits, last = time.monotonic() + seconds, list[tuple[float, float, float]](), time.monotonic()
    before = _cpu_waits(pid)
    while last < end:
        time.sleep(step_s)
        now, after = time.monotonic(), _cpu_waits(pid)
        longest = max((after[task] - before.get(task, 0) for task in after), default=0) / 1e9
        if longest > 0.01:
            waits.append((last, now, min(longest, now - last)))
        last, before = now, after
    found.put(waits)


def _cpu_waits(pid: int) -> dict[str, int]:
    """Return the nanoseconds that each thread of a process has waited for a CPU."""
    found = {}
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):
            found[task.name] = int((task / "schedstat").read_text().split()[1])
    return found


def _run_threads(work: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def watch_server(server: Serving, seconds: float) -> tuple[list[int], list[float], Counter[str]]:
    """Return bytes in memory each second, and the times and the states of `/health`."""
    end, sizes, waits = time.monotonic() + seconds, list[int](), list[float]()
    states: Counter[str] = Counter()
    while time.monotonic() < end and server.process.poll() is None:
        sizes.append(server.resident_bytes)
        begun = time.monotonic()
        try:
            reply = server.send("/health", timeout=20)
            states[f"{reply.status} {reply.json['status']}"] += 1
        except (OSError, http.client.HTTPException, ValueError) as error:
            states[type(error).__name__] += 1
        waits.append(time.monotonic() - begun)
        time.sleep(max(0.0, 1.0 - waits[-1]))
    return sizes, waits, states


def of_machine(gap: tuple[float, float], waits: list[tuple[float, float, float]]) -> float:
    """Return the seconds of a gap in which the server waited for a CPU."""
    return sum(
        most * max(0.0, min(gap[1], end) - max(gap[0], begin)) / (end - begin) for begin, end, most in waits
    )


def main() -> int:
    from timing import finish, parser, table

    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=600)
    settings = options.parse_args()
    if settings.quick:
        settings.seconds = 20
    started, spawn = time.time(), multiprocessing.get_context("spawn")
    from mlx_spec import demo

    with tempfile.TemporaryDirectory() as place:
        bad = Path(place) / "bad"
        shutil.copytree(demo.TARGET, bad)
        (bad / "chat_template.jinja").write_text(ENDLESS)
        with serving("--model", f"bad={bad},none") as server:
            asked = questions()[:12]
            known = {}
            for question in asked:
                reply = server.send(CHAT, json.loads(chat(question, max_tokens=TOKENS)))
                known[question] = reply.json["choices"][0]["message"]["content"]
            before = server.resident_bytes
            queues = [spawn.Queue() for _ in range(3)]
            work = [
                spawn.Process(target=ask_well, args=(server.port, settings.seconds, known, queues[0])),
                spawn.Process(target=attack, args=(server.port, settings.seconds, settings.seed, queues[1])),
                spawn.Process(target=watch_machine, args=(server.process.pid, settings.seconds, queues[2])),
            ]
            for process in work:
                process.start()
            sizes, waits, states = watch_server(server, settings.seconds)
            good, (attacks, log), stops = (queue.get(timeout=300) for queue in queues)
            for process in work:
                process.join(30)
            time.sleep(2)
            after = server.send("/health").json
            last = server.send(CHAT, json.loads(chat(asked[0], max_tokens=TOKENS))).json
            is_right_after = last["choices"][0]["message"]["content"] == known[asked[0]]
            status = server.process.poll()
    own = sorted((end - begin - of_machine((begin, end), stops) for begin, end in good["gaps"]), reverse=True)
    third = len(sizes) // 3 or 1
    memory = [statistics.median(part) / 1e6 for part in (sizes[third : 2 * third] or sizes, sizes[-third:])]
    failures = {
        name: sum(n for outcome, n in counts.items() if outcome.startswith(("500", "502", "a half")))
        for name, counts in attacks.items()
    }
    pauses = sorted(good["pauses"]) or [0.0]
    results = {
        "seconds": settings.seconds,
        "good answers": good["counts"],
        "wrong": good["wrong"],
        "longest pauses s": [round(pause, 2) for pause in own[:5]],
        "beside the longest": [
            sorted({name for begun, ended, name in log if begun < end and ended > begin})
            for begin, end in sorted(good["gaps"], key=lambda gap: gap[0] - gap[1])[:3]
        ],
        "longest with the machine's part s": [
            round(gap, 2) for gap in sorted((end - begin for begin, end in good["gaps"]), reverse=True)[:5]
        ],
        "server waited for a CPU s": round(sum(most for _, _, most in stops), 1),
        "pause within an answer s": {
            q: round(pauses[int((len(pauses) - 1) * q)], 2) for q in (0.5, 0.99, 1.0)
        },
        "health": dict(states),
        "health s": {q: round(sorted(waits)[int((len(waits) - 1) * q)], 2) for q in (0.5, 0.99, 1.0)},
        "MB": [round(before / 1e6), *map(round, memory), round(max(sizes) / 1e6)],
        "after": after,
        "attacks": attacks,
    }
    outcomes = [
        [name, sum(counts.values()), ", ".join(f"{k}: {v}" for k, v in sorted(counts.items()))]
        for name, counts in attacks.items()
    ]
    table(["attack", "times", "outcomes"], outcomes)
    shown = [[key, str(value)] for key, value in results.items() if key not in ("attacks",)]
    table(["", ""], shown)
    is_held = not (
        good["wrong"]
        or sum(failures.values())
        or (own and own[0] > 1.0)
        or memory[1] > memory[0] + 50
        or states.keys() - {"200 ok"}
        or status is not None
        or not is_right_after
    )
    finish("attack", results, settings, started)
    return 0 if is_held else 1


if __name__ == "__main__":
    sys.exit(main())
