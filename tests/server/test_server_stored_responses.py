"""Stored responses: chains, the routes that read and delete them, the bounds, and files on disk."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from support.endpoint import (
    DEMO,
    READ,
    RESPONSES,
    TURN,
    Endpoint,
    Stub,
    error_of,
    frames,
    fresh,
    said,
    shared,
    stubbed,
)
from support.waiting import LIMIT, wait_until

from mlx_spec.apps.server.engine.answers import Failed
from mlx_spec.apps.server.errors import internal_error
from mlx_spec.apps.server.protocols.stored_responses import ItemField, ResponseStore
from mlx_spec.apps.server.settings import Settings
from mlx_spec.errors import InvalidValue

UNKNOWN = "resp_" + "0" * 32
RESULTS = [{"type": "function_call_output", "call_id": f"call_{i}", "output": "dry"} for i in (1, 2)]


@pytest.fixture
def stub() -> Stub:
    return fresh(said("Hi"))[0]


@pytest.fixture
def endpoint(stub: Stub) -> Endpoint:
    return shared()[1]


def ask(endpoint: Endpoint, text: Any, previous: str | None = None, **body: Any) -> Any:
    reply = endpoint.post(RESPONSES, input=text, previous_response_id=previous, **body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def last_of(stream: Any) -> Any:
    """The response at the end of a stream."""
    return frames(stream.text)[-1][1]["response"]


def get(endpoint: Endpoint, id: str, status: int = 200, rest: str = "") -> Any:
    reply = endpoint.client.get(f"{RESPONSES}/{id}{rest}")
    assert reply.status_code == status, reply.text
    return reply.json()


def missing(endpoint: Endpoint, id: str) -> str:
    """The reason why a response is not there; both routes give the same one."""
    read = error_of(endpoint.client.get(f"{RESPONSES}/{id}"), 404)
    error = error_of(endpoint.post(RESPONSES, input="x", previous_response_id=id), 400)
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")
    reasons = [one["message"].partition(" not found: ")[2] for one in (read, error)]
    assert reasons[0] == reasons[1] != ""
    return reasons[0]


# --- chains


@pytest.mark.parametrize("stream", [False, True])
def test_a_chain_is_the_conversation_that_a_client_would_send(endpoint: Endpoint, stub: Stub, stream: bool):
    """Thinking, text and calls come back as they were; instructions are those of each request alone."""
    stub.events = TURN
    if stream:
        first = last_of(endpoint.post(RESPONSES, input="Rain?", instructions="Old.", stream=True))
    else:
        first = ask(endpoint, "Rain?", instructions="Old.")
    stub.events = said("Dry.")
    second = ask(endpoint, RESULTS, first["id"])
    third = ask(endpoint, "Sure?", second["id"], instructions="New.")
    chained = stub.requests[-1].prompt
    question = {"role": "user", "content": "Rain?"}
    again = [question, *first["output"], *RESULTS, *second["output"], {"role": "user", "content": "Sure?"}]
    ask(endpoint, again, instructions="New.")
    assert chained == stub.requests[-1].prompt and chained.messages[0]["content"] == "New."
    assert (first["previous_response_id"], third["previous_response_id"]) == (None, second["id"])
    assert get(endpoint, first["id"]) == first


def test_an_item_may_be_given_by_reference(endpoint: Endpoint, stub: Stub):
    """As the AI SDK sends the answers that it has; they are stored as what they stand for."""
    stub.events = TURN
    question = {"role": "user", "content": "Rain?"}
    output = ask(endpoint, [question])["output"]
    stub.events = said("Dry.")
    references = [{"type": "item_reference", "id": item["id"]} for item in output]
    second = ask(endpoint, [question, *references, *RESULTS])
    by_reference = stub.requests[-1].prompt
    ask(endpoint, [question, *output, *RESULTS])
    assert by_reference == stub.requests[-1].prompt
    items = get(endpoint, second["id"], rest="/input_items?order=asc&limit=100")["data"]
    assert [item["type"] for item in items[1:-2]] == [item["type"] for item in output]


def test_what_is_not_stored_cannot_be_continued(endpoint: Endpoint, stub: Stub):
    assert "never stored" in missing(endpoint, ask(endpoint, "x", store=False)["id"])
    stub.events = (READ, Failed(internal_error()))
    text = endpoint.post(RESPONSES, input="x", stream=True).text
    failed = json.loads(text.strip().rpartition("data: ")[2])["response"]["id"]
    assert all("never stored" in missing(endpoint, id) for id in (failed, UNKNOWN))


def test_a_turn_stores_what_is_new_in_it(tmp_path: Path, endpoint: Endpoint, stub: Stub):
    """Also if the responses before it were deleted, and after a restart."""
    endpoint = stubbed(stub, Settings(DEMO, store=tmp_path))
    ids, previous = list[str](), None
    for i in range(12):
        previous = ask(endpoint, f"question {i:3}", previous)["id"]
        ids.append(previous)
    for id in ids[3:5]:
        assert endpoint.client.delete(f"{RESPONSES}/{id}").is_success
    wait_until(lambda: sum('"it was deleted"' in f.read_text() for f in tmp_path.glob("resp_*.json")) == 2)
    sizes = [(tmp_path / f"{id}.json").stat().st_size for id in ids]
    assert max(sizes[1:]) - min(sizes[1:]) < 40
    for server in (endpoint, stubbed(stub, Settings(DEMO, store=tmp_path))):
        ask(server, "z", ids[-1], store=False)
        texts = [turn["content"] for turn in stub.requests[-1].prompt.messages[::2]]
        assert texts == [*(f"question {i:3}" for i in range(12)), "z"]
        assert missing(server, ids[3]) == "it was deleted" and get(server, ids[2])["id"] == ids[2]
        assert len(get(server, ids[11], rest="/input_items?limit=100")["data"]) == 23
    for id in (*ids[:3], *ids[5:]):
        server.client.delete(f"{RESPONSES}/{id}")
    wait_until(lambda: not list(tmp_path.iterdir()))


def test_a_long_conversation_is_kept_whole(stub: Stub):
    """Others make room for it."""
    endpoint = stubbed(stub, store=ResponseStore(most=3))
    other, ids = ask(endpoint, "other")["id"], [ask(endpoint, "question 0")["id"]]
    for i in range(1, 6):
        ids.append(ask(endpoint, f"question {i}", ids[-1])["id"])
    assert "made room" in missing(endpoint, other)
    assert [get(endpoint, id)["id"] for id in ids] == ids
    newest = [ask(endpoint, "new")["id"] for _ in range(3)]
    assert all("made room" in missing(endpoint, id) for id in ids) and get(endpoint, newest[0])


def test_a_response_that_was_deleted_during_the_answer_is_continued(stub: Stub):
    store = ResponseStore()
    mine = store.of("key")
    item = ItemField(role="user", content="Rain?")
    answers = [
        {"id": f"resp_{i}", "output": [{"id": "m", "role": "assistant", "content": "Dry"}]} for i in "ab"
    ]
    mine.save(answers[0], [item], None)
    previous = mine.continued("resp_a")
    mine.delete("resp_a")
    mine.save(answers[1], [item], previous)
    roles = [item.role for item in mine.conversation("resp_b", [item])]
    assert roles == ["user", "assistant", "user", "assistant", "user"]


def test_responses_belong_to_their_key(endpoint: Endpoint, stub: Stub):
    """Another key, or none, gets the error of an id that never was."""
    first = endpoint.client.post(RESPONSES, json={"input": "x"}, headers={"authorization": "Bearer alice"})
    id, item = first.json()["id"], first.json()["output"][0]["id"]
    for headers in ({"authorization": "Bearer bob"}, {"x-api-key": "carol"}, {}):
        for method, rest in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
            reply = endpoint.client.request(method, f"{RESPONSES}/{id}{rest}", headers=headers)
            assert "never stored" in error_of(reply, 404)["message"]
        for body in (
            {"input": "y", "previous_response_id": id},
            {"input": [{"type": "item_reference", "id": item}]},
        ):
            for path in (RESPONSES, f"{RESPONSES}/input_tokens"):
                error_of(endpoint.client.post(path, json=body, headers=headers), 400)
    mine = {"x-api-key": "alice"}
    body = {"input": "y", "previous_response_id": id}
    assert endpoint.client.post(RESPONSES, json=body, headers=mine).status_code == 200
    assert endpoint.client.delete(f"{RESPONSES}/{id}", headers=mine).json()["deleted"]


# --- routes


def test_input_items_come_in_pages(endpoint: Endpoint, stub: Stub, openai: Any):
    item_type: TypeAdapter[Any] = TypeAdapter(openai.types.responses.ResponseItem)
    first = ask(endpoint, [{"role": "user", "content": text} for text in "ab"])
    second = ask(endpoint, [{"role": "user", "content": [{"type": "input_text", "text": "c"}]}], first["id"])
    whole = get(endpoint, second["id"], rest="/input_items?order=asc")
    for item in whole["data"]:
        item_type.validate_python(item, strict=True)
    texts = [item["content"][0]["text"] for item in whole["data"]]
    assert (whole["object"], whole["has_more"], texts) == ("list", False, ["a", "b", "Hi", "c"])
    assert (whole["first_id"], whole["last_id"]) == (whole["data"][0]["id"], whole["data"][-1]["id"])
    page = get(endpoint, second["id"], rest="/input_items?limit=2")
    assert page["data"] == whole["data"][:1:-1] and page["has_more"]
    rest = get(endpoint, second["id"], rest=f"/input_items?after={page['last_id']}&limit=2")
    assert rest["data"] == whole["data"][1::-1] and not rest["has_more"]
    for query in ("before=x", "include=y", "order=up", "limit=0", "after=z"):
        refused = get(endpoint, second["id"], 400, f"/input_items?{query}")
        assert refused["error"]["param"] == query.partition("=")[0]


def test_the_client_reads_lists_and_deletes(endpoint: Endpoint, monkeypatch: Any, openai: Any):
    monkeypatch.setitem(endpoint.client.headers, "authorization", "Bearer none")  # for each way to ask
    client = openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=endpoint.client)
    first = client.responses.create(model="demo", input="x")
    second = client.responses.create(model="demo", input="y", previous_response_id=first.id)
    response = openai.types.responses.Response
    assert response.model_validate(get(endpoint, first.id), strict=True).output_text == "Hi"
    assert client.responses.retrieve(first.id).output_text == "Hi"
    assert len(client.responses.input_items.list(second.id, order="asc").data) == 3
    client.responses.delete(first.id)
    assert missing(endpoint, first.id) == "it was deleted"
    assert ask(endpoint, "z", second.id)["status"] == "completed"
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(first.id)
    assert get(endpoint, second.id, 400, "?stream=true")["error"]["param"] == "stream"


@pytest.mark.parametrize("limit", [{"most": 2}, {"most_bytes": 3000}])
def test_the_oldest_make_room(tmp_path: Path, stub: Stub, limit: Any):
    endpoint = stubbed(stub, store=ResponseStore(tmp_path, **limit))
    ids = [ask(endpoint, "x" * 100)["id"] for _ in range(4)]
    assert "made room" in missing(endpoint, ids[0])
    assert get(endpoint, ids[3])["id"] == ids[3]
    kept = {id for id in ids if endpoint.client.get(f"{RESPONSES}/{id}").is_success}
    assert len(kept) <= 2
    wait_until(lambda: {file.stem for file in tmp_path.iterdir()} == kept)
    oldest, *newer = sorted(kept, reverse=True)  # in no order of their names
    os.utime(tmp_path / f"{oldest}.json", (0, 0))
    endpoint = stubbed(stub, store=ResponseStore(tmp_path, **limit))
    ask(endpoint, "x" * 100)
    assert "made room" in missing(endpoint, oldest)
    assert all(get(endpoint, id) for id in newer)


# --- files


def test_responses_outlive_the_server(tmp_path: Path, stub: Stub, caplog: Any):
    folder, stub.events = tmp_path / "new" / "store", TURN
    first = ask(stubbed(stub, Settings(DEMO, store=folder)), "Rain?")
    file = folder / f"{first['id']}.json"
    wait_until(lambda: [file] == list(folder.iterdir()))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    damaged = [b"", b"{}", b"[" * 9999, b'{"response": {"id": 3}, "input": []}', file.read_bytes()]
    damaged.append(json.dumps({"response": {**first, "output": [3]}, "input": []}).encode())
    for i, data in enumerate(damaged):
        (folder / f"resp_{i:032x}.json").write_bytes(data)
    (folder / "notes.txt").write_text("mine")
    (folder / "mine.json").write_text(json.dumps({"response": {**first, "id": "mine"}, "input": []}))
    (folder / ".resp_x.tmp").write_text("half")
    caplog.set_level(logging.WARNING, "mlx_spec.server")
    endpoint = stubbed(stub, Settings(DEMO, store=folder))
    assert len([line for line in caplog.messages if "damaged" in line]) == len(damaged)
    assert get(endpoint, first["id"]) == first
    ask(endpoint, RESULTS, first["id"], store=False)
    roles = [turn["role"] for turn in stub.requests[-1].prompt.messages]
    assert roles == ["user", "assistant", "tool", "tool"]
    assert endpoint.client.delete(f"{RESPONSES}/{first['id']}").json()["deleted"]
    wait_until(lambda: not file.exists())
    assert (folder / "notes.txt").exists() and not (folder / ".resp_x.tmp").exists()
    assert "never stored" in missing(endpoint, "mine")


@pytest.mark.parametrize("id", ["..%2F..%2Fx", "../x", "resp_" + "A" * 32, "resp_%00", "x" * 5000])
def test_an_id_of_a_request_is_no_path(tmp_path: Path, stub: Stub, id: str):
    (tmp_path / "x.json").write_text(json.dumps({"response": {"id": "x", "output": []}, "input": []}))
    endpoint = stubbed(stub, Settings(DEMO, store=tmp_path / "store"))
    for method in ("GET", "DELETE"):
        error_of(endpoint.client.request(method, f"{RESPONSES}/{id}"), 404)
    assert (tmp_path / "x.json").exists()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, stub: Stub, caplog: Any):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidValue, match=r"--store .*file cannot be used"):
        stubbed(stub, Settings(DEMO, store=tmp_path / "file"))
    endpoint = stubbed(stub, Settings(DEMO, store=tmp_path / "store"))
    (tmp_path / "store").rmdir()
    caplog.set_level(logging.WARNING, "mlx_spec.server")
    assert get(endpoint, ask(endpoint, "x")["id"])["status"] == "completed"
    wait_until(lambda: "kept in memory only" in caplog.text)


def test_no_answer_waits_for_the_disk(tmp_path: Path, stub: Stub, monkeypatch: Any):
    written = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda handle: written.wait(LIMIT))
    endpoint = stubbed(stub, Settings(DEMO, store=tmp_path))
    id = ask(endpoint, "x")["id"]
    assert not (tmp_path / f"{id}.json").exists() and get(endpoint, id)["status"] == "completed"
    written.set()
    wait_until((tmp_path / f"{id}.json").exists)
