"""Measurements and log-probabilities as JSON, for every protocol."""

from __future__ import annotations

import math
from typing import Any

from mlx_spec.logprobs import Alternative, TokenLogprob
from mlx_spec.session import Statistics

from .request import Timings

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have; OpenAI's own value
UNKNOWN_EARLY = ("draft_kind", "queued_ms", "ttft_ms")  # keys of `timings` that are known at the end only


def timings_json(timings: Timings) -> dict[str, Any]:
    """Return the `timings` of a response, named as in llama.cpp's server where it has them.

    `drafted_at[i]` rounds drafted more than i tokens; `accepted_at[i]` rounds accepted more than i. Rates and
    `gain` are None if nothing was measured. `reason` says why the last round drafted or did not.
    """
    statistics = timings.statistics
    processed = statistics.prompt_tokens - statistics.reused_tokens
    return {
        "draft_kind": timings.draft_kind,
        "draft_rounds": statistics.speculative_rounds,
        "draft_n": statistics.drafted,
        "draft_n_accepted": statistics.accepted,
        "drafted_at": list(statistics.drafted_at),
        "accepted_at": list(statistics.accepted_at),
        "draft_length": statistics.draft_length,
        "cache_n": statistics.reused_tokens,
        "drafter_cold_n": statistics.drafter_cold,
        "prompt_n": processed,
        "prompt_ms": _milliseconds(statistics.prefill_seconds),
        "prompt_per_second": _rate(processed, statistics.prefill_seconds),
        "predicted_n": statistics.generated_tokens,
        "predicted_ms": _milliseconds(statistics.decode_seconds),
        "predicted_per_second": _rate(statistics.generated_tokens, statistics.decode_seconds),
        "gain": statistics.gain,
        "speculation": "on" if statistics.reason.is_on else "off",
        "reason": statistics.reason.value,
        "queued_ms": _milliseconds(timings.queued_seconds),
        "ttft_ms": _milliseconds(timings.first_token_seconds),
    }


def statistics_json(index: int, statistics: Statistics) -> dict[str, Any]:
    """Return the measurements of a choice so far, under the names of `timings`."""
    values = timings_json(Timings(statistics, None, 0.0, 0.0))
    return {"index": index, **{name: value for name, value in values.items() if name not in UNKNOWN_EARLY}}


def logprob_json(token: TokenLogprob) -> dict[str, Any]:
    """Return a token, its logprob and its bytes, and the same of its likeliest alternatives."""
    return {**_token_json(token), "top_logprobs": [_token_json(other) for other in token.top]}


def finite(logprob: float) -> float:
    """Return a logprob that JSON can hold."""
    return logprob if math.isfinite(logprob) else MIN_LOGPROB


def _token_json(token: TokenLogprob | Alternative) -> dict[str, Any]:
    text = token.written.decode("utf-8", "replace")
    return {"token": text, "logprob": finite(token.logprob), "bytes": list(token.written)}


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if seconds > 0 else None
