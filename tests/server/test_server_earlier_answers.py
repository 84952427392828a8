"""Earlier answers are kept by API key: in memory, in the cache folder if there is one, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.endpoint import CHAT, DEMO, HELLO, Stub, serving, stubbed
from support.pairs import make_pair

from mlx_spec.apps.server.settings import ServedModel, Settings, parse
from mlx_spec.hub.catalog import PairSpec
from mlx_spec.pair import Pair

LOOKUP = (ServedModel("demo", PairSpec("demo", "lookup", num_draft_tokens=3)),)


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"authorization": "Bearer secret"}, "secret"),
        ({"x-api-key": "two"}, "two"),
        ({"authorization": "Basic one"}, ""),
        ({}, ""),
    ],
)
def test_the_key_of_a_request(headers: dict[str, str], key: str) -> None:
    for keeps in (True, parse(["--no-earlier-answers"]).earlier_answers):
        stub = Stub()
        endpoint = stubbed(stub, Settings(DEMO, earlier_answers=keeps))
        endpoint.client.post(CHAT, json={"messages": HELLO}, headers=headers)
        request = stub.requests[-1]
        assert (request.key, request.earlier_answers) == (key, keeps) and "secret" not in repr(request)


def new_pair(_: ServedModel) -> Pair:
    return make_pair("full", "lookup")


def ask(client: httpx2.Client, key: str) -> dict[str, Any]:
    body = {"messages": HELLO, "max_tokens": 20, "temperature": 0}
    found = client.post(CHAT, json=body, headers={"x-api-key": key}).json()
    drafts: dict[str, Any] = found["timings"]["by_drafter"]
    return {"text": found["choices"][0]["message"]["content"], **drafts}


def test_each_key_has_its_own_answers_and_they_outlive_the_server(tmp_path: Path) -> None:
    with serving(Settings(LOOKUP, cache_folder=tmp_path), new_pair) as client:
        first, again, other = ask(client, "a"), ask(client, "a"), ask(client, "b")
        assert sum(again["earlier"]["accepted_at"]) > 10
        assert other == first and "earlier" not in first and again["text"] == first["text"]
        assert 'drafter="earlier"' in client.get("/metrics").text
    assert len(list(tmp_path.glob("*.answers"))) == 2
    with serving(Settings(LOOKUP, cache_folder=tmp_path), new_pair) as client:
        found = ask(client, "a")
        assert found["earlier"] == again["earlier"] and "earlier" not in ask(client, "c")
