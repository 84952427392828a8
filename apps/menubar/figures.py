"""From the counters of a server to the figures that a menu shows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

LINE = re.compile(r"^mlx_spec_(\w+)(?:\{(.*)\})?\s+(\S+)", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
ESCAPED = re.compile(r"\\(.)")


@dataclass(frozen=True)
class Figures:
    """How the last requests went; None for what is not known."""

    speed: float | None = None  # generated tokens per second
    gain: float | None = None  # as a multiple of plain decoding
    per_round: float | None = None  # tokens of a round that drafted
    memory: int | None = None  # bytes that MLX holds
    reason: str | None = None  # why speculation is on or off, in the server's words


UNKNOWN = Figures()


class Counters:
    """A scrape of `/metrics`, in Prometheus' text format."""

    def __init__(self, text: str) -> None:
        self._rows = [
            (name, _labels(labels or ""), float(value)) for name, labels, value in LINE.findall(text)
        ]

    def sum(self, name: str, **wanted: str) -> float | None:
        """Over all rows of that name and those labels; None if there are none."""
        values = [value for value, _ in self.rows(name, **wanted)]
        return sum(values) if values else None

    def rows(self, name: str, **wanted: str) -> list[tuple[float, Mapping[str, str]]]:
        """Values and labels."""
        return [
            (value, labels)
            for found, labels, value in self._rows
            if found == name and wanted.items() <= labels.items()
        ]


def _labels(text: str) -> dict[str, str]:
    return {
        name: ESCAPED.sub(lambda match: "\n" if match[1] == "n" else match[1], value)
        for name, value in LABEL.findall(text)
    }


NO_COUNTERS = Counters("")


class Watch:
    """The figures of one server, from one scrape to the next."""

    def __init__(self, before: Counters | None) -> None:
        """`before` holds what was counted so far; None: the first scrape says that."""
        self._before = before
        self._ended = before  # when requests had last ended: drafts are counted before that, too
        self._model: str | None = None  # that answered last
        self.figures = UNKNOWN

    def see(self, counters: Counters) -> float:
        """Take a scrape in. Returns the seconds that speculation saved since the last one."""
        before = counters if self._before is None else self._before
        speed = _ratio(
            _growth("time_per_output_token_seconds_count", before, counters),
            _growth("time_per_output_token_seconds_sum", before, counters),
        )
        accepted = _ratio(
            _growth("spec_decode_num_accepted_tokens_total", self._ended or before, counters),
            _growth("spec_decode_num_drafts_total", self._ended or before, counters),
        )
        self._model = _latest(before, counters) or self._model
        named = {} if self._model is None else {"model": self._model}
        memory = counters.sum("memory_bytes", kind="active")
        found = replace(self.figures, memory=None if memory is None else round(memory))
        if named:
            reasons = [labels["reason"] for value, labels in counters.rows("reason", **named) if value == 1]
            found = replace(found, gain=counters.sum("gain", **named), reason=(*reasons, None)[0])
        if speed is not None or accepted is not None:
            found = replace(found, per_round=None if accepted is None else 1 + accepted)
        if speed is not None:
            found = replace(found, speed=speed)
        if speed is not None or self._ended is None:
            self._ended = counters
        self.figures, self._before = found, counters
        return _growth("plain_seconds_total", before, counters) - _growth(
            "compared_seconds_total", before, counters
        )


def _growth(name: str, before: Counters, now: Counters) -> float:
    """Of a counter; one that fell began anew."""
    old, new = before.sum(name) or 0.0, now.sum(name) or 0.0
    return new - old if new >= old else new


def _ratio(above: float, below: float) -> float | None:
    return above / below if below > 0 else None


def _latest(before: Counters, now: Counters) -> str | None:
    """The model that generated most since, or ever where nothing is known of before."""
    rows = now.rows("generation_tokens_total")
    old = {} if before is now else {labels["model"]: value for value, labels in _generated(before)}
    grown = {labels["model"]: value - old.get(labels["model"], 0.0) for value, labels in rows}
    most = max(grown, key=lambda model: grown[model], default=None)
    return most if most is not None and grown[most] > 0 else None


def _generated(counters: Counters) -> list[tuple[float, Mapping[str, str]]]:
    return counters.rows("generation_tokens_total")
