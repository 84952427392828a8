"""A port that stays free until the test takes it."""

from __future__ import annotations

import random
import socket

HOST = "127.0.0.1"
# Below those that Linux (from 32768) and macOS (from 49152) hand out to whoever asks for any.
PORTS = range(20_000, 32_000)


def free_port() -> int:
    """One with a free one behind it."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        if _is_free(port) and _is_free(port + 1):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
