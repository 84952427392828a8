"""Who is at a port."""

from __future__ import annotations

import contextlib
import enum
import socket

from mlx_spec.apps.menubar.client import Address, Client

TRIED = 10  # ports, from the one that was asked for
LAST = 65535


class Holder(enum.Enum):
    """Of a port."""

    NOBODY = enum.auto()
    OURS = enum.auto()  # a server of this project
    STRANGER = enum.auto()


def holder(address: Address) -> Holder:
    """Who listens there."""
    if Client(address).health() is not None:
        return Holder.OURS
    return Holder.NOBODY if is_free(address) else Holder.STRANGER


def is_free(address: Address) -> bool:
    """Whether a server could listen there now."""
    try:
        kind, _, _, _, place = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(kind, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            probe.bind(place)
            probe.listen(1)
    except OSError:
        return False
    return True


def candidates(address: Address) -> list[Address]:
    """Where to try, in order. For port 0 several free ones: somebody may take one before it is used."""
    if address.port == 0:
        with contextlib.ExitStack() as held:  # all at once, so that they differ
            probes = [held.enter_context(socket.socket()) for _ in range(TRIED)]
            for probe in probes:
                probe.bind(("127.0.0.1", 0))
            return [Address(address.host, probe.getsockname()[1]) for probe in probes]
    return [Address(address.host, port) for port in range(address.port, min(address.port + TRIED, LAST + 1))]
