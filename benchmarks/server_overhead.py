"""What does the server add to a round, against the bare engine, with one client?

The same greedy request, streamed from a server of its own and decoded by a session of the library in this
process, in turns. End-of-text tokens are banned, so that all answers are long. Compared are seconds a token
between the first text and the last, as the client and as the session's reader see them; "within" is what the
engine in the server says of itself. With a fixed draft length both do the same rounds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

from mixture import questions
from serving import CHAT, Serving, serving
from timing import finish, interval, parser, table

import mlx_spec
from mlx_spec.pair import Pair
from mlx_spec.sampling import Sampling


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
        yield from streamed(server, pair, question, tokens)
    else:
        yield "engine", engine(pair, question, tokens)


def engine(pair: Pair, question: str, tokens: int) -> float:
    """Of the bare engine, text included."""
    sampling = Sampling(logit_bias=dict.fromkeys(sorted(pair.text.eos), -100.0))
    times: list[float] = []
    counts: list[int] = []
    for piece in pair.session().stream(question, sampling=sampling, max_tokens=tokens):
        if piece.round is not None:
            times.append(time.perf_counter())
            counts.append(len(piece.round.tokens))
    return (times[-1] - times[0]) / sum(counts[1:])


def streamed(server: Serving, pair: Pair, question: str, tokens: int) -> Iterator[tuple[str, float]]:
    """Of a stream as a client sees it, and what the engine in the server took for it."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": tokens, "temperature": 0}
    body |= {"logit_bias": {str(token): -100 for token in sorted(pair.text.eos)}}
    body |= {"stream": True, "stream_options": {"include_draft": True}}
    connection = server.connect()
    connection.request("POST", CHAT, json.dumps(body).encode(), {"Content-Type": "application/json"})
    times: list[float] = []
    counts: list[int] = []  # tokens so far
    timings: dict[str, float] = {}
    for line in connection.getresponse():
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        chunk = json.loads(line[6:])
        timings = chunk.get("timings") or timings
        if "mlx_spec" in chunk:
            times.append(time.perf_counter())
            counts.append(chunk["mlx_spec"]["statistics"]["predicted_n"])
    connection.close()
    yield "stream", (times[-1] - times[0]) / (counts[-1] - counts[0])
    yield "within", timings["predicted_ms"] / 1000 / timings["predicted_n"]


if __name__ == "__main__":
    main()
