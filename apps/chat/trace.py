"""What is written for programs: a line of JSON a round, or one object with the answer and its timings."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from mlx_spec.apps.chat.report import is_on
from mlx_spec.apps.chat.terminal import Origins
from mlx_spec.errors import InvalidValue
from mlx_spec.session import Piece, Statistics


class Trace:
    """A file with a line a round, as a context manager. Raises InvalidValue where it cannot be written."""

    def __init__(self, file: Path) -> None:
        self._name = file
        self._turn, self._round = 0, 0
        self._origins = Origins(())
        self._text: list[dict[str, Any]] = []
        try:
            self._file = file.open("w", encoding="utf-8")
        except OSError as error:
            raise self._refusal(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # what could not be written was said where it was
            self._file.close()

    def begin(self, origins: Origins) -> None:
        """A new answer."""
        self._turn, self._round, self._origins, self._text = self._turn + 1, 0, origins, []

    def piece(self, piece: Piece) -> None:
        """A piece of it: the line is written with the last one of a round. Raises InvalidValue."""
        self._text += [
            {
                "text": span.text,
                "kind": piece.kind,
                "drafter": self._origins.name(span.drafter),
                "position": span.position,
            }
            for span in piece.spans
        ]
        round = piece.round
        if round is None:
            return
        self._round += 1
        line = {
            "turn": self._turn,
            "round": self._round,
            "time": time.time(),
            "tokens": round.tokens,
            "spans": self._text,
            "drafter": self._origins.name(round.drafter),
            "proposed": round.proposed,
            "drafted": round.drafted,
            "accepted": round.accepted,
            "confidence": list(round.confidence),
            "agreement": round.agreement,
            "reason": round.reason.value,
            "seconds": round.seconds,
            "plain_seconds": round.plain_seconds,
            "finish_reason": round.finish_reason,
        }
        self._text = []
        try:
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._refusal(error) from error

    def _refusal(self, error: OSError) -> InvalidValue:
        return InvalidValue(f"--trace {self._name} cannot be written ({error.strerror}): take another file")


def as_json(statistics: Statistics, first_seconds: float | None, peak_bytes: int) -> dict[str, Any]:
    """The figures of one answer; seconds, bytes and tokens."""
    read = statistics.prompt_tokens - statistics.reused_tokens
    prefill = statistics.prefill_seconds
    return {
        "finish_reason": statistics.finish_reason or "interrupted",
        "usage": {
            "prompt_tokens": statistics.prompt_tokens,
            "reused_tokens": statistics.reused_tokens,
            "completion_tokens": statistics.generated_tokens,
        },
        "timings": {
            "first_token_seconds": first_seconds,
            "prompt_seconds": prefill,
            "prompt_tokens_per_second": read / prefill if prefill > 0 else None,
            "decode_seconds": statistics.decode_seconds,
            "tokens_per_second": statistics.tokens_per_second,
            "gain": statistics.gain,
        },
        "speculation": {
            "on": is_on(statistics.reason),
            "reason": statistics.reason.value,
            "rounds": statistics.rounds,
            "speculative_rounds": statistics.speculative_rounds,
            "draft_length": statistics.draft_length,
            "acceptance_length": statistics.acceptance_length,
            "drafted": statistics.drafted,
            "accepted": statistics.accepted,
            "drafted_at": list(statistics.drafted_at),
            "accepted_at": list(statistics.accepted_at),
        },
        "peak_memory_bytes": peak_bytes,
    }
