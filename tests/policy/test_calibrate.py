"""Measuring the cost table of a pair, by a clock that goes on by what passes and drafts are said to take."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import mlx.core as mx
import pytest

import mlx_spec
from mlx_spec.model.target import LMTarget
from mlx_spec.policy import AdaptivePolicies, calibrate
from mlx_spec.policy.calibrate import Stopwatch
from mlx_spec.policy.costs import Table
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
    table = calibrate.measured(target, drafters, [1, 2, 3], 8, copying={1}, limit_s=0.5)
    assert target.uncommitted == 0
    assert {1, 2, 3, 5} <= set(table.verify)
    assert table.verify[5] == pytest.approx(5 * table.verify[1])
    assert table.draft[0][4] == pytest.approx(4 * table.draft[0][1])
    assert table.draft[1] == {}
    assert table.draft[2][1] == pytest.approx(0.1 * table.plain)
    assert table.context == 3


def test_a_big_model_gets_the_required_sizes_only(clock):
    target = SlowTarget(clock, 0.02)
    table = calibrate.measured(target, [SlowDrafter(clock, 0.005)], [1, 2, 3], 8, limit_s=0.2)
    assert {1, 2, 5} <= set(table.verify)
    assert len(table.verify) <= 5
    assert target.passes < 40


def test_work_of_the_caller_between_passes_is_not_measured(clock):
    target = SlowTarget(clock, 0.001)
    alone = calibrate.measured(target, [SlowDrafter(clock, 0.001)], [1, 2, 3], 8, limit_s=0.3)
    watch = calibrate.Stopwatch(0.3)
    measuring = calibrate.measure(target, [SlowDrafter(clock, 0.001)], [1, 2, 3], 8, (), watch)
    for passes in itertools.count():
        try:
            next(measuring)
        except StopIteration as done:
            assert done.value.plain == pytest.approx(alone.plain)
            assert done.value.verify == pytest.approx(alone.verify)
            break
        clock.now += 0.5 * (passes % 7 == 0)  # a request is answered
    assert target.uncommitted == 0


def test_a_pass_is_announced_and_none_is_longer_than_it_may_be(clock):
    """A request that came while a pass of many rows ran waited for seconds."""
    target, drafter = SlowTarget(clock, 0.05), SlowDrafter(clock, 0.01)
    watch = Stopwatch(0.5, token_s=0.05, most_s=0.2)
    measuring, before = calibrate.measure(target, [drafter], [1, 2, 3], 8, (), watch), clock.now
    announced, longest = 0.0, 0.0
    while True:
        try:
            following = next(measuring)
        except StopIteration as done:
            assert set(done.value.verify) == {1, 2, 3} and set(done.value.draft[0]) == {1, 4}
            break
        took, before = clock.now - before, clock.now
        assert took <= announced + 1e-9
        announced, longest = following.seconds, max(longest, took)
    assert 0.1 < longest <= 0.2


@pytest.mark.parametrize("token_s", [0.02, 0.15])
def test_costs_of_a_slow_pair_are_checked_in_short_passes(clock, monkeypatch, token_s):
    for run in (LMTarget.verify, LMTarget.prefill):

        def slow(self, tokens, *others, run=run):
            clock.now += token_s * len(tokens)
            return run(self, tokens, *others)

        monkeypatch.setattr(LMTarget, run.__name__, slow)
    pair = mlx_spec.load("demo")
    assert isinstance(pair.policies, AdaptivePolicies)
    pair.policies.use(Table(token_s / 10, {1: token_s / 10, 17: 17 * token_s}, [{1: 9.0}, {}]))
    pair.policies.too_dear = 1
    passes = list[float]()

    def seen() -> Iterator[bool]:
        while True:
            before = clock.now
            yield len(passes) % 3 == 2  # a request comes
            passes.append(clock.now - before)

    is_wanted = seen().__next__
    for most_s in [0.2] * 30 + [0.4] * 30:  # nothing came for a while
        pair.check_costs(is_wanted, most_s)
    costs = pair.policies.costs
    assert costs is not None and costs.at(1).drafting(0, 1) < token_s
    assert max(passes[:20]) <= max(0.2, token_s) and max(passes) <= max(0.2, 2 * token_s) + 1e-9
