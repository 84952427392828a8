"""Sessions of the adaptive policy on simulated devices, and the sessions of a recorded policy."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import dataclass
from pathlib import Path

from mlx_spec.policy import AdaptivePolicies
from support.virtual_clock import CURVES, PLAIN_SECONDS, Device, decode, make_text

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "policy-45e2a53.jsonl.gz"
NOISE = 0.03  # deviation of the log of the time of one piece of work
WARM_TOKENS, SESSION_TOKENS = 600, 1200
COLD_ANSWERS = {24: 4, 96: 2, 400: 1}  # by length of an answer
SLOWDOWN = 1.5  # of a throttling device
WRONG_TABLE = {  # device -> the one whose costs are believed
    "M1 Ultra": "M5 Max",
    "M3 Max": "M1 Ultra",
    "M4 Pro": "flat",
    "M5 Max": "M1 Ultra",
    "CUDA linear": "flat",
    "flat": "M1 Ultra",
}
DRAFTERS = {
    "lookup": ("lookup",),
    "lookup+mtp": ("lookup", "mtp"),
}  # by text; the others have one model drafter
FLOORS = {  # speed over the recorded policy, but for the worst session: over plain decoding
    "geometric mean": 1.02,
    "every curve": 1.0,
    "every mode": 1.0,
    "wrong table": 1.0,
    "worst session": 0.95,
}


@dataclass(frozen=True)
class Cell:
    """One kind of session."""

    curve: str
    text: str
    length: int
    mode: str


@dataclass(frozen=True)
class Session:
    """One simulated session, in steps: the time of one plain token on an undisturbed device."""

    cell: Cell
    seed: int
    steps: float
    plain: float  # of plain decoding
    worst_answer: float  # speed of the slowest answer, times plain decoding
    deficit: float  # largest loss against plain decoding at the end of an answer


def read_recorded() -> dict[Cell, dict[str, list[float]]]:
    """Return the steps of the recorded policy and of the best fixed length, by cell and seed."""
    found = {}
    with gzip.open(RECORDED, "rt") as file:
        for line in file:
            row = json.loads(line)
            cell = Cell(row["curve"], row["text"], row["length"], row["mode"])
            found[cell] = {"steps": row["steps"], "best fixed": row["best_fixed"]}
    return found


def run_session(cell: Cell, seed: int) -> Session:
    """Simulate one session of answers with a new pair."""
    curve = CURVES[cell.curve]
    device = Device(curve, NOISE, [seed, 99])
    names = DRAFTERS.get(cell.text, ("mtp",))
    policies = AdaptivePolicies(names, copying=["lookup"])
    believed = CURVES[WRONG_TABLE[cell.curve]] if cell.mode == "wrong" else curve
    policies.use(believed.table([0.0 if name == "lookup" else 1.0 for name in names]))
    warm = -(-WARM_TOKENS // cell.length) if cell.mode in ("warm", "throttle") else 0
    count = COLD_ANSWERS[cell.length] if cell.mode == "cold" else SESSION_TOKENS // cell.length
    policy = policies.policy(device.clock)
    steps = plain = lost = deficit = 0.0
    worst = math.inf
    for index in range(warm + count):
        throttled = cell.mode == "throttle" and index >= warm + count // 2
        device.slowdown = SLOWDOWN if throttled else 1.0
        if index == warm:
            policy = policies.policy(device.clock)
        answer = decode(policy, device, make_text(cell.text, cell.length, [seed, index]), cell.length)
        if index < warm:
            continue
        took = answer.seconds / PLAIN_SECONDS
        base = device.slowdown * (cell.length + curve.host)
        steps, plain, lost = steps + took, plain + base, lost + took - base
        worst, deficit = min(worst, base / took), max(deficit, lost)
    return Session(cell, seed, steps, plain, worst, deficit)
