"""Keep responses for `previous_response_id`, and serve them at the routes under `/v1/responses/ID`.

They are kept in memory; with `--store FOLDER` each is a JSON file in a folder, too. An id that a client sends
is only looked up in memory: it never becomes a path.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_spec.checkpoint.files import write_atomically
from mlx_spec.errors import InvalidValue

from ..errors import LOG, MAX_NAME_CHARS, Failure, invalid
from ..http import Json
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
        """Return the item as OpenAI lists it."""
        item: Json = {"type": "message", "status": "completed", **self.model_dump(exclude_none=True)}
        own = "output_text" if self.role == "assistant" else "input_text"
        for key in {"content", "output"} & item.keys():
            for part in item[key]:
                part["type"] = own if part["type"] == "text" else part["type"]
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


@dataclass(frozen=True)
class StoredResponse:
    """A response, and the conversation that it answered: all earlier turns without instructions."""

    response: Json
    input: tuple[ItemField, ...]
    size: int  # bytes as JSON

    @property
    def conversation(self) -> tuple[ItemField, ...]:
        """Return the items that the next turn continues. Raises ValidationError for damaged ones."""
        return *self.input, *map(ItemField.model_validate, self.response["output"])


class ResponseStore:
    """The latest responses. Only the event loop may use this class."""

    MAX_RESPONSES = 1000  # a day of work in one agent; more would only lengthen the start with `--store`
    MAX_BYTES = 64 * 2**20  # of all responses as JSON: two bodies of the largest size, little beside weights

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._writer = ThreadPoolExecutor(1, "mlx_spec storing")  # one, so a write comes before its removal
        self._stored: dict[str, StoredResponse] = {}  # the oldest first
        self._gone: dict[str, str] = {}  # id -> why the response is gone
        if folder is not None:
            self._read_folder(folder)

    def save(self, response: Json, items: Sequence[ItemField]) -> None:
        """Keep a response and the items that it answered; the oldest responses make room."""
        items = tuple(item.identified() for item in items)
        dumped = [item.model_dump(exclude_none=True) for item in items]
        text = json.dumps({"response": response, "input": dumped}, ensure_ascii=False)
        if self._folder is not None:
            self._writer.submit(_write, self._folder / f"{response['id']}.json", text)
        self._add(StoredResponse(response, items, len(text.encode())))

    def find(self, id: str) -> StoredResponse:
        """Return a response. Raises Failure (404)."""
        if id not in self._stored:
            raise Failure(404, f"Response with id {self._missing(id)}")
        return self._stored[id]

    def conversation(self, previous: str | None, given: Sequence[ItemField]) -> tuple[ItemField, ...]:
        """Return the items of a request after those that it continues. Raises Failure (400)."""
        items = tuple(self._referenced(item, f"input.{i}") for i, item in enumerate(given))
        if previous is None:
            return items
        if previous not in self._stored:
            message, field = f"Previous response with id {self._missing(previous)}", "previous_response_id"
            raise invalid(message, field, "previous_response_not_found")
        return *self._stored[previous].conversation, *items

    def _referenced(self, item: ItemField, field: str) -> ItemField:
        """Return an item, or the item of a stored answer if it is a reference. Raises Failure (400)."""
        if item.type != "item_reference":
            return item
        id = required(item.id, f"{field}.id")
        for stored in reversed(self._stored.values()):
            for found in stored.response["output"]:
                if found.get("id") == id:
                    return ItemField.model_validate(found)
        why = "no stored response has it: send the item itself"
        raise invalid(f"{field}: item {id[:MAX_NAME_CHARS]!r} not found: {why}", field)

    def delete(self, id: str) -> None:
        """Forget a response. Later responses keep its turns in their conversation. Raises Failure (404)."""
        self.find(id)
        self._drop(id, "it was deleted")

    def _missing(self, id: str) -> str:
        unknown = "it was never stored by this server, or before its start without --store"
        return f"{id[:MAX_NAME_CHARS]!r} not found: {self._gone.get(id, unknown)}"

    def _add(self, stored: StoredResponse) -> None:
        self._stored[stored.response["id"]] = stored
        most, most_bytes = self.MAX_RESPONSES, self.MAX_BYTES
        while len(self._stored) > most or sum(s.size for s in self._stored.values()) > most_bytes:
            limits = f"{most} responses and {most_bytes // 2**20} MiB are kept"
            self._drop(next(iter(self._stored)), f"it made room for newer ones, {limits}")

    def _drop(self, id: str, why: str) -> None:
        del self._stored[id]
        self._gone[id] = why
        if len(self._gone) > 10_000:  # reasons for errors; about 1 MB of memory
            del self._gone[next(iter(self._gone))]
        if self._folder is not None:
            self._writer.submit((self._folder / f"{id}.json").unlink, missing_ok=True)

    def _read_folder(self, folder: Path) -> None:
        """Read the files of earlier runs. Raises InvalidValue if the folder cannot be used."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Files of a process that was killed while it wrote.
            for unfinished in folder.glob(".resp_*.tmp"):
                unfinished.unlink()
            own = r"resp_[0-9a-f]{32}\.json"  # other files are left alone
            files = [file for file in folder.iterdir() if re.fullmatch(own, file.name) and file.is_file()]
            files.sort(key=lambda file: file.stat().st_mtime_ns)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise InvalidValue(f"--store {folder} cannot be used: {error.strerror}") from error
        for file in files:
            try:
                data = file.read_bytes()
                content: dict[str, Any] = json.loads(data)
                items = tuple(map(ItemField.model_validate, content["input"]))
                stored = StoredResponse(content["response"], items, len(data))
                if f"{stored.response['id']}.json" != file.name or not stored.conversation:
                    raise ValueError
            except (OSError, ValueError, ValidationError, LookupError, TypeError, RecursionError):
                LOG.warning("a damaged file of --store is ignored: %s", file.name)
                continue
            self._add(stored)


def _write(file: Path, text: str) -> None:
    try:
        write_atomically(file, text)
    except OSError as error:
        LOG.warning("a response is kept in memory only: %s", error.strerror)


# --- routes


def add_routes(app: Starlette, store: ResponseStore) -> None:
    """Add the routes that read and delete stored responses."""

    async def read_or_delete(http_request: Request) -> Response:
        id = http_request.path_params["id"]
        if http_request.method == "DELETE":
            store.delete(id)
            return JSONResponse({"id": id, "object": "response", "deleted": True})
        read_query(http_request, ReadQuery)
        return JSONResponse(store.find(id).response)

    async def input_items(http_request: Request) -> Response:
        items = store.find(http_request.path_params["id"]).input
        query = read_query(http_request, PageQuery)
        return JSONResponse(_page([item.json_item() for item in items], query))

    app.add_route("/v1/responses/{id}", read_or_delete, methods=["GET", "DELETE"])
    app.add_route("/v1/responses/{id}/input_items", input_items, methods=["GET"])


def _page(items: list[Json], query: PageQuery) -> Json:
    """Return a page of items as OpenAI lists it. Raises Failure (400)."""
    items, after = items if query.order == "asc" else items[::-1], query.after
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise invalid(f"after: {after[:MAX_NAME_CHARS]!r} is none of the items", "after")
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + query.limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + len(page) < len(items),
    }
