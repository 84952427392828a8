"""Answer HTTP requests: read a body, hand it to the engine thread, and write its events or its failure.

Each protocol is an `Api`: a body, its parser, and a `Writer` for its answers. `answer` is the route of all.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import cache
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from .engine.answers import LAST_EVENTS, STEP_EVENTS, Event, Failed, Finished, TextDelta
from .engine.engine_thread import EngineThread
from .engine.job import Turns
from .errors import LOG, Failure, hung_up, internal_error
from .requests.parameters import OpenFields, check_unknown
from .requests.parsing import check_limits, read_body
from .requests.request import GenerationRequest
from .settings import Settings

# Beginnings of paths of other servers -> what the error says.
NOT_HERE = {
    "/v1/embeddings": "there are no embeddings here",
    "/embedding": "there are no embeddings here",
    "/v1/rerank": "there is no reranking here",
    "/rerank": "there is no reranking here",
    "/v1/audio": "only text is read and written here",
    "/v1/images": "only text is read and written here",
    "/v1/moderations": "answers are not moderated here",
    "/v1/messages/batches": "send the requests at once: they share every pass",
    "/v1/batches": "send the requests at once: they share every pass",
    "/v1/files": "send the text itself",
    "/v1/responses/compact": "send as much as the context holds",
    "/completion": "ask /v1/completions or /infill",
}

T = TypeVar("T")
Json = dict[str, Any]
Events = AsyncGenerator[Event | None, None]  # None stands for silence


class Writer(Protocol):
    """Writes the events of one answer in the form of a protocol."""

    def frames(self, event: Event | None) -> Iterable[str]:
        """Return the text of a stream for an event; None stands for silence."""

    def whole(self, events: list[Event]) -> Json:
        """Return the body of a response without a stream."""


# --- events from the engine thread to the event loop


LoopCall = tuple[asyncio.AbstractEventLoop, Callable[[], None]]
_loop_calls: SimpleQueue[LoopCall] = SimpleQueue()  # functions that event loops shall call


@cache
def _start_waking() -> None:
    """Start the thread that wakes event loops, once.

    `call_soon_threadsafe` releases the GIL. If the engine called it, the loop could then delay the engine. So
    the engine only puts the call into a queue.
    """

    def wake() -> None:
        while True:
            loop, function = _loop_calls.get()
            with suppress(RuntimeError):  # the loop is closed: no client listens
                loop.call_soon_threadsafe(function)

    threading.Thread(target=wake, name="mlx_spec waking", daemon=True).start()


class EventQueue:
    """The events of one request, in order. Create it on the event loop that reads them.

    Only events of the types in `wakes` wake the loop, once until it looks. Other events wait for these.
    """

    def __init__(self, wakes: Collection[type[Event]], silence_s: float | None) -> None:
        _start_waking()
        self._loop = asyncio.get_running_loop()
        self._wakes = wakes
        self._silence_s = silence_s  # seconds without an event after which `get` returns None
        self._events: deque[Event] = deque()
        self._notified = False  # the loop has been told to look, and has not looked yet
        self._arrived = asyncio.Event()

    def put(self, event: Event) -> None:
        """Add an event, on any thread. Never waits."""
        self._events.append(event)  # before `_notified` is read: the loop resets it before it looks here
        if type(event) in self._wakes and not self._notified:
            self._notified = True
            _loop_calls.put((self._loop, self._look))

    async def get(self) -> Event | None:
        """Return the next event, or None after a silence. Called on the loop."""
        if not self._events:
            self._arrived.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._silence_s):
                    await self._arrived.wait()
        return self._events.popleft() if self._events else None

    def _look(self) -> None:
        self._notified = False
        if self._events:  # else `get` has read them already, and would return None as after a silence
            self._arrived.set()


async def read_events(
    engine: EngineThread,
    request: GenerationRequest,
    silence_s: float | None = None,
    wakes: Collection[type[Event]] = STEP_EVENTS,
    turns: Turns | None = None,
) -> Events:
    """Yield the events of a request up to `Finished` or `Failed`, and None after each silence.

    Closing the generator early cancels the request. Raises Failure if the engine does not admit it.
    """
    queue = EventQueue(wakes, silence_s)
    job = engine.submit(request, queue.put, turns)
    try:
        event: Event | None = None
        while not isinstance(event, Finished | Failed):
            event = await queue.get()
            if not request.shows_thinking and isinstance(event, TextDelta) and event.kind == "thinking":
                event = TextDelta(event.index, "thinking", "")  # hidden, but it does not count as silence
            yield event
    finally:
        job.cancel()


# --- answers


def openai_error(failure: Failure) -> Response:
    """Return a failure as OpenAI's clients read it."""
    return JSONResponse(failure.body, failure.status)


@dataclass(frozen=True)
class Api:
    """A protocol: the form of its bodies, how to read one, and how to write an answer or a failure."""

    body: type[Any]
    parse: Callable[[Any, str], GenerationRequest]  # raises Failure (400) that names the field
    writer: Callable[[Any, GenerationRequest], Writer]
    media_type: str = "text/event-stream"  # of a stream
    checked: Callable[[Any], Sequence[OpenFields]] = lambda body: (body,)  # objects with parameters to check
    is_done: Callable[[GenerationRequest], bool] = lambda request: False  # the engine has nothing to do
    turns: Turns | None = None  # answers a request in place of choices in the batch
    error: Callable[[Failure], Response] = openai_error  # of a request whose response has not begun
    header: str = ""  # that all clients of the protocol send


async def answer(http_request: Request, *, engine: EngineThread, settings: Settings, api: Api) -> Response:
    """Answer a request, whole or as a stream. It is cancelled when the client hangs up.

    Raises Failure if the request is not admitted, or fails before its response begins.
    """
    body = await read_body(http_request, api.body)
    request = api.parse(body, engine.resolve(body.model or None))
    for part in api.checked(body):
        notes = check_unknown(part, settings.allow_extra_parameters)
        request = replace(request, notes=(*request.notes, *notes))
    key = given_key(http_request.headers)
    streams = bool(body.stream)
    request = replace(request, key=key, earlier_answers=settings.earlier_answers, progress=streams)
    if api.is_done(request):
        return JSONResponse(api.writer(body, request).whole([]))
    check_limits(request, settings.limits)
    writer = api.writer(body, request)
    if not streams:
        events = await _while_connected(
            http_request.receive,
            _collect(read_events(engine, request, wakes=LAST_EVENTS, turns=api.turns)),
        )
        return JSONResponse(writer.whole(events))
    source = read_events(engine, request, settings.keepalive_seconds, turns=api.turns)
    return EventStream(source, writer, settings.keepalive_seconds, api.media_type)


def given_keys(headers: Headers) -> tuple[str, str]:
    """Return the keys of a request, as `x-api-key` and as Bearer token; "" for a missing one."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else ""


def given_key(headers: Headers) -> str:
    """Return the key of a request; "" without one."""
    return next(filter(None, given_keys(headers)), "")


class EventStream(StreamingResponse):
    """A stream of events, which closes its source in the end."""

    def __init__(self, source: Events, writer: Writer, keepalive_s: float, media_type: str) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__((), media_type=media_type, headers=headers)
        self._source, self._writer, self._keepalive_s = source, writer, keepalive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. Raises Failure if its first event is one."""
        async with aclosing(self._source):
            first = await _while_connected(receive, anext(self._source))
            if isinstance(first, Failed):
                raise first.failure
            self.body_iterator = self._frames(first)
            await super().__call__(scope, receive, send)

    async def _frames(self, event: Event | None) -> AsyncIterator[str]:
        """Yield the text of `event` and of all later ones. Events without text count as silence."""
        try:
            for text in self._writer.frames(event):
                yield text
            written = time.monotonic()
            async for event in self._source:
                texts = list(self._writer.frames(event))
                if not texts and time.monotonic() - written >= self._keepalive_s:
                    texts = list(self._writer.frames(None))
                for text in texts:
                    yield text
                if texts:
                    written = time.monotonic()
        except Exception as error:  # a bug: the client gets a failure in the form of its protocol
            LOG.error("a stream failed", exc_info=error)
            for text in self._writer.frames(Failed(internal_error())):
                yield text


def comment(text: str) -> str:
    """Return a comment of a stream: clients skip it, people and proxies see that it goes on."""
    return f": {text}\n\n"


def named_event(name: str, content: Mapping[str, Any]) -> str:
    """Return a named server-sent event."""
    return f"event: {name}\ndata: {json_line(content)}\n\n"


def data_event(content: Mapping[str, Any]) -> str:
    """Return a server-sent event without a name."""
    return f"data: {json_line(content)}\n\n"


def json_line(content: Mapping[str, Any]) -> str:
    """Return JSON without characters that a client may take for the end of a line."""
    line_ends = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}  # JSON escapes all others
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).translate(line_ends)


async def _collect(source: Events) -> list[Event]:
    async with aclosing(source):
        events = [event async for event in source if event is not None]
    if isinstance(last := events[-1], Failed):
        raise last.failure
    return events


async def _while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Return what `work` returns. If the client hangs up, cancel it and raise Failure."""
    working = asyncio.ensure_future(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise hung_up()
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# --- failures


def error_response(scope: Scope, failure: Failure) -> Response:
    """Return the response to a request that failed before its response began.

    Its protocol follows the path, and on paths that protocols share, such as /v1/models, the client.
    """
    apis: Mapping[str, Api] = scope["app"].state.apis
    fitting = [api for start, api in apis.items() if scope["path"].startswith(start)]
    fitting += [api for api in apis.values() if api.header in Headers(scope=scope)]
    response = fitting[0].error(failure) if fitting else openai_error(failure)
    if failure.retry_after is not None:
        response.headers["retry-after"] = str(failure.retry_after)
    if failure.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    if failure.status == 408:
        response.headers["connection"] = "close"  # the rest of the body would be read as another request
    return response


def is_base_in_browser(path: str, headers: Headers) -> bool:
    """Return True if a browser opens the API's base URL, which the server prints: it gets the page."""
    return path == "/v1" and "text/html" in headers.get("accept", "")


async def answer_error(http_request: Request, error: Exception) -> Response:
    """Return the response to a request whose route raised an error, or that has no route.

    An unexpected exception becomes a 500 without details.
    """
    path, headers = http_request.url.path, http_request.headers
    if isinstance(error, Failure):
        return error_response(http_request.scope, error)
    if not isinstance(error, HTTPException):
        LOG.error("a request failed", exc_info=error)
        return error_response(http_request.scope, internal_error())
    message, code = str(error.detail), None
    shown = path[:128]  # a client may send a path of any length
    why = next((f": {why}" for start, why in NOT_HERE.items() if path.startswith(start)), "")
    if error.status_code == 404:
        if http_request.method in ("GET", "HEAD") and is_base_in_browser(path, headers):
            return RedirectResponse("../" if http_request.scope.get("raw_path", b"").endswith(b"/") else "./")
        message, code = f"there is nothing at {shown}{why}", "unknown_url"
    elif error.status_code == 405:
        message, code = f"{http_request.method} is not for {shown}{why}", "method_not_allowed"
    response = error_response(http_request.scope, Failure(error.status_code, message, code=code))
    response.headers.update(error.headers or {})
    return response
