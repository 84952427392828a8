"""Ports for programs that a test starts."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack


def free_ports(count: int) -> list[int]:
    """Return free ports of 127.0.0.1.

    They are below those that Linux (from 32768) and macOS (from 49152) give to outgoing connections, so that
    no connection of another test takes one before its program listens.
    """
    with ExitStack() as held:
        found: list[int] = []
        while len(found) < count:
            port = random.SystemRandom().randrange(20_000, 32_000)
            try:
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            found.append(port)
        return found
