"""The seconds that speculation saved, day by day, in a file."""

from __future__ import annotations

import json
import math
from datetime import date
from pathlib import Path

from mlx_spec.apps.menubar.places import read_object
from mlx_spec.hub.files import write_atomically

DAYS = 31  # kept


class Savings:
    """What was saved on each of the last days."""

    def __init__(self, file: Path) -> None:
        self._file = file
        found = read_object(file)
        self._days = {
            day: float(value)
            for day, value in found.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }

    def add(self, day: date, seconds: float) -> None:
        """Count seconds, which are below 0 where speculation lost time, and keep them."""
        if seconds == 0:
            return
        name = day.isoformat()
        self._days[name] = self._days.get(name, 0.0) + seconds
        self._days = dict(sorted(self._days.items())[-DAYS:])
        write_atomically(self._file, json.dumps(self._days))

    def of(self, day: date) -> float | None:
        """Seconds saved on a day; None if nothing was counted on it."""
        return self._days.get(day.isoformat())
