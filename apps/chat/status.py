"""What the user reads after an answer: how fast it was and what speculation did for it."""

from __future__ import annotations

from mlx_spec.session import Statistics
from mlx_spec.types import Reason

TOLD = 16  # tokens; the gain of fewer is chance
BAR = 20  # cells of a full bar
OFF = frozenset({Reason.DISABLED, Reason.NO_DRAFTER, Reason.COST, Reason.ACCEPTANCE, Reason.BUDGET})


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


def is_on(reason: Reason) -> bool:
    """Whether the last round was to speculate."""
    return reason not in OFF


def details(statistics: Statistics, first_seconds: float | None, peak_bytes: int) -> list[str]:
    """The lines that `--stats` and `/stats` add."""
    read, wrote = statistics.prompt_tokens - statistics.reused_tokens, statistics.generated_tokens
    lines = [
        f"prompt: {statistics.prompt_tokens} tokens, {statistics.reused_tokens} reused, "
        f"the rest read in {statistics.prefill_seconds:.2f} s{_rate(read, statistics.prefill_seconds)}",
        f"answer: {wrote} tokens in {statistics.rounds} rounds "
        f"and {statistics.decode_seconds:.2f} s{_rate(wrote, statistics.decode_seconds)}",
    ]
    if statistics.drafter_cold:
        lines.append(f"drafter: {statistics.drafter_cold} of the reused tokens are new to it")
    if first_seconds is not None:
        lines.append(f"first token after {first_seconds:.2f} s")
    if statistics.drafted:
        lines += [
            f"draft tokens: {statistics.drafted} in {statistics.speculative_rounds} rounds, "
            f"{statistics.accepted} accepted ({statistics.accepted / statistics.drafted:.0%}), "
            f"mostly K={statistics.draft_length}, {statistics.acceptance_length:.1f} tokens a round",
            "accepted by position:",
            *_bars(statistics),
        ]
    gain = statistics.gain
    measured = (
        "not known, plain decoding was not measured" if gain is None else f"{gain:.2f} x plain decoding"
    )
    lines += [f"gain: {measured}", f"{_speculation(statistics.reason)}", f"peak memory: {_size(peak_bytes)}"]
    return lines


def _speculation(reason: Reason) -> str:
    why = reason.value.removeprefix("speculation ")
    return f"speculation {'on' if is_on(reason) else 'off'}: {why}"


def _tokens(statistics: Statistics) -> str:
    count = statistics.generated_tokens
    generated = f"{count} token{'' if count == 1 else 's'}"
    if not statistics.reused_tokens:
        return generated
    return f"{generated}, {statistics.reused_tokens} of {statistics.prompt_tokens} prompt tokens reused"


def _bars(statistics: Statistics) -> list[str]:
    """Of the rounds that drafted a token at each position, the share that accepted it."""
    accepted = (*statistics.accepted_at, *[0] * len(statistics.drafted_at))
    shares = [got / tried for got, tried in zip(accepted, statistics.drafted_at, strict=False)]
    full = [round(share * BAR) for share in shares]
    return [
        f"{position:4} {'█' * cells}{'░' * (BAR - cells)} {share:4.0%}"
        for position, (share, cells) in enumerate(zip(shares, full, strict=True), 1)
    ]


def _rate(tokens: int, seconds: float) -> str:
    return f" ({tokens / seconds:.1f} tokens/s)" if seconds > 0 else ""


def _size(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
