"""A handful of the benchmark's cells: the policy keeps its floors against the recorded one. SIMULATED."""

from __future__ import annotations

import math
from statistics import mean

import policy as benchmark
import pytest

from mlx_spec.policy import FixedPolicy


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


def test_texts_are_those_of_the_record():
    """Plain steps of a session do not depend on the policy, the best fixed length only on the texts."""
    cell = benchmark.Cell("flat", "ind90", 96, "cold")
    device = benchmark.Device(benchmark.CURVES["flat"])
    seconds = [0.0] * 17
    for length in range(17):
        for index in range(benchmark.COLD_ANSWERS[96]):
            texts = benchmark.make_text("ind90", 96, [0, index])
            seconds[length] += benchmark.decode(FixedPolicy(length), device, texts, 96).seconds
    best = min(seconds) / benchmark.PLAIN_SECONDS
    assert best == pytest.approx(benchmark.read_recorded()[cell]["best fixed"][0], rel=1e-3)
