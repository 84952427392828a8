"""The ledger's bound holds whatever rounds take."""

from __future__ import annotations

import random

import pytest

from mlx_spec.tuning.ledger import BUFFER, EPSILON, KEPT, Ledger


def spend(ledger: Ledger, rounds: int, tokens: int, steps: float) -> float:
    """The loss against plain decoding when drafting whenever the ledger allows."""
    loss = 0.0
    for _ in range(rounds):
        if ledger.open:
            ledger.enter(tokens, steps)
            loss += steps - tokens
        else:
            ledger.enter(1, 1.0)
    return loss


@pytest.mark.parametrize("steps", [1.001, 1.5, 3.0, 20.0])
def test_the_loss_is_bounded(steps: float) -> None:
    rounds = 3000
    loss = spend(Ledger(), rounds, 1, steps)
    assert loss <= EPSILON * rounds + BUFFER + steps
    assert loss > EPSILON * rounds / 2 or steps < 1.01  # what may be spent is spent


def test_the_bound_holds_at_any_time_and_for_any_order_of_gains_and_losses() -> None:
    chance = random.Random(0)
    for _ in range(50):
        ledger, tokens, steps, largest = Ledger(), 0, 0.0, 0.0
        for _ in range(400):
            brought, took = (chance.randint(1, 9), chance.uniform(0.5, 12)) if ledger.open else (1, 1.0)
            ledger.enter(brought, took)
            tokens, steps, largest = tokens + brought, steps + took, max(largest, took)
            assert steps <= (1 + EPSILON) * tokens + BUFFER + largest


def test_old_gains_do_not_pay_for_a_long_loss() -> None:
    ledger = Ledger()
    for _ in range(10_000):
        ledger.enter(4, 1.5)
    assert ledger.lead == KEPT
    assert spend(ledger, 1000, 1, 2.0) < KEPT + BUFFER + EPSILON * 1000 + 2


def test_an_answer_does_not_live_on_the_gains_of_the_ones_before() -> None:
    ledger = Ledger()
    for _ in range(100):
        ledger.enter(4, 1.5)
    ledger.begin()
    assert ledger.lead == 0
    assert spend(ledger, 500, 1, 2.0) <= BUFFER + EPSILON * 500 + 2
    debt = ledger.lead
    ledger.begin()
    assert ledger.lead == debt < 0


def test_plain_decoding_earns_the_right_to_try_again() -> None:
    ledger = Ledger()
    ledger.enter(1, 1 + BUFFER + 2)
    assert not ledger.open
    for _ in range(200):
        ledger.enter(1, 1.0)
    assert ledger.open
