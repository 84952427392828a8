"""`POST /race`: one question answered twice at once, as a stream and whole, beside other requests."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx2
import pytest
from support.endpoint import CHAT, DEMO, HELLO, RACE, error_of, events_of, serving
from support.served import ENDLESS, load_once
from support.waiting import wait_until

from mlx_spec.apps.server.settings import ServedModel, Settings
from mlx_spec.hub.catalog import PairSpec

BODY = {"messages": HELLO, "temperature": 0}
BIAS = dict(ENDLESS.logit_bias or {})  # without the tokens that end an answer


@pytest.fixture(scope="module")
def server() -> Iterator[httpx2.Client]:
    plain = ServedModel("plain", PairSpec("demo", drafter="none"))
    off = ServedModel("off", PairSpec("demo", num_draft_tokens=0))
    with serving(Settings((*DEMO, plain, off)), load_once) as client:
        yield client


def turns(response: httpx2.Response) -> list[dict]:
    assert response.status_code == 200, response.text
    *found, end = events_of(response.text)
    assert end == "[DONE]"
    return [json.loads(one) for one in found]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 4}])
def test_both_answers_are_that_of_a_chat(server, sampling):
    said = server.post(CHAT, json={"messages": HELLO, "max_tokens": 40, **sampling}).json()
    expected = said["choices"][0]["message"]["content"]
    found = turns(server.post(RACE, json={"messages": HELLO, "max_tokens": 40, "stream": True, **sampling}))
    for i, name in enumerate(("with drafts", "plain")):
        assert "".join(turn["racers"][i]["text"] for turn in found) == expected
        assert found[-1]["racers"][i]["name"] == name and found[-1]["racers"][i]["tokens_per_second"] > 0
    tokens = [[turn["racers"][i]["tokens"] for turn in found] for i in (0, 1)]
    assert tokens[0] == sorted(tokens[0]) and tokens[0][-1] == tokens[1][-1]
    assert all(abs(a - b) <= 24 for a, b in zip(*tokens, strict=True)), "they take turns of a few tokens"
    assert found[-1]["is_same"] and found[-1]["verdict"][-1] == "every token the same ✓"
    assert not any(turn["verdict"] for turn in found[:-1])
    whole = server.post(RACE, json={"messages": HELLO, "max_tokens": 40, **sampling}).json()
    assert [racer["text"] for racer in whole["racers"]] == [expected] * 2 and whole["model"] == "demo"


def test_a_race_gives_way_and_ends_with_its_client(server):
    """Others are answered while it runs; it stops when the client hangs up."""
    body = {**BODY, "logit_bias": BIAS, "max_tokens": 4000, "stream": True}
    with server.stream("POST", RACE, json=body) as race:
        lines = race.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["turns"] == 0
        assert server.post(CHAT, json={"messages": HELLO, "max_tokens": 4}).status_code == 200
        assert server.get("/health").json()["running"] == 1, "the race goes on"
    wait_until(lambda: 'mlx_spec_cancelled_total{model="demo"} 1.0' in server.get("/metrics").text)
    wait_until(lambda: server.get("/health").json()["running"] == 0)
    assert turns(server.post(RACE, json={**BODY, "max_tokens": 16, "stream": True}))


def test_a_long_prompt_is_read_in_short_turns(server):
    """A whole prompt in one turn would keep the other requests waiting."""
    long = [{"role": "user", "content": "and so on " * 100}]
    found = turns(server.post(RACE, json={**BODY, "messages": long, "max_tokens": 16, "stream": True}))
    assert sum(not any(racer["tokens"] for racer in turn["racers"]) for turn in found) > 6


@pytest.mark.parametrize("model", ["plain", "off"])
def test_without_a_drafter_one_line_says_so(server, model):
    for stream in (False, True):
        error = error_of(server.post(RACE, json={**BODY, "model": model, "stream": stream}), 400)
        assert (
            error["message"].startswith("model: nothing drafts with this model") and error["param"] == "model"
        )
