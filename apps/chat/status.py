"""What the user reads after an answer: how fast it was and what speculation did for it."""

from __future__ import annotations

from mlx_spec.session import Statistics
from mlx_spec.types import Reason

TOLD = 16  # tokens; the gain of fewer is chance
OFF = frozenset({Reason.DISABLED, Reason.NO_DRAFTER, Reason.COST, Reason.ACCEPTANCE, Reason.LEDGER})


def status_line(statistics: Statistics, max_tokens: int) -> str:
    """One line: tokens/s, gain, draft length and acceptance, on or off and why, tokens, what cut it."""
    speed = f"{statistics.tokens_per_second:.1f} tokens/s"
    gain = statistics.gain if statistics.generated_tokens >= TOLD else None
    parts = [speed if gain is None else f"{speed}, {gain:.2f} x plain"]
    if statistics.speculative_rounds:
        rate = statistics.accepted / statistics.drafted
        length = f"{statistics.acceptance_length:.1f} tokens/round"
        parts.append(f"K={statistics.draft_length}, {rate:.0%} accepted, {length}")
    if statistics.rounds:
        parts.append(_speculation(statistics.reason))
    parts.append(_tokens(statistics))
    if statistics.finish_reason is None:
        parts.append("interrupted")
    elif statistics.finish_reason == "length":
        full = statistics.generated_tokens < max_tokens
        parts.append("cut: the context is full" if full else f"cut at --max-tokens {max_tokens}")
    return " · ".join(parts)


def details(statistics: Statistics) -> list[str]:
    """The lines that `--stats` adds."""
    read = statistics.prompt_tokens - statistics.reused_tokens
    lines = [
        f"prompt: {statistics.prompt_tokens} tokens, {statistics.reused_tokens} reused, "
        f"the rest read in {statistics.prefill_seconds:.2f} s{_rate(read, statistics.prefill_seconds)}",
        f"answer: {statistics.generated_tokens} tokens in {statistics.rounds} rounds "
        f"and {statistics.decode_seconds:.2f} s",
    ]
    if statistics.drafted:
        lines += [
            f"draft tokens: {statistics.drafted} in {statistics.speculative_rounds} rounds, "
            f"{statistics.accepted} accepted ({statistics.accepted / statistics.drafted:.0%})",
            f"accepted by position: {_by_position(statistics)}",
        ]
    return lines


def _speculation(reason: Reason) -> str:
    why = reason.value.removeprefix("speculation ")
    return f"speculation {'off' if reason in OFF else 'on'}: {why}"


def _tokens(statistics: Statistics) -> str:
    count = statistics.generated_tokens
    generated = f"{count} token{'' if count == 1 else 's'}"
    if not statistics.reused_tokens:
        return generated
    return f"{generated}, {statistics.reused_tokens} of {statistics.prompt_tokens} prompt tokens reused"


def _by_position(statistics: Statistics) -> str:
    """Of the rounds that drafted a token at each position, the share that accepted it."""
    accepted = (*statistics.accepted_at, *[0] * len(statistics.drafted_at))
    shares = [got / tried for got, tried in zip(accepted, statistics.drafted_at, strict=False)]
    return ", ".join(f"{position} {share:.0%}" for position, share in enumerate(shares, 1))


def _rate(tokens: int, seconds: float) -> str:
    return f" ({tokens / seconds:.1f} tokens/s)" if seconds > 0 else ""
