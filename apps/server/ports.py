"""Ports of this machine, for the server and the menu bar."""

from __future__ import annotations

import socket
from contextlib import suppress


def connect_host(host: str) -> str:
    """Return the host for clients on this machine: loopback if a server listens everywhere."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def is_answered(host: str, port: int) -> bool:
    """Return True if a program accepts connections at a port.

    A bind does not tell on macOS, where one program may listen on 127.0.0.1 and another one on all addresses.
    """
    with (
        suppress(OSError, UnicodeError),  # a host that is not a name is for the bind to refuse
        socket.create_connection((connect_host(host), port), timeout=0.5),
    ):
        return True
    return False
