"""Events on their way from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from queue import SimpleQueue

from mlx_spec.apps.server.ask import Closed, Ended, Event, Failed, Opened, RoundDone

LAST: frozenset[type[Event]] = frozenset({Closed, Failed})
STEPS: frozenset[type[Event]] = LAST | {Opened, RoundDone, Ended}  # one of these ends a step of the engine


class Waking:
    """A thread that wakes event loops.

    Whoever wakes a loop lets go of the interpreter, and the loop may keep it for as long as it takes to write
    a chunk. The engine only puts a note into a queue, which lets go of nothing.
    """

    def __init__(self) -> None:
        self._notes: SimpleQueue[tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, unless it has begun."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="mlx_spec waking", daemon=True)
                self._thread.start()

    def call(self, loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
        """Have a loop call a function. Never waits."""
        self._notes.put((loop, function))

    def _work(self) -> None:
        while True:
            loop, function = self._notes.get()
            with suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(function)


_WAKING = Waking()


class Inbox:
    """The events of one request, in the order in which they were put. To be made on the loop that reads them.

    The loop is woken by the types of `wakes` alone, and once for all that it has not looked at yet. The other
    events wait for one.
    """

    def __init__(self, wakes: Collection[type[Event]], seconds: float | None) -> None:
        _WAKING.start()
        self._loop = asyncio.get_running_loop()
        self._wakes = wakes
        self._seconds = seconds  # of silence that `get` tells of; None: of none
        self._events: deque[Event] = deque()
        self._called = False  # the loop knows, and has not looked yet
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        """Add an event, on any one thread. Never waits."""
        self._events.append(event)  # before the look at `_called`, which the loop resets before it looks here
        if type(event) in self._wakes and not self._called:
            self._called = True
            _WAKING.call(self._loop, self._look)

    async def get(self) -> Event | None:
        """The next event, on the loop; None where there was silence."""
        if not self._events:
            await self._word()
        return self._events.popleft() if self._events else None

    async def _word(self) -> None:
        self._waiter = self._loop.create_future()
        alarm = None if self._seconds is None else self._loop.call_later(self._seconds, self._release)
        try:
            await self._waiter
        finally:
            if alarm is not None:
                alarm.cancel()

    def _look(self) -> None:
        self._called = False
        if self._events:  # else they have been read already, and to be woken would be taken for silence
            self._release()

    def _release(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
