"""Figures of a request, as every protocol reports them: how it went, and how likely its tokens were."""

from __future__ import annotations

import math
from typing import Any

from mlx_spec.apps.chat.status import OFF
from mlx_spec.apps.server.ask import Timings
from mlx_spec.types import Alternative, TokenLogprob

LEAST = -9999.0  # what a protocol without infinity writes for a token that cannot come


def timings_json(timings: Timings) -> dict[str, Any]:
    """The `timings` of a response: names as llama.cpp's server has them, where it has them.

    `accepted_at[i]` of the `drafted_at[i]` rounds that drafted more than i tokens accepted more than i. Rates
    and `gain` are None where nothing was measured. `reason` says why the last round drafted or did not.
    """
    statistics = timings.statistics
    read = statistics.prompt_tokens - statistics.reused_tokens
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
        "prompt_n": read,
        "prompt_ms": _milliseconds(statistics.prefill_seconds),
        "prompt_per_second": _rate(read, statistics.prefill_seconds),
        "predicted_n": statistics.generated_tokens,
        "predicted_ms": _milliseconds(statistics.decode_seconds),
        "predicted_per_second": _rate(statistics.generated_tokens, statistics.decode_seconds),
        "gain": statistics.gain,
        "speculation": "off" if statistics.reason in OFF else "on",
        "reason": statistics.reason.value,
        "queued_ms": _milliseconds(timings.queued_seconds),
        "ttft_ms": _milliseconds(timings.first_token_seconds),
    }


def logprob_json(token: TokenLogprob) -> dict[str, Any]:
    """A token, its logprob and its bytes, and the same of the most likely tokens in its place."""
    return {**_token_json(token), "top_logprobs": [_token_json(other) for other in token.top]}


def _token_json(token: TokenLogprob | Alternative) -> dict[str, Any]:
    logprob = token.logprob if math.isfinite(token.logprob) else LEAST
    text = token.written.decode("utf-8", "replace")
    return {"token": text, "logprob": logprob, "bytes": list(token.written)}


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if seconds > 0 else None
