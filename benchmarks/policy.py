"""Does the adaptive draft length find what pays, on devices that are not here? SIMULATED: a virtual clock.

The real policy and the real round loop of `mlx_spec.engine` run with a scripted target and drafter on trivial
arrays; time comes from published cost curves (`--list` names the sources). Texts have stretches of three
difficulties that change at random; confidence is the true chance of acceptance with an error of 0.12. A draft
token costs 0.06 plain steps, a round that was not begun ahead 0.02 more, one more read 0.02.

  best fixed    the fixed number of draft tokens, 0 to 16, that was the fastest on these texts in hindsight
  of best       adaptive over best fixed, all texts together; then the worst single text
  deficit       largest loss against plain decoding at any moment, in plain steps; the ledger's bound is
                1 % of the tokens and 1.6, where rounds take what they are thought to
  no drafts     share of rounds without a verified draft token

Many short answers (40 to 150 tokens) in one conversation, some of which the drafter knows (0.93 of its tokens
are right) and others not (0.05), in any order: each kind taken alone, against plain decoding and the best
fixed number for all answers of the kind.

Then the same with tables that are wrong, with none, with confidence that means nothing or is not given.
Speeds are times plain decoding. They compare policies; they do not predict tokens a second.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from timing import finish, parser, table

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import virtual
from virtual import CURVES, TWO_CORES, WORKLOADS, Answers, Curve, Device, Text, VirtualDrafter

from mlx_spec.tuning.costs import Costs
from mlx_spec.tuning.policy import Adaptive
from mlx_spec.types import MAX_DRAFT_TOKENS, Decision, DraftLengthPolicy, Round

PLAIN = 0.03  # seconds of a plain token
SLACK = 40  # tokens of text behind the last: a drafter looks beyond it
KNOWN = (0.0, 0.5, 1.0)  # share of short answers that the drafter knows
SHORT = ("two cores", "M1 Ultra", "M5 Max", "flat")  # curves that short answers are tried with
LENGTHS = range(MAX_DRAFT_TOKENS + 1)


@dataclass(frozen=True)
class Setting:
    """How a run differs from one where everything is known."""

    name: str
    believed: str | None = ""  # the curve that the cost table is of; "": the true one; None: no table
    noise: float = 0.12  # of the confidence
    tells: bool = True  # whether there is any


TRUE = Setting("measured costs")
CASES = [  # setting, true curves
    (Setting("believes flat", "flat"), ["CUDA linear"]),
    (Setting("believes M5 Max", "M5 Max"), ["M1 Ultra"]),
    (Setting("believes M1 Ultra", "M1 Ultra"), ["M5 Max"]),
    (Setting("no table", None), list(CURVES)),
    (Setting("confidence is noise", noise=float("inf")), list(CURVES)),
    (Setting("no confidence", tells=False), list(CURVES)),
]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=6000, help="of a text")
    options.add_argument("--texts", type=int, default=5, help="of every kind")
    options.add_argument("--answers", type=int, default=30, help="short ones, of a conversation")
    options.add_argument("--list", action="store_true", help="print where the curves are from")
    settings = options.parse_args()
    if settings.list:
        table(["curve", "from"], [[name, curve.source] for name, curve in CURVES.items()])
        return
    if settings.quick:
        settings.tokens, settings.texts, settings.answers = 300, 1, 3
    started = time.time()
    print("\nSIMULATED on a virtual clock; speeds are times plain decoding\n")
    results: dict[str, Any] = {"simulated": True, "curves": {n: c.source for n, c in CURVES.items()}}
    results[TRUE.name] = found = list(sweep(TRUE, CURVES, settings))
    report(found)
    results["short answers"] = short = list(conversations(settings))
    print("many short answers:\n")
    table(list(short[0]), [[str(value) for value in row.values()] for row in short])
    for setting, curves in CASES[: 2 if settings.quick else None]:
        texts = argparse.Namespace(**{**vars(settings), "texts": min(settings.texts, 2)})
        print(f"{setting.name}:\n")
        results[setting.name] = found = list(sweep(setting, curves, texts))
        report(found)
    results["decide"] = decide = cost_of_deciding(settings)
    print("Real microseconds of the policy itself, all parts of a round: median, mean\n")
    table(
        ["case", "decide", "cut", "observe"],
        [[case, *map(shown, of.values())] for case, of in decide.items()],
    )
    finish("policy", results, settings, started)


def sweep(setting: Setting, curves: Iterable[str], settings: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for curve in curves:
        for workload in WORKLOADS:
            runs = [one(setting, curve, workload, settings, text) for text in range(settings.texts)]
            yield {"curve": curve, "workload": workload, **together(runs)}


def conversations(settings: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Answers of two kinds, in one conversation of each seed."""
    for name in SHORT:
        curve = TWO_CORES if name == "two cores" else CURVES[name]
        for known in KNOWN:
            good, bad = Answers(), Answers()
            for seed in range(settings.texts):
                make = partial(conversing, curve)
                found = virtual.short_answers(make, curve, known, settings.answers, settings.seed + seed)
                good, bad = (
                    a.plus(b.tokens, b.steps, b.fixed) for a, b in zip((good, bad), found, strict=True)
                )
            yield {
                "curve": name,
                "known answers": known,
                "speed of known": round(good.speed, 4) if good.tokens else None,
                "of best": round(good.of_best, 4) if good.tokens else None,
                "speed of others": round(bad.speed, 4) if bad.tokens else None,
            }


def conversing(curve: Curve, device: Device) -> Adaptive:
    return Adaptive(curve.costs(device.plain), 1, device.clock)


@dataclass(frozen=True)
class Run:
    """One text."""

    fixed: list[float]  # speed by length
    speed: float
    deficit: float
    idle: float  # share of rounds without a verified draft token
    selective: float  # share of rounds that read confidence


def one(setting: Setting, name: str, workload: str, settings: argparse.Namespace, text: int) -> Run:
    curve, tokens = CURVES[name], settings.tokens
    words = Text.make(workload, tokens + SLACK, 100 * settings.seed + text, noise=setting.noise)
    device = Device(curve, PLAIN)
    policy = Adaptive(believed(setting, curve), 1, device.clock)
    drafter = VirtualDrafter(device, words, tells=setting.tells)
    outcome = virtual.run(policy, device, [drafter], tokens)
    fixed = [virtual.fixed(curve, words, k, tokens) for k in LENGTHS]
    selective = sum(bool(r.confidence) for r in outcome.rounds) / len(outcome.rounds)
    return Run(fixed, outcome.speed, outcome.worst, outcome.share(0), selective)


def believed(setting: Setting, curve: Curve) -> Costs:
    if setting.believed is None:
        return Costs(("drafter",))
    return (CURVES[setting.believed] if setting.believed else curve).costs(PLAIN)


def together(runs: list[Run]) -> dict[str, Any]:
    """Texts of equal length: speeds combine as their harmonic mean."""
    by_length = [statistics.harmonic_mean([run.fixed[k] for run in runs]) for k in LENGTHS]
    length = max(LENGTHS, key=by_length.__getitem__)
    speed = statistics.harmonic_mean([run.speed for run in runs])
    return {
        "fixed": [round(s, 4) for s in by_length],
        "best length": length,
        "adaptive": round(speed, 4),
        "of best": round(speed / by_length[length], 4),
        "worst text": round(min(run.speed / max(run.fixed) for run in runs), 4),
        "deficit": round(max(run.deficit for run in runs), 2),
        "no drafts": round(statistics.mean(run.idle for run in runs), 4),
        "selective": round(statistics.mean(run.selective for run in runs), 4),
    }


def report(found: list[dict[str, Any]]) -> None:
    head = "curve,workload,best fixed,adaptive,of best,worst text,deficit,no drafts,confidence read".split(
        ","
    )
    rows = [
        [
            *(
                r["curve"],
                r["workload"],
                f"{max(r['fixed']):.2f} at {r['best length']}",
                f"{r['adaptive']:.2f}",
            ),
            *(f"{r['of best']:.3f}", f"{r['worst text']:.3f}", f"{r['deficit']:.1f}"),
            *(f"{100 * r['no drafts']:.0f} %", f"{100 * r['selective']:.0f} %"),
        ]
        for r in found
    ]
    table(head, rows)


class Timed:
    """A policy and what it takes, in real seconds."""

    def __init__(self, policy: DraftLengthPolicy) -> None:
        self._policy = policy
        self.spent: dict[str, list[float]] = {"decide": [], "cut": [], "observe": []}

    def begin(self) -> None:
        self._policy.begin()

    def decide(self, history: Sequence[int]) -> Decision:
        start = time.perf_counter()
        decision = self._policy.decide(history)
        self.spent["decide"].append(time.perf_counter() - start)
        return decision

    def cut(self, drafter: int, confidence: Sequence[float]) -> int:
        start = time.perf_counter()
        count = self._policy.cut(drafter, confidence)
        self.spent["cut"].append(time.perf_counter() - start)
        return count

    def observe(self, round: Round) -> None:
        start = time.perf_counter()
        self._policy.observe(round)
        self.spent["observe"].append(time.perf_counter() - start)


def cost_of_deciding(settings: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Microseconds a round, by part: median and mean."""
    found = {}
    for name, workload in (
        ("CUDA linear", "code"),
        ("M1 Ultra", "mixed"),
        ("M5 Max", "code"),
        ("flat", "code"),
    ):
        words = Text.make(workload, settings.tokens + SLACK, settings.seed)
        device = Device(CURVES[name], PLAIN)
        timed = Timed(Adaptive(CURVES[name].costs(PLAIN), 1, device.clock))
        virtual.run(timed, device, [VirtualDrafter(device, words)], settings.tokens)
        rounds = len(timed.spent["decide"])
        found[f"{name}, {workload}"] = {
            part: [round(1e6 * float(np.median(s or 0)), 1), round(1e6 * sum(s) / rounds, 1)]
            for part, s in timed.spent.items()
        }
    return found


def shown(values: list[float]) -> str:
    return f"{values[0]:.1f}, {values[1]:.1f}"


if __name__ == "__main__":
    main()
