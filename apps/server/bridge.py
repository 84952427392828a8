"""From the engine's thread to the event loop: the events of a request, until it ends or nobody listens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine, Iterable, Mapping
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from mlx_spec.apps.server.ask import Ask, Closed, Event, Failed
from mlx_spec.apps.server.failures import Failure, broken
from mlx_spec.apps.server.inbox import LAST, STEPS, Inbox
from mlx_spec.apps.server.log import LOG

LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}  # JSON escapes all others

T = TypeVar("T")
Writer = Callable[[Event | None], Iterable[str]]  # an event, or silence, to text of a stream


class Job(Protocol):
    """An admitted request."""

    def cancel(self) -> None:
        """End it within a round. Harmless when it has ended, or when called again."""
        ...


class Works(Protocol):
    """What the routes need of the worker. Both functions return at once and are called on the event loop."""

    def resolve(self, name: str | None) -> str:
        """The model that a name stands for; None: the first. Raises Failure (404)."""
        ...

    def submit(self, ask: Ask, send: Callable[[Event], None]) -> Job:
        """Admit a request; `send` is called on the engine's thread. Raises Failure (400, 429, 503)."""
        ...


async def events(
    worker: Works, ask: Ask, wakes: Collection[type[Event]] = STEPS
) -> AsyncGenerator[Event, None]:
    """The events of a request, `Closed` or `Failed` the last; closed early, it cancels the request.

    They come when one of `wakes` does. Raises Failure where the worker does not admit it.
    """
    async with aclosing(paced(worker, ask, None, wakes)) as source:
        async for event in source:
            if event is not None:
                yield event


async def paced(
    worker: Works, ask: Ask, seconds: float | None, wakes: Collection[type[Event]] = STEPS
) -> AsyncGenerator[Event | None, None]:
    """`events`, with None after each `seconds` of silence."""
    inbox = Inbox(wakes, seconds)
    job = worker.submit(ask, inbox.put)
    try:
        event: Event | None = None
        while not isinstance(event, Closed | Failed):
            event = await inbox.get()
            yield event
    finally:
        job.cancel()


async def collect(request: Request, worker: Works, ask: Ask) -> list[Event]:
    """All events of a request, whose body has been read.

    Raises Failure where it is not admitted or fails, and when the client hangs up: then nobody reads the
    response, and the request is cancelled.
    """
    return await _while_connected(request, _all(worker, ask))


class Streaming(StreamingResponse):
    """A stream of server-sent events; the request is cancelled when the client hangs up."""

    def __init__(self, source: AsyncGenerator[Event | None, None], frames: AsyncIterator[str]) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(frames, media_type="text/event-stream", headers=headers)
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all, then close the source, which may never have been read."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._source.aclose()


async def stream(request: Request, source: AsyncGenerator[Event | None, None], write: Writer) -> Streaming:
    """The response that streams `source`.

    Raises Failure, which still can have a status of its own, where the request is not admitted, fails before
    its first event or silence, or the client hangs up until then.
    """
    try:
        first = await _while_connected(request, _first(source))
    except BaseException:
        await source.aclose()
        raise
    return Streaming(source, _frames(first, source, write))


def frame(name: str, content: Mapping[str, Any]) -> str:
    """A named server-sent event."""
    return f"event: {name}\ndata: {one_line(content)}\n\n"


def one_line(content: Mapping[str, Any]) -> str:
    """JSON without any character at which a client may end a line, those of Unicode included."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).translate(LINE_ENDS)


async def _first(source: AsyncGenerator[Event | None, None]) -> Event | None:
    event = await anext(source)
    if isinstance(event, Failed):
        raise event.failure
    return event


async def _frames(
    first: Event | None, source: AsyncGenerator[Event | None, None], write: Writer
) -> AsyncIterator[str]:
    try:
        for text in write(first):
            yield text
        async for event in source:
            for text in write(event):
                yield text
    except Exception as error:  # a bug of ours: told as this protocol tells of failures
        LOG.error("a stream failed", exc_info=error)
        for text in write(Failed(broken())):
            yield text


async def _all(worker: Works, ask: Ask) -> list[Event]:
    found: list[Event] = []
    async with aclosing(events(worker, ask, LAST)) as source:
        async for event in source:
            if isinstance(event, Failed):
                raise event.failure
            found.append(event)
    return found


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns or raises; it is cancelled, and Failure raised, when the client hangs up."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Failure(499, "the client hung up", code="disconnected")
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
