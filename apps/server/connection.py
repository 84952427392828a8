"""One connection of a client: silent, slow and half-closed clients cost the others nothing."""

from __future__ import annotations

import asyncio
import resource
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """A connection that ends if its client is silent or slow, and answers a half-closed one.

    uvicorn waits for the first request forever, lets each byte of a head restart its timeout, and takes the
    end of what a client sends for a hang-up. `timeout_keep_alive` is the time for a head.
    """

    most_connections = 1000  # when more are open, those without a request give way, the oldest first
    least_silence_s = 0.5  # before a connection gives way: its request may have come and not be read yet
    unread_s = 300.0  # for a client to read what it was sent
    # After a client closed its sending side: two interim responses, to which one that hung up sends a reset.
    # A hang-up before the response begins is noticed that late. Python's client knows no interim response
    # but 100, and Go's gives up at the sixth.
    probes_s = (2.0, 2.5)

    _waiting: ClassVar[dict[Connection, None]] = {}  # without a request, of this process; the oldest first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout for the first request. Close silent connections if there are too many."""
        super().connection_made(transport)
        self._is_half_closed = self._has_head_begun = False
        self._unread: asyncio.TimerHandle | None = None
        self._await_request(self.loop.time())
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.pop(self, None)
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read data. The first byte of a head starts the timeout again, later ones do not."""
        super().data_received(data)
        if not self._is_waiting:
            self._has_head_begun = False
            self._waiting.pop(self, None)
        else:
            self._await_request(self._began if self._has_head_begun else self.loop.time())
            self._has_head_begun = True

    def eof_received(self) -> bool:  # type: ignore[override]
        """Go on answering a whole request. The client may still read (RFC 9293, 3.6)."""
        if self._is_waiting or self.cycle.more_body:
            return False
        if not self._is_half_closed:
            self._is_half_closed = True
            for seconds in self.probes_s:
                self.loop.call_later(seconds, self._probe)
        return True

    def on_response_complete(self) -> None:
        """Wait for the next request; close the connection if no more can come."""
        super().on_response_complete()
        if self._is_waiting and not self.transport.is_closing():
            if self._is_half_closed:
                self.transport.close()
            else:
                self._await_request(self.loop.time())

    def pause_writing(self) -> None:
        """End the connection if its client reads nothing for long."""
        super().pause_writing()
        self._unread = self._unread or self.loop.call_later(self.unread_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    @property
    def _is_waiting(self) -> bool:
        """Return True if no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _make_room(self) -> None:
        """Close the connections that have been silent longest, if too many are open."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = files // 2 if files != resource.RLIM_INFINITY else self.most_connections
        most = min(self.most_connections, most)
        if len(self.connections) <= most:
            return
        excess = sum(not each.transport.is_closing() for each in self.connections) - most
        silent = [each for each in self._waiting if each in self.connections]
        is_flood = excess > most // 2  # files may soon be too few
        for connection in silent[: max(excess, 0)]:
            if is_flood or connection._began + self.least_silence_s < self.loop.time():
                del self._waiting[connection]
                connection.timeout_keep_alive_handler()

    def _await_request(self, began: float) -> None:
        """Give the next head of a request its time from `began` on, in the time of the loop."""
        self._began, self._has_head_begun = began, False
        self._unset_keepalive_if_required()
        if not self.transport.is_closing():
            self._waiting.setdefault(self)
            end = began + self.timeout_keep_alive
            self.timeout_keep_alive_task = self.loop.call_at(end, self.timeout_keep_alive_handler)

    def _probe(self) -> None:
        is_open = not self._is_waiting and not self.transport.is_closing()
        if is_open and not self.cycle.response_started and self.conn.their_http_version == b"1.1":
            self.transport.write(
                self.conn.send(h11.InformationalResponse(status_code=100, headers=[])) or b""
            )
