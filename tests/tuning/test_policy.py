"""The adaptive policy in the real round loop, on a virtual clock (simulated costs, see `virtual.py`).

It is held against the best fixed length of the same text and costs, which nobody knows beforehand, and
against plain decoding.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import virtual
from virtual import CURVES, WORKLOADS, Curve, Device, Outcome, Text, VirtualDrafter, VirtualLookup

from mlx_spec.errors import InvalidValue
from mlx_spec.policy import Fixed
from mlx_spec.tuning.acceptance import Experience
from mlx_spec.tuning.costs import Costs, Table
from mlx_spec.tuning.ledger import BUFFER, EPSILON
from mlx_spec.tuning.policy import Adaptive
from mlx_spec.types import MAX_DRAFT_TOKENS, Choice, Decision, Drafter, Reason, Round

PLAIN = 0.03  # seconds
TOKENS = 1500
SLACK = 40  # tokens of text behind the last: a drafter looks beyond it


class Watched(Adaptive):
    """Keeps the lengths it asked for."""

    def __init__(self, costs: Costs, drafters: int, clock: Callable[[], float]) -> None:
        super().__init__(costs, drafters, clock)
        self.limits: set[int] = set()

    def decide(self, history: Sequence[int]) -> Decision:
        decision = super().decide(history)
        self.limits |= {choice.limit for choice in decision.choices}
        return decision


def adaptive(
    curve: Curve,
    text: Text,
    tokens: int = TOKENS,
    *,
    costs: Costs | None = None,
    tells: bool = True,
    noise: Callable[[], float] = lambda: 1.0,
) -> Outcome:
    device = Device(curve, PLAIN, noise=noise)
    policy = Watched(costs or curve.costs(PLAIN), 1, device.clock)
    outcome = virtual.run(policy, device, [VirtualDrafter(device, text, tells=tells)], tokens)
    assert all(1 <= limit <= MAX_DRAFT_TOKENS for limit in policy.limits)
    return outcome


def best(curve: Curve, text: Text, tokens: int = TOKENS) -> float:
    return max(virtual.fixed(curve, text, k, tokens) for k in range(MAX_DRAFT_TOKENS + 1))


def bound(outcome: Outcome, longest: float) -> float:
    """Plain steps that the ledger lets a run lose, and a round that took longer than it was thought to."""
    tokens = sum(len(r.tokens) for r in outcome.rounds)
    return EPSILON * tokens + BUFFER + longest


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_near_the_best_fixed_length_and_not_slower_than_plain(curve: str, workload: str) -> None:
    texts = [Text.make(workload, TOKENS + SLACK, seed) for seed in (7, 8, 9)]
    outcomes = [adaptive(CURVES[curve], text) for text in texts]
    of_best = [o.speed / best(CURVES[curve], text) for o, text in zip(outcomes, texts, strict=True)]
    assert statistics.mean(of_best) > 0.98
    assert min(of_best) > 0.95  # luck is followed, too
    for outcome in outcomes:  # what begins and ends plain decoding is not of the rounds
        assert outcome.worst < bound(outcome, 0.2)


def test_the_counted_speed_of_a_fixed_length_is_that_of_the_engine() -> None:
    curve, text = CURVES["M5 Max"], Text.make("mixed", 600, 0)
    for k in (0, 2, 5):
        device = Device(curve, PLAIN)
        outcome = virtual.run(Fixed(k), device, [VirtualDrafter(device, text)], 500)
        assert outcome.speed == pytest.approx(virtual.fixed(curve, text, k, 500), rel=1e-6)


def test_linear_costs_mean_plain_decoding() -> None:
    outcome = adaptive(CURVES["CUDA linear"], Text.make("code", TOKENS + SLACK, 1))
    assert outcome.share(0) > 0.97
    assert Counter(r.reason for r in outcome.rounds)[Reason.COST] > 0.9 * len(outcome.rounds)
    assert outcome.speed > 0.995


@pytest.mark.parametrize(("believed", "truth"), [("flat", "CUDA linear"), ("M5 Max", "M1 Ultra")])
def test_a_wrong_table_does_little_harm(believed: str, truth: str) -> None:
    text = Text.make("prose", 6000 + SLACK, 3)
    outcome = adaptive(CURVES[truth], text, 6000, costs=CURVES[believed].costs(PLAIN))
    assert outcome.speed > 0.98
    assert outcome.worst < bound(outcome, 18)


def test_without_the_policy_a_wrong_length_loses_much() -> None:
    curve, text = CURVES["CUDA linear"], Text.make("prose", TOKENS + SLACK, 3)
    device = Device(curve, PLAIN)
    outcome = virtual.run(Fixed(3), device, [VirtualDrafter(device, text)], TOKENS)
    assert outcome.worst > 10 * bound(outcome, 18)


@pytest.mark.parametrize("curve", ["M1 Ultra", "flat", "CUDA linear"])
def test_unmeasured_costs_are_learned_on_the_way(curve: str) -> None:
    text = Text.make("mixed", 3000 + SLACK, 5)
    outcome = adaptive(CURVES[curve], text, 3000, costs=Costs(("drafter",)))
    assert outcome.rounds[0].reason is Reason.LEARNING
    assert outcome.speed > 0.94 * best(CURVES[curve], text, 3000)


def test_what_can_just_be_afforded_is_drafted_once_the_token_on_its_way_has_landed() -> None:
    """The wait for it took what the draft needed: one was wanted every second round, and never came."""
    curve, text = CURVES["M1 Ultra"], Text.make("mixed", 6000 + SLACK, 0)
    outcome = adaptive(curve, text, 3000, costs=Costs(("drafter",)))
    landed = [r.reason is Reason.PAYS and not r.drafted for r in outcome.rounds]
    assert sum(landed) < 0.1 * len(landed)
    assert outcome.speed > 0.94 * best(curve, text, 3000)


@pytest.mark.parametrize("curve", ["M5 Max", "M1 Ultra"])
@pytest.mark.parametrize("kind", ["noise", "none"])
def test_useless_confidence_does_no_harm(curve: str, kind: str) -> None:
    noise = float("inf") if kind == "noise" else 0.12
    text = Text.make("mixed", TOKENS + SLACK, 2, noise=noise)
    outcome = adaptive(CURVES[curve], text, tells=kind == "noise")
    assert outcome.speed > 0.97 * best(CURVES[curve], text)


def test_good_confidence_is_used_where_rows_are_dear() -> None:
    curve = dataclasses.replace(CURVES["M1 Ultra"], drafted=0.01)
    chance = np.random.default_rng(0)
    odds = chance.choice([0.05, 0.95], 3000 + SLACK)
    text = Text.of(odds, chance, 0.02)
    outcome = adaptive(curve, text, 3000)
    blind = adaptive(curve, text, 3000, tells=False)
    assert sum(r.drafted < r.proposed for r in outcome.rounds) > 0.3 * len(outcome.rounds)
    assert outcome.speed > 1.1 * max(blind.speed, best(curve, text, 3000))


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_a_drafter_that_is_always_wrong_or_always_right(right: float) -> None:
    text = Text.of(np.full(TOKENS + SLACK, right), np.random.default_rng(0))
    for curve in (CURVES["M4 Pro"], CURVES["flat"]):
        outcome = adaptive(curve, text)
        assert outcome.speed > 0.93 * best(curve, text)
        assert outcome.worst < 12


def test_a_text_that_becomes_predictable_is_noticed() -> None:
    odds = np.repeat([0.02, 0.95], 1500 + SLACK)
    text = Text.of(odds, np.random.default_rng(1))
    outcome = adaptive(CURVES["M5 Max"], text, 3000)
    assert outcome.speed > 1.3
    assert sum(r.drafted > 1 for r in outcome.rounds[-200:]) > 180
    assert Counter(r.reason for r in outcome.rounds)[Reason.ACCEPTANCE] > 1000


def rejected_whole(curve: str, look: float) -> int:
    """Drafts of a drafter that was right and is no longer; a look at the clock takes `look` plain steps."""
    device, shared = Device(CURVES[curve], PLAIN), [Experience()]

    def clock() -> float:
        device.now += look * PLAIN
        return device.now

    easy = Text(np.ones(100 + SLACK, bool), np.full(100 + SLACK, 0.9))
    for text in (easy, easy, easy, Text(np.arange(100 + SLACK) < 20, easy.sure)):
        policy = Adaptive(device.curve.costs(PLAIN), 1, clock, shared)
        rounds = virtual.run(policy, device, [VirtualDrafter(device, text, tells=False)], 100).rounds
    return sum(r.drafted > 0 and r.accepted == 0 for r in rounds)


@pytest.mark.parametrize("curve", ["M4 Pro", "M5 Max", "flat"])
def test_a_plan_that_takes_long_to_make_does_not_outlive_what_it_was_made_for(curve: str) -> None:
    assert rejected_whole(curve, 0.05) <= rejected_whole(curve, 0.0) + 1


def test_pauses_of_the_machine_do_not_stop_speculation() -> None:
    chance = np.random.default_rng(2)
    text = Text.make("code", TOKENS + SLACK, 4)
    outcome = adaptive(CURVES["flat"], text, noise=lambda: 12.0 if chance.random() < 0.01 else 1.0)
    assert outcome.share(0) < 0.1


def pair_of_drafters(ahead: list[Choice]) -> Outcome:
    """Lookup that knows half of the text, and a neural drafter."""
    curve, tokens = CURVES["M5 Max"], 2500
    text = Text.make("mixed", tokens + SLACK, 6)
    repeats = np.arange(tokens + SLACK) % 200 < 100
    wrong = np.random.default_rng(3).random(tokens + SLACK) < 0.03
    device = Device(curve, PLAIN)
    drafters: list[Drafter] = [VirtualLookup(repeats, wrong), VirtualDrafter(device, text)]
    table = curve.table(PLAIN)
    costs = Costs(
        ("lookup", "neural"), {512: Table(PLAIN, table.verify, ({1: 1e-6, 16: 2e-6}, *table.draft))}
    )
    policy = Adaptive(costs, 2, device.clock)
    outcome = virtual.run(policy, device, drafters, tokens)
    ahead += policy.decide([0] * tokens).choices
    return outcome


def test_of_two_drafters_the_one_that_pays_is_asked_first() -> None:
    last: list[Choice] = []
    outcome = pair_of_drafters(last)
    used = Counter(r.drafter for r in outcome.rounds)
    assert used[0] > 100
    assert used[1] > 300
    assert [choice.drafter for choice in last] == [0, 1]
    assert last[0].limit > last[1].limit
    text = Text.make("mixed", 2500 + SLACK, 6)
    assert outcome.speed > 1.1 * best(CURVES["M5 Max"], text, 2500)


def test_what_one_text_taught_serves_the_next() -> None:
    """The first draft is short in any case; the next as long as the drafter is worth, or guessed to be."""
    curve, shared = CURVES["flat"], [Experience()]
    lengths = []
    for seed in range(2):
        text = Text.of(np.full(300 + SLACK, 0.97), np.random.default_rng(seed))
        device = Device(curve, PLAIN)
        policy = Adaptive(curve.costs(PLAIN), 1, device.clock, shared)
        rounds = virtual.run(policy, device, [VirtualDrafter(device, text)], 300).rounds
        lengths.append(sum([r.proposed for r in rounds if r.proposed][:6]))
    assert lengths[1] > 1.2 * lengths[0]


def test_the_decision_stands_until_the_round_is_observed() -> None:
    policy = Adaptive(CURVES["flat"].costs(PLAIN))
    for i in range(100):
        history = [0] * (i + 1)
        decision = policy.decide(history)
        assert policy.decide(history) is decision
        k = decision.choices[0].limit if decision.choices else 0
        policy.observe(Round([1], k, 0, 0.01, drafter=0 if k else None, proposed=k))


def test_a_reader_that_pauses_teaches_nothing_about_the_device() -> None:
    now = [0.0]
    costs = CURVES["CUDA linear"].costs(PLAIN)
    policy = Adaptive(costs, 1, lambda: now[0])
    for i in range(60):
        now[0] += 1.0  # the caller thinks
        policy.decide([0] * (i + 1))
        now[0] += 0.001  # the token was ready long ago
        policy.observe(Round([1], 0, 0, 0.001))
    assert costs.plain(1) == pytest.approx(PLAIN)


def test_decisions_tell_what_a_plain_token_takes() -> None:
    assert Adaptive(CURVES["flat"].costs(PLAIN)).decide([0]).plain_seconds == pytest.approx(PLAIN)
    assert Adaptive(Costs(("drafter",))).decide([0]).plain_seconds is None
    assert Adaptive(Costs(), 0).decide([0]).reason is Reason.NO_DRAFTER


@pytest.mark.parametrize("value", [-1, MAX_DRAFT_TOKENS + 1])
def test_lengths_out_of_range_are_refused(value: int) -> None:
    with pytest.raises(InvalidValue, match=f"num_draft_tokens is {value}, it must be 0 to 16"):
        Fixed(value)


def test_a_fixed_length_asks_every_drafter_in_turn() -> None:
    assert Fixed(3, drafters=2).decide([0]).choices == (Choice(0, 3), Choice(1, 3))
    assert Fixed(0, drafters=2).decide([0]).choices == ()
