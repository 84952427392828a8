"""Measuring the cost table of a pair, by a clock that goes on by what passes and drafts are said to take."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace

import mlx.core as mx
import pytest

import mlx_spec
from mlx_spec.model.target import LMTarget
from mlx_spec.policy import AdaptivePolicies, calibrate
from mlx_spec.policy.calibrate import Stopwatch
from mlx_spec.policy.costs import UNKNOWN_ERROR, Table
from mlx_spec.types import Draft, no_draft


@pytest.fixture
def clock():
    return SimpleNamespace(now=0.0)


def measured(target, drafters, limit_s, copying=(), after=lambda following: None, **limits):
    """Return the costs after a history, and call `after` between passes."""
    watch = Stopwatch(limit_s, clock=lambda: target.clock.now, **limits)
    measuring = calibrate.measure(target, drafters, [1, 2, 3], 8, copying, watch)
    while True:
        try:
            following = next(measuring)
        except StopIteration as done:
            assert target.uncommitted == 0
            return done.value
        after(following)


class SlowTarget:
    """A target whose passes take a fixed time per row; `first` more for the first ones of a size.

    A token after a pause takes longer, and so does a tree.
    """

    tree_obstacle = None

    def __init__(self, clock, seconds_per_row, first=0.0):
        self.clock, self.seconds_per_row, self.uncommitted, self.passes = clock, seconds_per_row, 0, 0
        self.first, self.seen, self.done = first, Counter(), 0.0

    def verify(self, tokens, early=True):
        rows = tokens.shape[0]
        if self.uncommitted:
            assert rows == 1, "only tokens are queued"
            self.clock.now += 0.01 * (self.clock.now > self.done)
        self.clock.now += self.seconds_per_row * rows + self.first * (self.seen[rows] < 4)
        self.seen[rows] += 1
        self.uncommitted += rows
        self.passes, self.done = self.passes + 1, self.clock.now
        return mx.zeros((rows, 8))

    def verify_tree(self, tokens, parents):
        self.clock.now += 0.002
        return self.verify(tokens)

    def commit(self, keep):
        assert keep == 0
        self.uncommitted = 0


class SlowDrafter:
    def __init__(self, clock, seconds_per_token, longest=16, is_tree=False):
        self.clock, self.seconds_per_token, self.longest = clock, seconds_per_token, longest
        self.is_tree = is_tree

    def draft(self, history, limit, sampler):
        number = min(limit, self.longest)
        self.clock.now += self.seconds_per_token * number
        parents = (0,) * number if self.is_tree else None
        return Draft(mx.zeros((number,), dtype=mx.int32), parents=parents) if number else no_draft()


def test_sizes_are_measured_and_the_sequence_is_left_alone(clock):
    target = SlowTarget(clock, 0.001)
    drafters = [SlowDrafter(clock, 0.001), SlowDrafter(clock, 0.0), SlowDrafter(clock, 0.0, longest=0)]
    table = measured(target, drafters, 0.5, {1})
    assert {1, 2, 3, 5} <= set(table.verify)
    assert table.verify[5] == pytest.approx(5 * table.verify[1])
    assert table.draft[0][4] == pytest.approx(4 * table.draft[0][1])
    assert table.draft[1] == {}
    assert table.draft[2][1] == pytest.approx(0.1 * table.plain)
    assert table.context == 3


class LoadedTarget(SlowTarget):
    """Passes take `load(seconds since the start)` times as long."""

    def __init__(self, clock, load):
        super().__init__(clock, 0.001)
        self.load = load

    def verify(self, tokens, early=False):
        self.seconds_per_row = 0.001 * self.load(self.clock.now)
        return super().verify(tokens, early)


@pytest.mark.parametrize(
    ("load", "least", "most"),
    [
        (lambda now: 1.0, 0.07, 0.07),
        (lambda now: 1 + int(now / 0.07) % 3, 0.07, 0.12),  # it stays for a turn, and ratios do not move
        (lambda now: 1 + 3 * (math.sin(1e5 * now) > 0), 0.2, 0.4),  # it changes in every pass
    ],
    ids=["quiet", "load of turns", "load of passes"],
)
def test_the_error_of_costs_is_the_spread_of_their_ratios_in_turns(clock, load, least, most):
    """Without it the first answers showed "0.5 to 2.5 × plain speed" on a quiet machine, too."""
    table = measured(LoadedTarget(clock, load), [SlowDrafter(clock, 0.0)], 2.0, {0})
    assert least <= table.error <= most
    saved = asdict(table) | {"verify": {str(rows): s for rows, s in table.verify.items()}}
    assert Table.from_json(saved, 1).error == table.error
    del saved["error"]
    assert Table.from_json(saved, 1).error == UNKNOWN_ERROR  # of an older version


def test_few_turns_tell_no_error(clock):
    table = measured(SlowTarget(clock, 0.05), [SlowDrafter(clock, 0.01)], 0.2)
    assert table.error == UNKNOWN_ERROR


def test_of_a_tree_the_pass_beyond_a_chain_counts_as_drafting(clock):
    drafter = SlowDrafter(clock, 0.001, is_tree=True)
    table = measured(SlowTarget(clock, 0.001), [drafter], 0.5)
    assert {k: table.draft[0][k] for k in (1, 4)} == pytest.approx({1: 0.003, 4: 0.006})


def test_a_big_model_gets_the_required_sizes_only(clock):
    """And its only sample of a size is not the first one, which pays for compilation."""
    target = SlowTarget(clock, 0.02, first=0.05)
    table = measured(target, [SlowDrafter(clock, 0.005)], 0.2)
    assert {1, 2, 5} <= set(table.verify)
    assert len(table.verify) <= 5
    assert target.passes < 40
    assert table.plain == pytest.approx(0.02)


def test_work_of_the_caller_between_passes_is_not_measured(clock):
    target, drafters, passes = SlowTarget(clock, 0.001), [SlowDrafter(clock, 0.001)], itertools.count()

    def answer(following):
        clock.now += 0.5 * (next(passes) % 7 == 0)  # a request

    alone, beside = measured(target, drafters, 0.3), measured(target, drafters, 0.3, after=answer)
    assert beside.plain == pytest.approx(alone.plain) and beside.verify == pytest.approx(alone.verify)


@pytest.mark.parametrize("limit_s", [0.001, 2.0])
def test_tokens_after_a_pause_are_not_counted(clock, limit_s):
    """Nothing was queued behind the token before. One of three samples is without a pause, at least."""
    target = SlowTarget(clock, 0.001)

    def pause(following):
        if target.uncommitted and not 8 <= target.passes < 12:  # passes of the third sample
            clock.now += 0.5

    assert measured(target, [], limit_s, after=pause).plain == pytest.approx(0.001)


def test_a_measurement_that_is_dropped_leaves_the_sequence_alone(clock):
    """A request comes at any time, also between two tokens."""
    queued = 0
    for steps in range(1, 40):
        target = SlowTarget(clock, 0.001)
        watch = Stopwatch(0.5, clock=lambda: clock.now)
        measuring = calibrate.measure(target, [], [1, 2, 3], 8, (), watch)
        for _ in range(steps):
            next(measuring)
        queued += target.uncommitted
        measuring.close()
        assert target.uncommitted == 0
    assert queued


@pytest.mark.parametrize(("drafted_s", "most_s", "drafts"), [(0.01, 0.2, {1, 4}), (0.045, 0.16, {1})])
def test_a_pass_is_announced_and_none_is_longer_than_it_may_be(clock, drafted_s, most_s, drafts):
    """A request that came while a pass of many rows ran waited for seconds."""
    target, drafter, announced, ends = (
        SlowTarget(clock, 0.05),
        SlowDrafter(clock, drafted_s),
        [0.0],
        [clock.now],
    )

    def note(following):
        ends.append(clock.now)
        assert ends[-1] - ends[-2] <= announced[-1] + 1e-9
        announced.append(following.seconds)

    table = measured(target, [drafter], 0.5, after=note, token_s=0.05, most_s=most_s)
    assert set(table.verify) == {1, 2, 3} and set(table.draft[0]) == drafts
    assert 0.1 < max(end - start for start, end in itertools.pairwise(ends)) <= most_s


@pytest.mark.parametrize("token_s", [0.02, 0.15])
def test_costs_of_a_slow_pair_are_checked_in_short_passes(clock, monkeypatch, token_s):
    monkeypatch.setattr("mlx_spec.pair.Stopwatch", partial(Stopwatch, clock=lambda: clock.now))
    for run in (LMTarget.verify, LMTarget.prefill):

        def slow(self, tokens, *others, run=run, **options):
            clock.now += token_s * len(tokens)
            return run(self, tokens, *others, **options)

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
