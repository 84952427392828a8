"""Many clients at once at a running server: each gets what it gets alone, whoever else is there."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from checkpoints import to_float32

from mlx_spec import demo

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from server_checks import comparable, without_cache
from serving import CHAT, RandomRequests, Reply, Serving, questions, serving

CLIENTS = 8
PARALLEL = 6  # fewer than clients: some wait


def in_float32(folder: Path, copy: Path) -> str:
    to_float32(Path(shutil.copytree(folder, copy)))
    return str(copy)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("float32")
    pair = ["--target", in_float32(demo.TARGET, folder / "target")]
    pair += ["--drafter", in_float32(demo.DRAFTER, folder / "drafter")]
    with serving(
        *pair, "--num-draft-tokens", "3", "--parallel", str(PARALLEL), "--max-waiting", "99"
    ) as started:
        yield started


def rounded(value: Any) -> Any:
    """Round log-probabilities: a pass of several sequences may differ in the last bits."""
    if isinstance(value, dict):
        return {key: rounded(v) for key, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return round(value, 3) if isinstance(value, float) else value


def body_of(reply: Reply) -> Any:
    return reply.status, rounded(without_cache(comparable(reply)))


def timings_of(reply: Reply) -> dict[str, Any]:
    found = [
        body["timings"] for body in (reply.chunks if reply.is_stream else [reply.json]) if body.get("timings")
    ]
    return found[-1] if found else {}


def at_once(server: Serving, tasks: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(CLIENTS) as clients:
        return [each.result() for each in [clients.submit(task) for task in tasks]]


def hang_up(server: Serving, question: str) -> None:
    """Close a stream in its middle."""
    connection = server.connect(timeout=60)
    body = {
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "max_tokens": 500,
        "ignore_eos": True,
    }
    connection.request("POST", CHAT, json.dumps(body).encode(), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    for _ in range(12):
        answer.readline()
    answer.close()
    connection.close()


@pytest.mark.parametrize("seed", range(2))
def test_every_answer_is_that_alone(server: Serving, seed: int) -> None:
    requests = RandomRequests(seed, greedy=False, max_tokens=32)
    bodies = [requests.next() for _ in range(20)]
    alone = [body_of(server.send(*body)) for body in bodies]
    tasks: list[Callable[[], Any]] = [lambda body=body: server.send(*body) for body in bodies]
    for i in (3, 9, 15):
        tasks.insert(i, lambda i=i: hang_up(server, questions()[i]))
    replies = [reply for reply in at_once(server, tasks) if reply is not None]
    for body, expected, reply in zip(bodies, alone, replies, strict=True):
        assert body_of(reply) == expected, body
    assert max(timings_of(reply).get("batch_n", 0) for reply in replies) > 1.5
    assert not [line for line in server.log if "Traceback" in line or "ERROR" in line]


def test_figures_of_a_batch(server: Serving) -> None:
    ask = {"messages": [{"role": "user", "content": questions()[0]}], "ignore_eos": True, "max_tokens": 80}
    ask |= {"temperature": 0}
    seen: list[Any] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(server.send("/metrics.json").json["models"])
            time.sleep(0.1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    replies = at_once(server, [lambda: server.send(CHAT, ask) for _ in range(4)])
    done.set()
    watcher.join()
    assert len({reply.json["choices"][0]["message"]["content"] for reply in replies}) == 1
    assert all(
        timings_of(reply)["batch_n"] > 1 and timings_of(reply)["longest_pause_ms"] > 0 for reply in replies
    )
    batches = [one["batch"] for models in seen for one in models.values()]
    assert max(max(batch["sizes"], default=0) for batch in batches) > 1
    assert {batch["obstacle"] for batch in batches} == {None}
