"""Does the adaptive draft length pay on devices that we do not have? All times are SIMULATED.

`mlx_spec.policy` decides the rounds of scripted texts on published cost curves (`--list` names the sources),
with 3 % noise on every piece of device work. The cells are 6 devices x 12 kinds of text x answers of 24, 96
and 400 tokens x 4 modes:

  cold        the first 100 to 400 tokens of a pair
  warm        600 tokens of experience, then 1,200 tokens in a new sequence
  wrong       1,200 tokens from cold with the cost table of another device
  throttle    warm, and all work takes 1.5 times as long from the middle on

Every session is compared to plain decoding, to the best fixed length in hindsight, and to the policy of
commit 45e2a53, whose sessions on the same texts are recorded in results/. Then batches of 1 to 16 sequences
share their passes. Speeds compare policies; they do not predict tokens per second. The exit status is 1 if a
figure is below its entry in FLOORS.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from timing import finish, parser, table

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from support.policy_sessions import FLOORS, NOISE, Cell, Session, read_recorded, run_session
from support.virtual_clock import CURVES, PLAIN_SECONDS, Device, ModelDrafter, decode, make_text

from mlx_spec.policy import AdaptivePolicies
from mlx_spec.policy.batch import BatchPolicies
from mlx_spec.types import Round

RECORDED_SEEDS = 4
LENGTHS = (24, 96, 400)  # tokens of an answer

BATCHES = (1, 2, 4, 8, 16)  # sequences
BATCH_TOKENS = 300  # of a sequence
MANY_ROWS = 33  # of the widest pass that a calibration measures
BATCH_DEPTHS = range(7)  # fixed lengths to compare with
BATCH_TEXTS = {"mixed": ("mixed",), "half easy, half useless": ("ind80", "useless")}
BATCH_CURVES = ("M1 Ultra", "M3 Max", "M5 Max", "flat", "CUDA linear")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=3, help=f"1 to {RECORDED_SEEDS}")
    options.add_argument("--processes", type=int, default=os.cpu_count())
    options.add_argument("--list", action="store_true", help="print where the curves are from")
    settings = options.parse_args()
    if settings.list:
        table(["curve", "from"], [[name, curve.source] for name, curve in CURVES.items()])
        return
    if not 1 <= settings.seeds <= RECORDED_SEEDS:
        options.error(f"--seeds is {settings.seeds}, 1 to {RECORDED_SEEDS} are recorded")
    seeds = range(1 if settings.quick else settings.seeds)
    started = time.time()
    recorded = read_recorded()
    with multiprocessing.get_context("spawn").Pool(settings.processes) as pool:
        jobs = [(cell, seed) for cell in recorded for seed in seeds]
        sessions = pool.starmap(run_session, jobs, chunksize=16)
        batches = pool.starmap(
            partial(run_batches, seeds=len(seeds)), batch_cells(settings.quick), chunksize=1
        )
    print("\nSIMULATED on a virtual clock; speeds are times plain decoding\n")
    results = compare(sessions, recorded)
    print("Batches: speed over the plain batch / mean draft length / speed over the best fixed length\n")
    results["batches"] = show_batches(batches)
    decide = decision_time()
    print("Real microseconds of one decision and one observation together, median of all rounds\n")
    table(list(decide), [[f"{value:.1f}" for value in decide.values()]])
    results["decision microseconds"] = decide
    broken = [name for name, floor in FLOORS.items() if results["floors"][name] < floor]
    for name in broken:
        print(f"broken floor: {name} is {results['floors'][name]:.4f}, it must be {FLOORS[name]} or more")
    finish("policy", results, settings, started)
    sys.exit(1 if broken else 0)


def compare(sessions: Sequence[Session], recorded: dict[Cell, dict[str, list[float]]]) -> dict[str, Any]:
    """Print the tables of all sessions. Return the figures."""
    old = {(s.cell, s.seed): recorded[s.cell]["steps"][s.seed] for s in sessions}
    best = {(s.cell, s.seed): recorded[s.cell]["best fixed"][s.seed] for s in sessions}

    def figures(chosen: Sequence[Session]) -> dict[str, float]:
        over_old = [math.log(old[s.cell, s.seed] / s.steps) for s in chosen]
        return {
            "over recorded": math.exp(mean(over_old)),
            "over plain": math.exp(mean(math.log(s.plain / s.steps) for s in chosen)),
            "of best fixed": math.exp(mean(math.log(best[s.cell, s.seed] / s.steps) for s in chosen)),
            "recorded over plain": math.exp(mean(math.log(s.plain / old[s.cell, s.seed]) for s in chosen)),
            "worst session": min(s.plain / s.steps for s in chosen),
            "worst answer": min(s.worst_answer for s in chosen),
            "deficit": max(s.deficit for s in chosen),
        }

    groups: dict[str, dict[str, dict[str, float]]] = {"all": {"all": figures(sessions)}}
    of: dict[str, Callable[[Cell], Any]] = {
        "mode": lambda cell: cell.mode,
        "curve": lambda cell: cell.curve,
        "text": lambda cell: cell.text,
        "tokens an answer": lambda cell: cell.length,
    }
    for axis, key in of.items():
        values = dict.fromkeys(key(s.cell) for s in sessions)
        groups[axis] = {str(v): figures([s for s in sessions if key(s.cell) == v]) for v in values}
    for axis, rows in groups.items():
        head = [axis, *next(iter(rows.values()))]
        table(head, [[name, *(f"{value:.3f}" for value in row.values())] for name, row in rows.items()])
    everything = groups["all"]["all"]
    floors = {
        "geometric mean": everything["over recorded"],
        "every curve": min(row["over recorded"] for row in groups["curve"].values()),
        "every mode": min(row["over recorded"] for row in groups["mode"].values()),
        "wrong table": groups["mode"]["wrong"]["over recorded"],
        "worst session": everything["worst session"],
    }
    return {"simulated": True, "sessions": len(sessions), "floors": floors, **groups}


# Batches


def batch_cells(quick: bool) -> list[tuple[str, str, int]]:
    cells = [(curve, texts, count) for curve in BATCH_CURVES for texts in BATCH_TEXTS for count in BATCHES]
    return [cell for cell in cells if cell[0] in ("M3 Max", "flat") and cell[2] < 16] if quick else cells


def batch_passes(name: str, rows: int) -> float:
    """Return the steps of a pass. Beyond 17 rows the curves are assumed.

    A row costs what it costs at 17 rows, or half of that on devices with kernels for many rows. "flat" is
    flat up to 64 rows.
    """
    if name == "flat":
        return max(1.0, rows / 64)
    if name == "CUDA linear":
        return float(rows)
    last = CURVES[name].rows(17)
    share = 1.0 if name == "M1 Ultra" else 0.5
    return CURVES[name].rows(min(rows, 17)) + share * last / 17 * max(rows - 17, 0)


class Batch:
    """Sequences that are decoded together, each in its own text, without noise."""

    def __init__(self, curve: str, texts: str, count: int, seed: int) -> None:
        self.name, self.curve, self.count = curve, CURVES[curve], count
        kinds = BATCH_TEXTS[texts]
        length = 40 * BATCH_TOKENS
        self.texts: list[ModelDrafter] = []
        for index in range(count):
            (drafter,) = make_text(kinds[index % len(kinds)], length, [seed, index])
            assert isinstance(drafter, ModelDrafter)
            self.texts.append(drafter)
        self.places = [1] * count
        self.plain = batch_passes(curve, count)
        self.tokens = self.drafted = self.rounds = 0
        self.steps = 0.0

    def round(self, depths: Sequence[int]) -> list[int]:
        """Decode one round. Return the accepted tokens of every sequence."""
        total, longest = sum(depths), max(depths)
        waits = self.curve.host + longest * self.curve.drafted if total else 0.0
        self.steps += batch_passes(self.name, self.count * (longest + 1)) + waits
        accepted = []
        for index, depth in enumerate(depths):
            text, place, number = self.texts[index], self.places[index], 0
            while number < depth and text.draws[place + number] < text.rates[place + number]:
                number += 1
            accepted.append(number)
            self.places[index] = place + number + 1
        self.tokens += sum(accepted) + self.count
        self.drafted, self.rounds = self.drafted + total, self.rounds + 1
        return accepted

    @property
    def done(self) -> bool:
        return self.tokens >= BATCH_TOKENS * self.count

    @property
    def speed(self) -> float:
        """Return the speed over the plain batch."""
        return self.tokens / self.count / self.steps * self.plain


def run_adaptive(batch: Batch) -> Batch:
    """Let the policy of batches decide, from the costs that a calibration would measure."""

    def clock() -> float:
        return batch.steps * PLAIN_SECONDS

    policies = BatchPolicies(["mtp"], together=["mtp"])
    costs = batch.curve.table()
    many = PLAIN_SECONDS * (batch_passes(batch.name, MANY_ROWS) + batch.curve.host)
    policies.use(replace(costs, verify={**costs.verify, MANY_ROWS: many}))
    members, group = [policies.policy(clock) for _ in batch.places], policies.group(clock)
    for member in members:
        member.begin()
    queued = False  # True if the next token is queued, so that nothing can be verified with it
    while not batch.done:
        decisions = group.decide(members, [range(place) for place in batch.places])
        wanted = [decision.choices[0].limit if decision.choices else 0 for decision in decisions]
        depths = [0] * batch.count if queued else wanted
        for member in members:
            member.settle()
        accepted = batch.round(depths)
        rounds = []
        for depth, number in zip(depths, accepted, strict=True):
            kind = "draft" if depth else "drained" if any(wanted) else "plain"
            rounds.append(Round([0] * (number + 1), depth, number, kind, drafter_index=0 if depth else None))
        group.observe(rounds)
        queued = not any(wanted)
    return batch


def run_batches(curve: str, texts: str, count: int, seeds: int) -> dict[str, Any]:
    """Return the policy's speed over plain decoding, and over the best fixed length for all sequences."""
    adaptive = [run_adaptive(Batch(curve, texts, count, seed)) for seed in range(seeds)]
    fixed = []
    for depth in BATCH_DEPTHS:
        runs = [Batch(curve, texts, count, seed) for seed in range(seeds)]
        for batch in runs:
            while not batch.done:
                batch.round([depth] * count)
        fixed.append(mean(batch.speed for batch in runs))
    speed = mean(batch.speed for batch in adaptive)
    return {
        "curve": curve,
        "texts": texts,
        "sequences": count,
        "speed": round(speed, 4),
        "mean length": round(mean(b.drafted / b.rounds / count for b in adaptive), 3),
        "best fixed length": fixed.index(max(fixed)),
        "of best fixed": round(speed / max(fixed), 4),
    }


def show_batches(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print one row per curve and texts, one column per number of sequences."""
    counts = list(dict.fromkeys(b["sequences"] for b in batches))
    rows: dict[tuple[str, str], list[str]] = {}
    for b in batches:
        cell = f"{b['speed']:.3f} / {b['mean length']:.2f} / {b['of best fixed']:.3f}"
        rows.setdefault((b["curve"], b["texts"]), []).append(cell)
    table(["curve, texts", *(f"B = {n}" for n in counts)], [[", ".join(k), *v] for k, v in rows.items()])
    return batches


# Time of a decision


class Timed:
    """A policy that is timed with the real clock."""

    def __init__(self, policy: Any) -> None:
        self._policy, self.begin, self.settle = policy, policy.begin, policy.settle
        self.seconds: list[float] = []

    def decide(self, history: Sequence[int]) -> Any:
        start = time.perf_counter()
        decision = self._policy.decide(history)
        self._decided = time.perf_counter() - start
        return decision

    def observe(self, round: Any) -> None:
        start = time.perf_counter()
        self._policy.observe(round)
        self.seconds.append(self._decided + time.perf_counter() - start)


def decision_time() -> dict[str, float]:
    """Return real microseconds a round, for rounds that draft and rounds that do not."""
    found = {}
    for name, text in (("CUDA linear", "code"), ("M1 Ultra", "mixed"), ("M5 Max", "code"), ("flat", "code")):
        device = Device(CURVES[name], NOISE, [0])
        policies = AdaptivePolicies(["mtp"])
        policies.use(CURVES[name].table())
        timed = Timed(policies.policy(device.clock))
        for index in range(5):
            decode(timed, device, make_text(text, 400, [0, index]), 400)
        found[f"{name}, {text}"] = round(1e6 * float(np.median(timed.seconds)), 1)
    return found


if __name__ == "__main__":
    main()
