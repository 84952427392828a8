"""Keep responses for `previous_response_id`, and serve them at the routes under `/v1/responses/ID`.

They are kept in memory; with `--store FOLDER` each is a JSON file in a folder, too. A response holds the
items of its request and refers to the response that it continues, so a turn costs what is new in it. An id
that a client sends is only looked up in memory: it never becomes a path.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_spec.checkpoint.files import one_line, remove_abandoned, write_atomically
from mlx_spec.errors import InvalidValue

from ..errors import LOG, MAX_NAME_CHARS, Failure, invalid, invalid_field
from ..http import Json, given_key
from ..requests.parsing import ContentPart, Fields, Parts, read_query, required


class ItemField(Fields):
    """An input item: a message, a tool call, its result, thinking, or a reference to an earlier item."""

    type: str | None = None  # None: a message
    id: str | None = None
    status: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Parts | None = None
    call_id: str | None = Field(default=None, min_length=1)
    name: str | None = Field(default=None, min_length=1)
    namespace: str | None = None
    arguments: str | None = None
    output: Parts | None = None
    summary: list[ContentPart] | None = None
    encrypted_content: str | None = None

    def identified(self) -> ItemField:
        """Return the item with an id: its own or a new one."""
        id_prefixes = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
        prefix = id_prefixes.get(self.type or "", "msg")
        return self if self.id else self.model_copy(update={"id": f"{prefix}_{uuid4().hex}"})

    def json_item(self) -> Json:
        item: Json = {"type": "message", "status": "completed", **self.model_dump(exclude_none=True)}
        text_type = "output_text" if self.role == "assistant" else "input_text"
        for key in {"content", "output"} & item.keys():
            for part in item[key]:
                part["type"] = text_type if part["type"] == "text" else part["type"]
                part |= {"annotations": []} if part["type"] == "output_text" else {}
        return item


class ReadQuery(Fields):
    """The query of `GET /v1/responses/ID`; stored responses are not streamed."""

    model_config = ConfigDict(extra="forbid")

    stream: Literal["false"] = "false"


class PageQuery(Fields):
    """The query of `GET /v1/responses/ID/input_items`."""

    model_config = ConfigDict(extra="forbid", strict=False)

    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20  # as in OpenAI's API


@dataclass(eq=False)
class StoredResponse:
    """A response, and what it answered: the items of its request, after an earlier response."""

    response: Json
    input: tuple[ItemField, ...]  # of its request alone
    output: tuple[ItemField, ...]
    previous: StoredResponse | None  # the response that it continues
    owner: str  # digest of the API key, "" without one
    size: int = 0  # bytes as JSON
    next_count: int = 0  # stored responses that continue it: while there are any, its items are kept
    gone: str | None = None  # why clients find it no more

    @property
    def id(self) -> str:
        return str(self.response["id"])

    @property
    def answered(self) -> tuple[ItemField, ...]:
        """Return all items that the response answered, those of earlier responses first."""
        newest_first, earlier = [self.input], self.previous
        while earlier is not None:
            newest_first += [earlier.output, earlier.input]
            earlier = earlier.previous
        return tuple(item for items in reversed(newest_first) for item in items)

    def as_json(self) -> str:
        """Return the content of its file."""
        content = {
            "response": self.response,
            "input": [item.model_dump(exclude_none=True) for item in self.input],
            "previous": self.previous and self.previous.id,
            "owner": self.owner,
            "gone": self.gone,
        }
        return json.dumps(content, ensure_ascii=False)


class ResponseStore:
    """The latest responses of all API keys. Only the event loop may use this class."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        most: int = 1000,  # a day of work in one agent; more would only lengthen the start with `--store`
        most_bytes: int = 64 * 2**20,  # as JSON: two bodies of the largest size, little beside weights
    ) -> None:
        self._folder, self._most, self._most_bytes = folder, most, most_bytes
        self._writer = ThreadPoolExecutor(1, "mlx_spec storing")  # one, so a write comes before its removal
        self._stored: dict[str, StoredResponse] = {}  # the oldest first
        self._size = 0  # bytes of all as JSON
        self._gone: dict[tuple[str, str], str] = {}  # owner and id -> why the response is gone
        if folder is not None:
            self._read_folder(folder)

    def of(self, key: str) -> KeyResponses:
        """Return the responses of an API key; "" for requests without one."""
        return KeyResponses(self, hashlib.sha256(key.encode()).hexdigest() if key else "")

    def add(self, stored: StoredResponse) -> None:
        """Keep a response; others make room."""
        text = stored.as_json()
        stored.size = len(text.encode())
        self._write_file(stored, text)
        self._add(stored)
        self._make_room()

    def holds(self, stored: StoredResponse) -> bool:
        """Return True if a response is kept, or its items are."""
        return stored.id in self._stored

    def find(self, owner: str, id: str) -> StoredResponse | None:
        """Return a response of an owner; None if it is gone or was never there."""
        stored = self._stored.get(id)
        return stored if stored is not None and stored.owner == owner and stored.gone is None else None

    def answered_item(self, owner: str, id: str) -> ItemField | None:
        """Return an item of an owner's answers."""
        mine = [stored for stored in self._stored.values() if stored.owner == owner and stored.gone is None]
        return next((item for stored in reversed(mine) for item in stored.output if item.id == id), None)

    def missing(self, owner: str, id: str) -> str:
        """Return what an error says of a response that is not found."""
        unknown = "it was never stored by this server, or before its start without --store"
        return f"{id[:MAX_NAME_CHARS]!r} not found: {self._gone.get((owner, id), unknown)}"

    def forget(self, stored: StoredResponse, why: str) -> None:
        """Let clients find a response no more. Its items stay while later responses continue it."""
        stored.gone = why
        self._gone[stored.owner, stored.id] = why
        if len(self._gone) > 10_000:  # reasons for errors; about 1 MB of memory
            del self._gone[next(iter(self._gone))]
        if stored.next_count:
            self._write_file(stored, stored.as_json())
        else:
            self._drop(stored)

    def _add(self, stored: StoredResponse) -> None:
        self._stored[stored.id] = stored
        self._size += stored.size
        if stored.previous is not None:
            stored.previous.next_count += 1

    def _drop(self, stored: StoredResponse) -> None:
        """Drop a response that none continues, and those before it that were only kept for it."""
        del self._stored[stored.id]
        self._size -= stored.size
        if self._folder is not None:
            self._writer.submit((self._folder / f"{stored.id}.json").unlink, missing_ok=True)
        if (before := stored.previous) is not None:
            before.next_count -= 1
            if before.gone is not None and not before.next_count:
                self._drop(before)

    def _make_room(self) -> None:
        """Forget the conversations that ended longest ago, the last response of each first."""
        most, most_bytes = self._most, self._most_bytes
        why = f"it made room for newer ones, {most} responses and {most_bytes // 2**20} MiB are kept"
        while len(self._stored) > most or self._size > most_bytes:
            ends = (stored for stored in self._stored.values() if not stored.next_count)
            oldest = next(ends)
            if next(ends, None) is None:
                return  # one conversation: the next turn needs all of it
            self.forget(oldest, why)

    def _write_file(self, stored: StoredResponse, text: str) -> None:
        if self._folder is not None:
            self._writer.submit(_write, self._folder / f"{stored.id}.json", text)

    def _read_folder(self, folder: Path) -> None:
        """Read the files of earlier runs. Raises InvalidValue if the folder cannot be used."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for unfinished in folder.glob(".resp_*.tmp"):
                remove_abandoned(unfinished)
            name_pattern = r"resp_[0-9a-f]{32}\.json"  # other files are left alone
            files = [
                file for file in folder.iterdir() if re.fullmatch(name_pattern, file.name) and file.is_file()
            ]
            files.sort(key=lambda file: file.stat().st_mtime_ns)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise InvalidValue(f"--store {folder} cannot be used: {error.strerror}") from error
        waiting: dict[str, tuple[StoredResponse, str | None]] = {}  # and the id of the one before it
        for file in files:
            try:
                data = file.read_bytes()
                content: dict[str, Any] = json.loads(data)
                stored = _stored(content, len(data))
                if f"{stored.id}.json" != file.name or not stored.input:
                    raise ValueError
                waiting[stored.id] = stored, content.get("previous")
            except (OSError, ValueError, ValidationError, LookupError, TypeError, RecursionError):
                LOG.warning("a damaged file of --store is ignored: %s", file.name)
        count = -1
        while count != len(waiting):  # usually once: a file is older than those that continue it
            count = len(waiting)
            for stored, previous in tuple(waiting.values()):
                if previous is None or previous in self._stored:
                    stored.previous = None if previous is None else self._stored[previous]
                    self._add(stored)
                    del waiting[stored.id]
        for stored, previous in waiting.values():
            LOG.warning("%s.json of --store is ignored: it continues %s, which is gone", stored.id, previous)
        for stored in tuple(self._stored.values()):
            if stored.gone is not None:
                self.forget(stored, stored.gone)
        self._make_room()


@dataclass(frozen=True)
class KeyResponses:
    """The responses of one API key: no other key can read, continue or delete them."""

    store: ResponseStore
    owner: str

    def save(self, response: Json, items: Sequence[ItemField], previous: StoredResponse | None) -> None:
        """Keep a response, the items of its request, and the response that it continues."""
        items = tuple(item.identified() for item in items)
        if previous is not None and not self.store.holds(previous):  # it was dropped during the answer
            items, previous = (*previous.answered, *previous.output, *items), None
        self.store.add(StoredResponse(response, items, _output(response), previous, self.owner))

    def find(self, id: str) -> StoredResponse:
        """Return a response. Raises Failure (404)."""
        if (stored := self.store.find(self.owner, id)) is None:
            raise Failure(404, f"Response with id {self.store.missing(self.owner, id)}")
        return stored

    def delete(self, id: str) -> None:
        """Forget a response. Later responses keep its turns in their conversation. Raises Failure (404)."""
        self.store.forget(self.find(id), "it was deleted")

    def continued(self, id: str | None) -> StoredResponse | None:
        """Return the response that a request continues; None if it begins anew. Raises Failure (400)."""
        if id is None:
            return None
        if (stored := self.store.find(self.owner, id)) is None:
            message = f"Previous response with id {self.store.missing(self.owner, id)}"
            raise invalid(message, "previous_response_id", "previous_response_not_found")
        return stored

    def conversation(self, previous: str | None, given: Sequence[ItemField]) -> tuple[ItemField, ...]:
        """Return the items of a request after those that it continues. Raises Failure (400)."""
        items = self.referenced(given)
        stored = self.continued(previous)
        return items if stored is None else (*stored.answered, *stored.output, *items)

    def referenced(self, items: Sequence[ItemField]) -> tuple[ItemField, ...]:
        """Return items; for each reference, the item of a stored answer. Raises Failure (400)."""
        return tuple(self._referenced(item, f"input.{i}") for i, item in enumerate(items))

    def _referenced(self, item: ItemField, field: str) -> ItemField:
        if item.type != "item_reference":
            return item
        id = required(item.id, f"{field}.id")
        if (stored_item := self.store.answered_item(self.owner, id)) is None:
            why = "no stored response has it: send the item itself"
            raise invalid_field(field, f"item {id[:MAX_NAME_CHARS]!r} not found: {why}")
        return stored_item


def _output(response: Json) -> tuple[ItemField, ...]:
    """Return the answer as items of the next turn. Raises ValidationError for damaged ones."""
    return tuple(map(ItemField.model_validate, response["output"]))


def _stored(content: Mapping[str, Any], size: int) -> StoredResponse:
    """Return the response of a file, which is not connected yet. Raises ValidationError and others."""
    response, items = content["response"], tuple(map(ItemField.model_validate, content["input"]))
    gone = content.get("gone")
    owner = content.get("owner", "")
    stored = StoredResponse(response, items, _output(response), None, owner, size, gone=gone)
    if not all(isinstance(text, str | None) for text in (stored.gone, content.get("previous"))):
        raise ValueError
    if not isinstance(stored.owner, str):
        raise ValueError
    return stored


def _write(file: Path, text: str) -> None:
    try:
        write_atomically(file, text)
    except (OSError, MemoryError) as error:
        LOG.warning("a response is kept in memory only: %s", one_line(error))


# --- routes


def add_routes(app: Starlette, store: ResponseStore) -> None:
    """Add the routes that read and delete stored responses."""

    async def read_or_delete(http_request: Request) -> Response:
        id, responses = http_request.path_params["id"], store.of(given_key(http_request.headers))
        if http_request.method == "DELETE":
            responses.delete(id)
            return JSONResponse({"id": id, "object": "response", "deleted": True})
        read_query(http_request, ReadQuery)
        return JSONResponse(responses.find(id).response)

    async def input_items(http_request: Request) -> Response:
        stored = store.of(given_key(http_request.headers)).find(http_request.path_params["id"])
        query = read_query(http_request, PageQuery)
        return JSONResponse(_page([item.json_item() for item in stored.answered], query))

    app.add_route("/v1/responses/{id}", read_or_delete, methods=["GET", "DELETE"])
    app.add_route("/v1/responses/{id}/input_items", input_items, methods=["GET"])


def _page(items: list[Json], query: PageQuery) -> Json:
    """Return a page of items as OpenAI lists it. Raises Failure (400)."""
    items, after = items if query.order == "asc" else items[::-1], query.after
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise invalid_field("after", f"{after[:MAX_NAME_CHARS]!r} is none of the items")
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + query.limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + len(page) < len(items),
    }
