"""Many clients at once at a running server: each gets what it gets alone, whoever else is there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.checkpoints import to_float32
from support.drafting import GOLDEN
from support.endpoint import serving
from support.random_requests import CHAT, RandomRequests, Reply, comparable, questions, without_cache
from support.waiting import wait_until

from mlx_spec.apps.server.settings import ServedModel, Settings
from mlx_spec.hub.catalog import PairSpec

CLIENTS = 8
PARALLEL = 6  # fewer than clients: some wait
PAIR = GOLDEN / "e2b-trained"  # the width of a model does not matter here


def in_float32(folder: Path, copy: Path) -> str:
    to_float32(Path(shutil.copytree(folder, copy)))
    return str(copy)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    folder = tmp_path_factory.mktemp("float32")
    target = in_float32(PAIR / "target", folder / "target")
    drafter = in_float32(PAIR / "assistant", folder / "drafter")
    model = ServedModel("demo", PairSpec(target, drafter, num_draft_tokens=3))
    with serving(Settings((model,), max_waiting=99, max_running=PARALLEL)) as client:
        yield client


def send(client: httpx2.Client, path: str, body: Any) -> Reply:
    found = client.post(path, json=body)
    return Reply(found.status_code, found.content)


def without_floats(value: Any, floats: list[float]) -> Any:
    """Move log-probabilities to a list: a pass of several sequences may differ in the last bits."""
    if isinstance(value, dict):
        return {key: without_floats(v, floats) for key, v in value.items()}
    if isinstance(value, list):
        return [without_floats(v, floats) for v in value]
    if isinstance(value, float):
        return floats.append(value)
    return value


def body_of(reply: Reply) -> tuple[Any, list[float]]:
    floats: list[float] = []
    return (reply.status, without_floats(without_cache(comparable(reply)), floats)), floats


def timings_of(reply: Reply) -> dict[str, Any]:
    found = [
        body["timings"] for body in (reply.chunks if reply.is_stream else [reply.json]) if body.get("timings")
    ]
    return found[-1] if found else {}


def at_once(tasks: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(CLIENTS) as clients:
        return [each.result() for each in [clients.submit(task) for task in tasks]]


@contextmanager
def endless(client: httpx2.Client, question: str) -> Iterator[Iterator[str]]:
    """A stream that ends when its client hangs up."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 3900, "ignore_eos": True}
    with client.stream("POST", CHAT, json=body | {"stream": True}) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        yield lines


def hang_up(client: httpx2.Client, question: str) -> None:
    with endless(client, question) as lines:
        list(islice(lines, 12))


def test_every_answer_is_that_alone(client: httpx2.Client, caplog: pytest.LogCaptureFixture) -> None:
    requests = RandomRequests(0, greedy=False)
    bodies = [requests.next() for _ in range(8)]
    alone = [body_of(send(client, *body)) for body in bodies]
    tasks: list[Callable[[], Any]] = [lambda body=body: send(client, *body) for body in bodies]
    for i in (2, 5):
        tasks.insert(i, lambda i=i: hang_up(client, questions()[i]))
    with endless(client, questions()[0]):
        replies = [reply for reply in at_once(tasks) if reply is not None]
    for body, (expected, floats), reply in zip(bodies, alone, replies, strict=True):
        assert body_of(reply) == (expected, pytest.approx(floats, abs=1e-3)), body
    assert max(timings_of(reply).get("batch_n", 0) for reply in replies) > 1.5
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_figures_of_a_batch(client: httpx2.Client) -> None:
    ask = {"messages": [{"role": "user", "content": questions()[0]}], "ignore_eos": True, "max_tokens": 24}
    ask |= {"temperature": 0}

    def batches() -> list[Any]:
        return [model["batch"] for model in client.get("/metrics.json").json()["models"].values()]

    with endless(client, questions()[1]), endless(client, questions()[2]):
        wait_until(lambda: max((size for batch in batches() for size in batch["sizes"]), default=0) > 1)
        replies = at_once([lambda: send(client, CHAT, ask)] * 4)
    assert len({reply.json["choices"][0]["message"]["content"] for reply in replies}) == 1
    found = [timings_of(reply) for reply in replies]
    assert all(one["batch_n"] > 1 and one["longest_pause_ms"] > 0 for one in found)
    assert {batch["obstacle"] for batch in batches()} == {None}
