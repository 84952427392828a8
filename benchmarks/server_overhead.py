"""What does the server add to a round, against the bare engine, with one client?

The same greedy request, streamed from a server of its own and decoded by the engine in this process, in
turns. Compared are seconds a token behind the first round: of a session of the library, and of the stream as
the client sees it. The engine's own figure within the server is there to tell the parts apart.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator

from mixture import questions
from serving import CHAT, Serving, serving
from timing import finish, interval, parser, table

import mlx_spec
from mlx_spec.pair import Pair


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=20)
    options.add_argument("--tokens", type=int, default=96)
    options.add_argument("--drafter", help="none: plain decoding; a number of draft tokens fixes it")
    settings = options.parse_args()
    repeats = 2 if settings.quick else settings.repeats
    started = time.time()
    fixed = ["--num-draft-tokens", settings.drafter] if str(settings.drafter).isdigit() else []
    given = fixed or (["--drafter", settings.drafter] if settings.drafter else [])
    number = int(settings.drafter) if fixed else None
    pair = mlx_spec.load("demo", settings.drafter if given and not fixed else None, num_draft_tokens=number)
    asked = questions()[: 2 if settings.quick else 6]
    ratios: list[list[float]] = [[] for _ in asked]
    inside: list[list[float]] = [[] for _ in asked]
    with serving(*given) as server:
        for repeat in range(repeats + 1):
            for i, question in enumerate(asked):
                order = (repeat + i) % 2
                pieces = dict(run(order, server, pair, question, settings.tokens))
                pieces |= dict(run(1 - order, server, pair, question, settings.tokens))
                if repeat and "engine" in pieces and "stream" in pieces:
                    ratios[i].append(pieces["stream"] / pieces["engine"])
                    inside[i].append(pieces["within"] / pieces["engine"])
    found = {"stream to engine": interval(ratios, settings.seed), "within to engine": interval(inside, 0)}
    rows = [[name, *values] for name, values in found.items()]
    table(["seconds a token", "median", "low", "high"], rows)
    finish("server_overhead", found, settings, started)


def run(which: int, server: Serving, pair: Pair, question: str, tokens: int) -> Iterator[tuple[str, float]]:
    """Seconds a token behind the first round."""
    if which:
        yield from streamed(server, question, tokens)
    else:
        yield "engine", engine(pair, question, tokens)


def engine(pair: Pair, question: str, tokens: int) -> float:
    """Of the bare engine, text included."""
    session = pair.session()
    times: list[float] = []
    counts: list[int] = []
    for piece in session.stream(question, max_tokens=tokens):
        if piece.round is not None:
            times.append(time.perf_counter())
            counts.append(len(piece.round.tokens))
    return (times[-1] - times[0]) / max(sum(counts[1:]), 1)


def streamed(server: Serving, question: str, tokens: int) -> Iterator[tuple[str, float]]:
    """Of a stream as a client sees it, and what the engine in the server took for it."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": tokens, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    connection = server.connect()
    connection.request("POST", CHAT, json.dumps(body).encode(), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    times: list[float] = []
    timings: dict[str, float] = {}
    used = 0
    for line in answer:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        chunk = json.loads(line[6:])
        timings = chunk.get("timings") or timings
        used = (chunk.get("usage") or {}).get("completion_tokens", used)
        if chunk["choices"] and (chunk["choices"][0]["delta"].get("content") or times):
            times.append(time.perf_counter())
    connection.close()
    first = round(used / max(len(times), 1))  # tokens of the first round, about
    yield "stream", (times[-1] - times[0]) / max(used - first, 1)
    yield "within", statistics.fmean([timings["predicted_ms"] / 1000 / used])


if __name__ == "__main__":
    main()
