"""Measuring the cost table of a pair, by a clock that goes on by what passes and drafts are said to take."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_spec.policy import calibrate
from mlx_spec.policy.calibrate import DRAFT_COST
from mlx_spec.types import Draft, no_draft


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)

    def timeit(job, number):
        start = clock.now
        job()
        return clock.now - start

    monkeypatch.setattr(calibrate, "timeit", timeit)
    monkeypatch.setattr(calibrate, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


class SlowTarget:
    """A target whose passes take a fixed time per row."""

    def __init__(self, clock, seconds_per_row):
        self.clock, self.seconds_per_row, self.uncommitted, self.passes = clock, seconds_per_row, 0, 0

    def verify(self, tokens):
        self.clock.now += self.seconds_per_row * tokens.shape[0]
        self.uncommitted += tokens.shape[0]
        self.passes += 1
        return mx.zeros((tokens.shape[0], 8))

    def commit(self, keep):
        assert keep == 0
        self.uncommitted = 0


class SlowDrafter:
    def __init__(self, clock, seconds_per_token, longest=16):
        self.clock, self.seconds_per_token, self.longest = clock, seconds_per_token, longest

    def draft(self, history, limit, sampler):
        number = min(limit, self.longest)
        self.clock.now += self.seconds_per_token * number
        return Draft(mx.zeros((number,), dtype=mx.int32)) if number else no_draft()


def test_sizes_are_measured_and_the_sequence_is_left_alone(clock):
    target = SlowTarget(clock, 0.001)
    drafters = [SlowDrafter(clock, 0.001), SlowDrafter(clock, 0.0), SlowDrafter(clock, 0.0, longest=0)]
    table = calibrate.measure(target, drafters, [1, 2, 3], copying={1}, time_limit_s=0.5)
    assert target.uncommitted == 0
    assert {1, 2, 3, 5} <= set(table.verify)
    assert table.verify[5] == pytest.approx(5 * table.verify[1])
    assert table.draft[0][4] == pytest.approx(4 * table.draft[0][1])
    assert table.draft[1] == {}
    assert table.draft[2][1] == pytest.approx(DRAFT_COST * table.plain)
    assert table.context == 3


def test_a_big_model_gets_the_required_sizes_only(clock):
    target = SlowTarget(clock, 0.02)
    table = calibrate.measure(target, [SlowDrafter(clock, 0.005)], [1, 2, 3], time_limit_s=0.2)
    assert {1, 2, 5} <= set(table.verify)
    assert len(table.verify) <= 5
    assert target.passes < 40
