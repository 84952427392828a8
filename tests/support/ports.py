"""Ports for programs that a test starts."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from itertools import cycle

# Below those that Linux (from 32768) and macOS (from 49152) give to outgoing connections, so that no
# connection of another test takes one before its program listens. Each worker has a thousand of its own.
FIRST = 20_000 + 1000 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 12)
NUMBERS = cycle(range(FIRST, FIRST + 1000))


def free_ports(count: int) -> list[int]:
    """Return free ports of 127.0.0.1."""
    with ExitStack() as held:
        found: list[int] = []
        while len(found) < count:
            port = next(NUMBERS)
            try:
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            found.append(port)
        return found
