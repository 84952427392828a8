"""Wait until something holds."""

from __future__ import annotations

import time
from collections.abc import Callable

LIMIT = 120  # seconds until something counts as never to come


def wait_until(holds: Callable[[], object], seconds: float = LIMIT, pause: float = 0.01) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came true"
        time.sleep(pause)
