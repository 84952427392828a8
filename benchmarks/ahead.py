"""Does drafting ahead pay? Gains on a virtual clock are SIMULATED; hit rates are measured on a real pair.

clock: `mlx_spec.policy` decides the rounds of scripted texts on published cost curves, with and without
drafting ahead. A draft token costs `cost` passes. While the target verifies K tokens, the drafter beside it
makes K + 1 passes, whose time does not grow with the branches (dense weights, few rows). A late draft is a
miss, and a miss is drafted by the target's device as usual.

  own machine   the drafter beside has the same speed; each stored draft takes two times `link`
  CPU           a third of the speed, and one memory bus: a pass takes at least the time of all bytes read

hits: a target and its own first layers as drafter, on the prompts of the other benchmarks, drafts of K = 4.
Guesses for the next token come from log q with the noise that target and drafter share, or from log q alone.
`--target ""` leaves this part out. The exit status is 1 if a floor is broken.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from timing import finish, parser, table

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from virtual_clock import CURVES, PLAIN_SECONDS, Answer, Curve, Device, ModelDrafter, make_text

from mlx_spec.policy import AdaptivePolicies, FixedPolicy
from mlx_spec.types import DraftLengthPolicy, Round

COSTS = (0.05, 0.1, 0.2, 0.3, 0.4)  # of a draft token, in passes
PLACES = {"own machine, 0.1 ms": 0.1e-3, "own machine, 2 ms": 2e-3, "CPU": None}  # seconds of a link
CPU_SPEED = 1 / 3  # of a CPU core complex over the GPU, in bytes per second
HIT_REJECTED, HIT_ALL = 0.91, 0.95  # with three guesses, on random distributions like a model's
TEXT, CURVE, TOKENS, NOISE = "ind80", "M3 Max", 400, 0.03
K = 4
FLOORS = {"own machine, cost 0.2, K = 4": 1.25, "worst with the gate": 0.99}


@dataclass
class Beside:
    """What a drafter does beside the target, in seconds."""

    cost: float  # passes of a draft token
    link: float | None  # None for a CPU beside the GPU
    random: np.random.Generator

    def ready(self, tokens: int) -> float:
        """Return how long it drafts ahead."""
        speed = CPU_SPEED if self.link is None else 1.0
        return (tokens + 1) * self.cost / speed * PLAIN_SECONDS

    def passes(self, tokens: int, steps: float) -> float:
        """Return the steps of a pass while it drafts."""
        return steps if self.link is not None else max(steps, 1 + (tokens + 1) * self.cost)

    def hit(self, drafted: int, accepted: int) -> bool:
        """Return whether the outcome was guessed."""
        return bool(self.random.random() < (HIT_ALL if accepted == drafted else HIT_REJECTED))


def decode(
    policy: DraftLengthPolicy, device: Device, drafter: ModelDrafter, beside: Beside, tokens: int
) -> Answer:
    """Decode one answer in rounds of the engine, as `virtual_clock.decode`, but with drafts made ahead."""
    place, queued, stored, answer, start = 1, None, None, Answer(), device.now
    policy.begin()
    while place <= tokens:
        decision, began, most = policy.decide(range(place)), device.now, tokens - place
        choice = decision.choices[0] if decision.choices and most else None
        if choice is not None and queued is None:
            free = replace(device.curve, drafted=0.0)
            idle = Device(free)  # what is stored takes no time of the device
            right = drafter.draft(place, min(choice.limit, most), idle if stored else device)
            device.now += 2 * (beside.link or 0.0) if stored else 0.0
            steps = device.passes[len(right) + 1]
            begun = device.now
            device.read(device.submit(beside.passes(len(right), steps) if choice.ahead else steps))
            accepted = next((i for i, good in enumerate(right) if not good), len(right))
            round = Round([0] * (accepted + 1), len(right), accepted, "draft", 0, ahead=stored)
            in_time = device.now - begun >= beside.ready(len(right))
            stored = (in_time and beside.hit(len(right), accepted)) if choice.ahead else None
        else:
            done = device.submit(1.0) if queued is None else queued
            queued = device.submit(1.0) if choice is None and most else None
            device.read(done)
            round, stored = Round([0], 0, 0, "plain" if queued is not None else "landed"), None
        place += len(round.tokens)
        round = replace(
            round,
            seconds=device.now - began,
            reason=decision.reason,
            finish_reason="length" if place > tokens else None,
            plain_seconds=decision.plain_seconds,
        )
        policy.observe(round)
        answer.rounds.append(round)
    answer.seconds = device.now - start
    return answer


def seconds(cost: float, link: float | None, fixed: bool, ahead: bool, answers: int, seed: int) -> float:
    """Return the seconds of a session after a first answer that warms up."""
    curve: Curve = replace(CURVES[CURVE], drafted=cost)
    device = Device(curve, NOISE, [seed, 99])
    policies = AdaptivePolicies(["draft"], ahead=["draft"] if ahead else [])
    policies.use(curve.table())
    policy = FixedPolicy(K, ahead=ahead) if fixed else policies.policy(device.clock)
    beside = Beside(cost, link, np.random.default_rng([seed, 5]))
    total = 0.0
    for index in range(answers + 1):
        (drafter,) = make_text(TEXT, TOKENS, [seed, index])
        assert isinstance(drafter, ModelDrafter)
        took = decode(policy, device, drafter, beside, TOKENS).seconds
        total += took if index else 0.0
    return total


def simulate(answers: int, seeds: int) -> dict[str, dict[str, float]]:
    """Print and return the gains over the same drafter without drafting ahead."""
    gains: dict[str, dict[str, float]] = {}
    for kind in ("K = 4", "with the gate"):
        for place, link in PLACES.items():
            row = gains[f"{place}, {kind}"] = {}
            for cost in COSTS:
                pairs = [
                    [seconds(cost, link, kind == "K = 4", ahead, answers, seed) for ahead in (False, True)]
                    for seed in range(seeds)
                ]
                row[str(cost)] = math.exp(np.mean([math.log(without / with_) for without, with_ in pairs]))
    print(f"\nSIMULATED ({CURVE}, 80 % accepted): gain of drafting ahead, by cost of a draft token\n")
    table(["", *COSTS], [[name, *(f"{x:.2f}" for x in row.values())] for name, row in gains.items()])
    return gains


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--answers", type=int, default=4, help="of a session on the virtual clock")
    settings = options.parse_args()
    started = time.time()
    quick = settings.quick
    gains = simulate(1 if quick else settings.answers, 1 if quick else settings.seeds)
    gated = [x for name, row in gains.items() if name.endswith("gate") for x in row.values()]
    found = {
        "own machine, cost 0.2, K = 4": gains["own machine, 2 ms, K = 4"]["0.2"],
        "worst with the gate": min(gated),
    }
    broken = [name for name, floor in FLOORS.items() if found[name] < floor]
    for name in broken:
        print(f"broken floor: {name} is {found[name]:.4f}, it must be {FLOORS[name]} or more")
    finish("ahead", {"gains": gains, "floors": found}, settings, started)
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
