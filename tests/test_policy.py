"""Policies on simulated costs and acceptances: the best length is found, and 0 where drafting loses."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from mlx_spec.errors import InvalidValue
from mlx_spec.tuning.policy import MAX_DRAFT_TOKENS, Adaptive, Fixed
from mlx_spec.types import Reason, Round

CURVES: dict[str, Callable[[int], float]] = {  # seconds of a round that drafts k (simulated)
    "flat": lambda k: 1.0 + 0.06 * k,
    "staircase of five rows": lambda k: 1.0 + 0.05 * k + 0.9 * (k // 5),
    "linear": lambda k: 1.0 + 1.03 * k,
}


def simulate(policy: Adaptive, cost: Callable[[int], float], rate: float, rounds: int) -> list[Round]:
    chance, done = random.Random(5), []
    for _ in range(rounds):
        decision = policy.decide()
        k = accepted = decision.limit
        for i in range(k):
            if chance.random() >= rate:
                accepted = i
                break
        noise = 1 + 0.05 * chance.random()
        done.append(Round([0] * (accepted + 1), k, accepted, cost(k) * noise, decision.reason))
        policy.observe(done[-1])
    return done


def speed(done: list[Round]) -> float:
    return sum(len(r.tokens) for r in done) / sum(r.seconds for r in done)


def expected(k: int, rate: float, cost: Callable[[int], float]) -> float:
    return sum(rate**i for i in range(k + 1)) / cost(k) / 1.025


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.8, 0.95])
def test_the_running_estimate_is_near_the_best_fixed_length(curve: str, rate: float) -> None:
    cost = CURVES[curve]
    best = max(expected(k, rate, cost) for k in (0, 1, 2, 3, 4, 6, 8))
    assert speed(simulate(Adaptive(), cost, rate, 2000)) > 0.93 * best


def test_a_useless_drafter_is_switched_off_and_the_loss_stays_small() -> None:
    done = simulate(Adaptive(), CURVES["flat"], 0.0, 2000)
    assert Counter(r.drafted for r in done)[0] > 1950
    assert done[-1].reason in (Reason.ACCEPTANCE, Reason.PROBE)
    assert speed(done) > 0.97 / 1.025


def test_linear_verification_is_switched_off_with_the_cost_as_reason() -> None:
    done = simulate(Adaptive(), CURVES["linear"], 0.9, 2000)
    assert speed(done) > 0.97 / 1.025
    assert Counter(r.reason for r in done if not r.drafted)[Reason.COST] > 1900


def test_a_text_that_becomes_predictable_is_noticed() -> None:
    policy = Adaptive()
    simulate(policy, CURVES["flat"], 0.0, 300)
    done = simulate(policy, CURVES["flat"], 0.95, 1500)
    assert Counter(r.reason for r in done[-500:])[Reason.PAYS] > 400


def test_decisions_do_not_change_between_rounds() -> None:
    policy = Adaptive()
    for _ in range(200):
        assert policy.decide() == policy.decide()
        policy.observe(Round([1], policy.decide().limit, 0, 0.01))


def test_a_drafter_that_finds_nothing_is_asked_again() -> None:
    policy = Adaptive()
    for _ in range(100):
        policy.observe(Round([1], 0, 0, 0.01, policy.decide().reason))
    assert policy.decide().limit > 0


@pytest.mark.parametrize("value", [-1, MAX_DRAFT_TOKENS + 1])
def test_lengths_out_of_range_are_refused(value: int) -> None:
    with pytest.raises(InvalidValue, match=f"num_draft_tokens is {value}, it must be 0 to 16"):
        Fixed(value)
