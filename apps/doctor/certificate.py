"""The result in a block of fixed width, to be pasted into an issue: no paths, no names of hosts or users."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from mlx_spec.apps.models import shown_number
from mlx_spec.apps.doctor import packages
from mlx_spec.apps.doctor.checks import Check, device, machine, system
from mlx_spec.apps.doctor.lossless import Comparison
from mlx_spec.apps.doctor.selftest import SelfTest
from mlx_spec.apps.doctor.ties import Gap
from mlx_spec.convert.inspect import Checkpoint
from mlx_spec.convert.progress import shown_size

WIDTH, LABEL = 76, 13
MOST = 3  # divergences shown in full
LINE = "-" * WIDTH


@dataclass(frozen=True)
class Subject:
    """The pair, for those who were not there."""

    target: str  # as it was asked for
    drafters: tuple[str, ...]  # their families
    target_is: Checkpoint | None  # None: it could not be described
    drafter: str | None
    drafter_is: Checkpoint | None


def certificate(tested: Subject, found: SelfTest, checks: list[Check], now: datetime) -> list[str]:
    """All lines, each of at most 76 columns."""
    date = now.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    title = "mlx-spec doctor"
    lines = [LINE, f"{title}{date:>{WIDTH - len(title)}}", LINE]
    for label, text in _rows(tested, found, checks):
        lines += _row(label, text)
    return [*lines, LINE]


def _rows(tested: Subject, found: SelfTest, checks: list[Check]) -> Iterator[tuple[str, str]]:
    yield "verdict", _verdict(found)
    for wrong in (*found.wrong, *found.near_ties)[:MOST]:
        yield from _finding(wrong, found.allowed)
    yield "target", _part(tested.target, tested.target_is)
    yield "drafter", _part(tested.drafter or "none", tested.drafter_is)
    yield "machine", machine()
    yield "system", system()
    yield "versions", ", ".join(f"{name} {version}" for name, version in packages.versions().items())
    yield "device", device()
    yield from _figures(found)
    for check in checks:
        if check.state == "wrong":
            yield "wrong", f"{check.name}: {check.text}"


def _verdict(found: SelfTest) -> str:
    if not found.comparisons:
        return "NOT SUBJECT: there was no time for an answer"
    if found.blocks_differ:
        return "FAILED: passes over several tokens give other logits than one token at a time"
    if found.wrong:
        return f"FAILED: {len(found.wrong)} of {len(found.comparisons)} answers are not plain decoding"
    ties = f", {len(found.near_ties)} up to a near-tie" if found.near_ties else ""
    return f"lossless: {len(found.comparisons)} of {len(found.comparisons)} answers equal{ties}"


def _finding(found: Comparison, allowed: float) -> Iterator[tuple[str, str]]:
    kind = "difference" if found.is_wrong(allowed) else "near-tie"
    how = f"{found.decoder}, {'seeded' if found.seeded else 'greedy'}, prompt {found.prompt!r}"
    if found.error is not None:
        yield "broke off", f"{how}: after {found.tokens} tokens, {found.error}"
    if found.divergence is not None:
        at = found.divergence
        place = f"token {at.position} is {at.found!r} where plain decoding says {at.expected!r}"
        yield kind, f"{how}: {place}; {_gap(at.gap)}"
    if found.drift is not None and not found.drift.within(allowed):
        yield kind, f"{how}: {found.tokens} equal tokens, but behind them {_gap(found.drift)}"


def _gap(gap: Gap) -> str:
    return f"logits {gap.logits:.3g} apart, {gap.roundings:.3g} roundings of {gap.scale.dtype}"


def _part(name: str, found: Checkpoint | None) -> str:
    """A checkpoint without its place."""
    shown = Path(name).expanduser().name if Path(name).expanduser().exists() else name
    if found is None:
        return shown
    family = found.kind or found.family
    size = f"{shown_number(found.parameters)} parameters, {shown_size(found.size)}"
    return f"{shown}, {family}, {size}, {found.precision}"


def _figures(found: SelfTest) -> Iterator[tuple[str, str]]:
    for label, seeded in (("greedy", False), ("seeded", True)):
        cases = [each for each in found.comparisons if each.seeded == seeded]
        if cases:
            yield label, _counted(cases)
    if found.noise is not None:
        most = f"{found.noise.roundings:.3g} roundings between right caches"
        yield "noise", f"{most}; near-tie: logits at most {found.allowed:.3g} roundings apart"
    if found.window is not None:
        reached = "crossed" if found.past_window else "NOT reached"
        yield "window", f"{found.window} tokens, {reached}"
    if found.left_out:
        yield "left out", f"{found.left_out} of the tests: the time was too short"
    yield from _speed(found)
    yield "test took", f"{found.seconds:.0f} s"


def _counted(cases: list[Comparison]) -> str:
    tokens, rejected = sum(c.tokens for c in cases), sum(c.drafted - c.accepted for c in cases)
    prompts = len({case.prompt for case in cases})
    return f"{len(cases)} answers to {prompts} prompts, {tokens} tokens, {rejected} draft tokens rejected"


def _speed(found: SelfTest) -> Iterator[tuple[str, str]]:
    own = found.accepted
    if own is not None and own.drafted:
        first = own.accepted_at[0] / own.drafted_at[0] if own.accepted_at else 0.0
        every = f"{first:.0%} of first draft tokens, {own.accepted / own.drafted:.0%} of all"
        yield "acceptance", f"{every}, {own.acceptance_length:.2f} tokens a round at K = 4"
    if found.plain is not None:
        yield "plain", f"{found.plain.tokens_per_second:.1f} tokens/s"
    if found.gain is not None:
        low, high = found.gain.spread
        times = f"{found.gain.gain:.2f} times plain ({low:.2f} to {high:.2f} in half of the answers)"
        yield "adaptive", f"{found.gain.tokens_per_second:.1f} tokens/s, {times}"


def _row(label: str, text: str) -> list[str]:
    indent = " " * LABEL
    return textwrap.wrap(
        " ".join(text.split()), WIDTH, initial_indent=f"{label:<{LABEL}}", subsequent_indent=indent
    )
