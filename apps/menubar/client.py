"""What a running server says of itself, over HTTP."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any

from mlx_spec.apps.menubar.figures import Counters

PATIENCE = 2.0  # seconds for an answer
LARGEST = 4 * 2**20  # bytes of one
SERVICE = "mlx_spec"


@dataclass(frozen=True)
class Address:
    """Where a server listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """For clients on this machine: one that listens everywhere is also here."""
        return (
            f"http://[{self.reached}]:{self.port}"
            if ":" in self.reached
            else f"http://{self.reached}:{self.port}"
        )

    @property
    def reached(self) -> str:
        """The host to connect to."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)


class Client:
    """Asks one server. Every method returns None where it does not answer as ours does."""

    def __init__(self, address: Address, key: str | None = None) -> None:
        self._address = address
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    def health(self) -> str | None:
        """How it is: "ok", "loading", "draining" or "failed". None also for a server that is not ours."""
        found = self._object("/health", (200, 503))
        status = found.get("status")
        return status if found.get("service") == SERVICE and isinstance(status, str) else None

    def names(self) -> tuple[str, ...] | None:
        """The models it serves without their aliases, loaded ones first."""
        rows = self._object("/v1/models", (200,)).get("data")
        if not isinstance(rows, list):
            return None
        models = [row for row in rows if isinstance(row, dict) and row.get("id") == row.get("model")]
        return tuple(str(row["id"]) for row in sorted(models, key=lambda row: not row.get("loaded")))

    def counters(self) -> Counters | None:
        """Its metrics."""
        text = self._text("/metrics", (200,))
        return None if text is None else Counters(text)

    def _object(self, path: str, statuses: tuple[int, ...]) -> dict[str, Any]:
        try:
            found = json.loads(self._text(path, statuses) or "{}")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _text(self, path: str, statuses: tuple[int, ...]) -> str | None:
        connection = http.client.HTTPConnection(
            self._address.reached, self._address.port, timeout=PATIENCE
        )  # which asks no proxy
        try:
            connection.request("GET", path, headers=self._headers)
            response = connection.getresponse()
            content = response.read(LARGEST)
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        return content.decode("utf-8", "replace") if response.status in statuses else None
