"""Measuring the cost table of a pair, by a clock that goes on by what passes and drafts are said to take."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_spec.policy import calibrate
from mlx_spec.policy.calibrate import DRAFT_COST
from mlx_spec.types import Draft, no_draft


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
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
    table = calibrate.measured(target, drafters, [1, 2, 3], copying={1}, limit_s=0.5)
    assert target.uncommitted == 0
    assert {1, 2, 3, 5} <= set(table.verify)
    assert table.verify[5] == pytest.approx(5 * table.verify[1])
    assert table.draft[0][4] == pytest.approx(4 * table.draft[0][1])
    assert table.draft[1] == {}
    assert table.draft[2][1] == pytest.approx(DRAFT_COST * table.plain)
    assert table.context == 3


def test_a_big_model_gets_the_required_sizes_only(clock):
    target = SlowTarget(clock, 0.02)
    table = calibrate.measured(target, [SlowDrafter(clock, 0.005)], [1, 2, 3], limit_s=0.2)
    assert {1, 2, 5} <= set(table.verify)
    assert len(table.verify) <= 5
    assert target.passes < 40


def test_work_of_the_caller_between_passes_is_not_measured(clock):
    target = SlowTarget(clock, 0.001)
    alone = calibrate.measured(target, [SlowDrafter(clock, 0.001)], [1, 2, 3], limit_s=0.3)
    watch = calibrate.Stopwatch(0.3)
    measuring = calibrate.measure(target, [SlowDrafter(clock, 0.001)], [1, 2, 3], (), watch)
    for passes in itertools.count():
        try:
            next(measuring)
        except StopIteration as done:
            assert done.value.plain == pytest.approx(alone.plain)
            assert done.value.verify == pytest.approx(alone.verify)
            break
        clock.now += 0.5 * (passes % 7 == 0)  # a request is answered
    assert target.uncommitted == 0
