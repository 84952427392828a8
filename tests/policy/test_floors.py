"""A handful of the benchmark's cells: the policy keeps its floors against the recorded one. SIMULATED."""

from __future__ import annotations

import math
from statistics import mean

import policy as benchmark


def test_some_cells():
    recorded = benchmark.read_recorded()
    assert len(recorded) == 864
    chosen = [cell for index, cell in enumerate(recorded) if index % 37 == 0]
    ratios = []
    for cell in chosen:
        for seed in (0, 1):
            session = benchmark.run_session(cell, seed)
            ratios.append(math.log(recorded[cell]["steps"][seed] / session.steps))
            assert session.plain / session.steps >= benchmark.FLOORS["worst session"]
    assert math.exp(mean(ratios)) >= 1.0
