"""Draft lengths of sequences that share a pass, on SIMULATED costs."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from support.virtual_clock import CURVES, PLAIN_SECONDS

from mlx_spec.drafters.lookup import lookup_source
from mlx_spec.policy import FixedPolicy, Table
from mlx_spec.policy.adaptive import BUFFER
from mlx_spec.policy.batch import BATCH_EPSILON, BatchPolicies, SharedPasses
from mlx_spec.policy.costs import Costs
from mlx_spec.types import Reason, RequestDrafter, Round

DRAFTED, HOST = 0.02, 0.02  # steps of one draft token of one sequence, and of a wait
Passes = Callable[[int], float]


def passes_of(name: str) -> Passes:
    """Return the steps of a pass by rows; beyond 17 rows each costs half of what it costs there."""
    if name == "flat":
        return lambda rows: max(1.0, rows / 64)
    if name == "linear":
        return float
    curve = CURVES[name]
    return lambda rows: curve.rows(min(rows, 17)) + curve.rows(17) / 34 * max(rows - 17, 0)


def table_of(passes: Passes) -> Table:
    verify = {rows: PLAIN_SECONDS * (passes(rows) + HOST) for rows in (*range(1, 18), 33, 64)}
    draft = [{k: PLAIN_SECONDS * DRAFTED * k for k in (1, 16)}]
    return Table(PLAIN_SECONDS, verify, draft, PLAIN_SECONDS * HOST)


class Simulation:
    """The engine's rounds of a group: sequences whose draft tokens are right with a probability each."""

    def __init__(
        self, rates: Sequence[float], passes: Passes, believed: Table, seed: int = 0, together: bool = False
    ) -> None:
        policies = BatchPolicies(["mtp"], together=["mtp"] if together else [])
        policies.use(believed)
        assert policies.costs is not None
        self.costs = policies.costs
        self.rates, self.passes = rates, passes
        self.drafts = max if together else sum
        self.now, self.noise = 0.0, random.Random(seed)
        self.policies = [policies.policy(lambda: self.now) for _ in rates]
        self.group = policies.group(lambda: self.now)
        for policy in self.policies:
            policy.begin()
        self.tokens = [0] * len(rates)
        self.depths: Counter[int] = Counter()
        self.reasons: set[Reason] = set()

    def run(self, rounds: int, fixed: int | None = None) -> None:
        queued, count = False, len(self.rates)
        for _ in range(rounds):
            if fixed is None:
                decisions = self.group.decide(self.policies, [range(n + 50) for n in self.tokens])
                wanted = [d.choices[0].limit if d.choices else 0 for d in decisions]
                self.reasons |= {decision.reason for decision in decisions}
            else:
                wanted = [fixed] * count
            landing, drafting = queued and any(wanted), any(wanted) and not queued
            accepted = [0] * count
            if drafting:
                rows = count * (max(wanted) + 1)
                self.wait(self.passes(rows) + HOST + DRAFTED * self.drafts(wanted))
                for i, (rate, most) in enumerate(zip(self.rates, wanted, strict=True)):
                    while accepted[i] < most and self.noise.random() < rate:
                        accepted[i] += 1
            else:
                self.wait(self.passes(count) + HOST * (not queued))
            for policy in self.policies:
                policy.settle()
            queued = not any(wanted)
            self.depths[max(wanted) if drafting else 0] += 1
            done = []
            for i, (hits, most) in enumerate(zip(accepted, wanted, strict=True)):
                self.tokens[i] += hits + 1
                drafted = most if drafting else 0
                kind = "draft" if drafted else "drained" if landing or drafting else "plain"
                done.append(
                    Round([0] * (hits + 1), drafted, hits, kind, drafter_index=0 if drafted else None)
                )
            if fixed is None:
                self.group.observe(done)

    def wait(self, steps: float) -> None:
        self.now += steps * PLAIN_SECONDS * self.noise.lognormvariate(0, 0.03)

    @property
    def speed(self) -> float:
        """Return the speed over plain decoding of the same sequences."""
        return sum(self.tokens) / len(self.rates) * self.passes(len(self.rates)) / (self.now / PLAIN_SECONDS)


@pytest.mark.parametrize(
    ("name", "count", "together"),
    [
        ("flat", 2, False),
        ("flat", 8, False),
        ("flat", 8, True),  # drafts of all in one pass a token
        ("M5 Max", 2, False),
        ("M5 Max", 4, False),
        ("M5 Max", 2, True),
        ("M1 Ultra", 2, False),
        ("linear", 4, False),
    ],
)
def test_the_policy_finds_the_best_length(name: str, count: int, together: bool) -> None:
    passes, rates = passes_of(name), [0.6, 0.7, 0.8, 0.9] * (count // 2)
    rates = rates[:count]
    adaptive = Simulation(rates, passes, table_of(passes), together=together)
    adaptive.run(300)
    best = 1.0
    for length in (1, 2, 3, 4, 6, 8):
        fixed = Simulation(rates, passes, table_of(passes), together=together)
        fixed.run(120, length)
        best = max(best, fixed.speed)
    assert adaptive.speed > 0.94 * best
    assert adaptive.depths[0] > 240 or adaptive.speed > 1.02


def test_lengths_fall_as_the_batch_fills() -> None:
    usual, passes = [], passes_of("flat")
    for count in (4, 16, 32, 64):
        simulation = Simulation([0.7] * count, passes, table_of(passes))
        simulation.run(60)
        usual.append(simulation.depths.most_common(1)[0][0])
    assert usual == sorted(usual, reverse=True) and usual[0] > 2 and usual[-1] == 0
    assert simulation.reasons <= {Reason.COST, Reason.ACCEPTANCE, Reason.PROBE}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["M5 Max", "M3 Max"])
def test_no_sequence_loses_more_than_its_bound(name: str, seed: int) -> None:
    passes = passes_of(name)
    simulation = Simulation([0.0, 0.9, 0.9], passes, table_of(passes), seed)
    for _ in range(30):
        simulation.run(10)
        plain = PLAIN_SECONDS * passes(3)
        steps = simulation.now / plain
        allowed = 1.02 * (1 + BATCH_EPSILON)  # 2 %: the noise of what a plain round is known to take
        assert steps <= allowed * min(simulation.tokens) + 3 * BUFFER
    assert sum(simulation.tokens[1:]) > 2 * simulation.tokens[0]  # there were drafts


def test_wrong_costs_are_corrected() -> None:
    passes = passes_of("M1 Ultra")
    simulation = Simulation([0.7] * 4, passes, table_of(passes_of("flat")))
    simulation.run(300)
    assert simulation.speed > 0.95
    for believed in ("M5 Max", "linear"):  # with the costs of the second one no text could make drafts pay
        simulation = Simulation([0.8] * 2, passes_of("flat"), table_of(passes_of(believed)))
        simulation.run(300)
        assert simulation.speed > 1.5
    simulation = Simulation([0.9] * 8, passes_of("linear"), table_of(passes_of("linear")))
    simulation.run(500)
    assert simulation.speed > 0.99 and simulation.reasons >= {Reason.COST, Reason.PROBE}


def test_a_slow_round_says_nothing_of_plain_ones() -> None:
    passes, costs = SharedPasses(), Costs(table_of(passes_of("M3 Max"))).at(1)
    before = passes.seconds(costs, 16)
    for _ in range(20):
        passes.observe(costs, 16, 4, math.e * float(before[4]))
    found = np.log(passes.seconds(costs, 16) / before)
    assert found[0] == 0
    assert 0.2 < found[1] < found[2] < found[3] < found[4] < 1.0


@pytest.mark.parametrize("name", ["flat", "M3 Max"])
def test_delayed_rounds_alone_do_not_outweigh_what_a_batch_took(name: str) -> None:
    simulation = Simulation([0.8] * 2, passes_of(name), table_of(passes_of(name)))
    simulation.run(100)
    for _ in range(2):
        simulation.costs.at(1).observe_round(0, 4, 5 * PLAIN_SECONDS)
    simulation.depths.clear()
    simulation.run(60)
    assert simulation.depths[0] < 3


def test_a_clock_that_stands_still_is_no_error() -> None:
    passes = passes_of("M3 Max")
    run = Simulation([0.8] * 3, passes, table_of(passes))
    run.wait = lambda steps: None  # type: ignore[method-assign]
    run.run(40)
    assert min(run.tokens) >= 40


def test_costs_beyond_those_measured_do_not_stay_level() -> None:
    """The last measured passes cost the same, and no wider one was measured."""
    curve = CURVES["M3 Max"]
    believed = Table(PLAIN_SECONDS, curve.table().verify, [{1: 0.0}], PLAIN_SECONDS * HOST)
    simulation = Simulation([0.7] * 16, passes_of("M3 Max"), believed)
    simulation.run(100)
    assert simulation.depths[3] + simulation.depths[4] < 5
    assert simulation.speed > 1.02


def test_unknown_costs_mean_plain_rounds() -> None:
    policies = BatchPolicies(["mtp"])
    group = policies.group()
    decisions = group.decide([policies.policy() for _ in range(3)], [[1, 2]] * 3)
    assert [(d.choices, d.reason) for d in decisions] == [((), Reason.LEARNING)] * 3


def test_beside_a_fixed_length_each_decides() -> None:
    policies = BatchPolicies(["mtp"])
    policies.use(Table(0.01, {1: 0.01, 17: 0.02}, [{1: 1e-5}]))
    group, mine = policies.group(), policies.policy()
    mine.begin()
    fixed, own = group.decide([FixedPolicy(3), mine], [[1, 2]] * 2)
    assert fixed.choices[0].limit == 3 and own.reason is not Reason.FIXED
    group.observe([Round([1], 0, 0, "plain"), Round([1], 0, 0, "plain")])


def test_only_some_bring_a_drafter_of_their_own() -> None:
    policies = BatchPolicies([])
    policies.use(Table(0.01, {1: 0.01, 17: 0.02}, []))
    members = [policies.policy() for _ in range(3)]
    for member in members[:2]:
        member.begin()
    members[2].begin([RequestDrafter("grammar", lookup_source().make(None), lambda history: 4, 0.05)])
    reasons = {decision.reason for decision in policies.group().decide(members, [[1, 2]] * 3)}
    assert len(reasons) == 1 and reasons <= {Reason.ACCEPTANCE, Reason.PROBE}
