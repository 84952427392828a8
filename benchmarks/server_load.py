"""How fast do several clients get answers from one server, and how long are the pauses between tokens?

For each number of clients, all send a greedy request without an end at the same time and read the stream.
This is repeated with `--parallel 1`, where they wait for each other, and with mlx_lm.server on the same
weights. Then all but one client stream, first without and then beside a prompt of `--long` tokens. The times
between the tokens of these clients show the cost of the prompt. Pauses are measured at the clients, in
milliseconds. If they are long without a prompt, the machine is too slow or too busy for the bound of 100 ms.
`--float32` serves dequantized weights. All servers use the same BLAS.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from arms import Folders
from serving import READY_TIMEOUT_S, Serving, serving
from timing import finish, parser, table

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from support.random_requests import CHAT, questions

SETTLE_S, ALONE_S = 1.0, 4.0  # of streaming, before pauses count, and then without the long prompt
SHARES = (0.5, 0.99, 1.0)  # quantiles of pauses
NAMES = {"batch": "together", "one": "one after the other", "mlx-lm": "mlx_lm.server"}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--target", default="demo")
    options.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8])
    options.add_argument("--tokens", type=int, default=128, help="of each answer")
    options.add_argument("--long", type=int, default=3000, help="tokens of the long prompt")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--float32", action="store_true", help="dequantize the target's weights")
    settings = options.parse_args()
    if settings.quick:
        settings.clients, settings.tokens, settings.long, settings.repeats = [1, 3], 12, 200, 1
    started, most = time.time(), max(settings.clients)
    folders = Folders.find(settings.target, None)
    folders = folders.dequantized() if settings.float32 else folders
    folder = folders.target
    ends = json.loads((folder / "config.json").read_text())["eos_token_id"]
    settings.ends = ends if isinstance(ends, list) else [ends]
    results: dict[str, Any] = {}
    target = ("--target", str(folder), *(("--drafter", str(folders.drafter)) if folders.drafter else ()))
    with (
        serving(*target, "--parallel", str(most)) as batch,
        serving(*target, "--parallel", "1") as turns,
        mlx_lm_server(folder) as other,
    ):
        servers = {"batch": batch, "one": turns, "mlx-lm": other}
        for server in servers.values():
            together(server, 1, 0, settings)
        for count in settings.clients:
            runs = [
                {name: together(server, count, i, settings) for name, server in servers.items()}
                for i in range(settings.repeats)
            ]
            results[str(count)] = {name: round(max(run[name] for run in runs), 1) for name in servers}
        results["pauses"] = {NAMES[n]: pauses(servers[n], most, settings) for n in ("batch", "mlx-lm")}
    rows = [[n, *r.values()] for n, r in results.items() if n.isdigit()]
    table(["clients", *(f"tokens/s {name}" for name in NAMES.values())], rows)
    found = results["pauses"]
    rows = [[name, when, *each.values()] for name, both in found.items() for when, each in both.items()]
    table(["", "prompt", "s", "pauses", *(f"{share:.0%}" for share in SHARES)], rows)
    finish("server_load", results, settings, started)


@contextmanager
def mlx_lm_server(folder: Path) -> Iterator[Serving]:
    """Run mlx_lm.server on a checkpoint for as long as the context lasts."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = "from mlx_spec.device.blas import use_blas; use_blas(); from mlx_lm.server import main; main()"
    command = [sys.executable, "-c", code, "--model", str(folder), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    server, end = Serving(process, "127.0.0.1", port, []), time.monotonic() + READY_TIMEOUT_S
    try:
        while True:
            try:
                server.send("/health", timeout=5)
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < end, "mlx_lm.server did not come up"
                time.sleep(0.2)
        yield server
    finally:
        server.stop()


def together(server: Serving, count: int, turn: int, settings: argparse.Namespace) -> float:
    """Return the tokens a second of `clients` simultaneous clients together."""
    asked, start = questions(), time.perf_counter()
    with ThreadPoolExecutor(count) as clients:
        numbers = range(turn * count, (turn + 1) * count)
        texts = [asked[i % len(asked)] for i in numbers]
        streams = list(clients.map(lambda text: stream(server, text, settings.tokens, settings.ends), texts))
    return sum(tokens for tokens, _ in streams) / (time.perf_counter() - start)


def pauses(server: Serving, count: int, settings: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the pauses of streams without and beside a long prompt."""
    asked, word = questions(), "word "
    once, twice = (prompt_tokens(server, word * n) for n in (50, 100))
    words = 50 + max(settings.long - once, 0) * 50 // (twice - once)
    with ThreadPoolExecutor(count) as clients:
        others = [
            clients.submit(stream, server, asked[i % len(asked)], 5 * settings.tokens, settings.ends)
            for i in range(count - 1)
        ]
        time.sleep(SETTLE_S + ALONE_S)
        begin = time.perf_counter()
        stream(server, word * words, 1, settings.ends)
        end = time.perf_counter()
        marks = [mark for other in others for mark in other.result()[1]]

    def between(low: float, high: float) -> dict[str, float]:
        gaps = sorted(gap for when, gap in marks if low <= when <= high)
        longest = {f"{x:.0%}": gaps[min(int(x * len(gaps)), len(gaps) - 1)] if gaps else 0.0 for x in SHARES}
        in_ms = {share: round(1000 * gap, 1) for share, gap in longest.items()}
        return {"s": round(high - low, 1), "pauses": len(gaps), **in_ms}

    return {"none": between(begin - ALONE_S, begin), str(settings.long): between(begin, end)}


def prompt_tokens(server: Serving, text: str) -> int:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    return int(server.send(CHAT, body).json["usage"]["prompt_tokens"])


def stream(server: Serving, text: str, tokens: int, ends: list[int]) -> tuple[int, list[tuple[float, float]]]:
    """Return the tokens of an answer, and the time and the pause of each of its chunks but the first."""
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "stream": True}
    body |= {"logit_bias": {str(end): -100 for end in ends}, "max_tokens": tokens}
    body |= {"stream_options": {"include_usage": True}}
    marks, last, count = list[tuple[float, float]](), 0.0, 0
    connection = server.connect()
    connection.request("POST", CHAT, json.dumps(body).encode(), {"Content-Type": "application/json"})
    for line in connection.getresponse():
        if b'"content"' in line:
            now = time.perf_counter()
            marks += [(now, now - last)] if last else []
            last = now
        elif b"completion_tokens" in line:
            count = json.loads(line.removeprefix(b"data: "))["usage"]["completion_tokens"]
    connection.close()
    return count, marks


if __name__ == "__main__":
    main()
