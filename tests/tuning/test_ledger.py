"""The ledger's bound holds whatever rounds take."""

from __future__ import annotations

import random

import pytest

from mlx_spec.tuning.ledger import BUFFER, EPSILON, LOAN, Ledger
from mlx_spec.tuning.purse import KEPT, Purse


def allowed(tokens: int) -> float:
    """Plain steps that an answer of so many tokens may lose."""
    return EPSILON * tokens + BUFFER


def spend(ledger: Ledger, rounds: int, tokens: int, steps: float) -> float:
    """The loss against plain decoding when drafting whenever the ledger allows the worst."""
    loss = 0.0
    for _ in range(rounds):
        if ledger.room >= steps - 1:
            ledger.enter(tokens, steps)
            loss += steps - tokens
        else:
            ledger.enter(1, 1.0)
    return loss


@pytest.mark.parametrize("steps", [1.001, 1.5, 3.0, 20.0])
def test_the_loss_is_bounded(steps: float) -> None:
    rounds = 3000
    loss = spend(Ledger(Purse()), rounds, 1, steps)
    assert loss <= allowed(rounds)
    assert loss > EPSILON * rounds / 2 or steps < 1.01  # what may be spent is spent


def test_a_short_answer_may_lose_little() -> None:
    assert spend(Ledger(Purse()), 40, 1, 2.5) <= allowed(40) <= 2
    assert spend(Ledger(Purse()), 40, 1, 4.5) == 0  # one round would be too much


def test_the_bound_holds_at_any_time_and_for_any_order_of_gains_and_losses() -> None:
    chance = random.Random(0)
    for _ in range(50):
        ledger, tokens, steps = Ledger(Purse()), 0, 0.0
        for _ in range(400):
            brought, took = chance.randint(1, 9), chance.uniform(0.5, 12)
            if ledger.room < took - 1:
                brought, took = 1, 1.0
            ledger.enter(brought, took)
            tokens, steps = tokens + brought, steps + took
            assert steps <= tokens + allowed(tokens)


def test_old_gains_do_not_pay_for_a_long_loss() -> None:
    ledger = Ledger(Purse())
    for _ in range(10_000):
        ledger.enter(4, 1.5)
    assert ledger.lead == KEPT
    assert spend(ledger, 1000, 1, 2.0) < KEPT + BUFFER + EPSILON * 1000 + 2


@pytest.mark.parametrize("before", [1.5, 40.0])
def test_an_answer_neither_lives_on_the_ones_before_nor_pays_for_them(before: float) -> None:
    ledger = Ledger(Purse())
    for _ in range(100):
        ledger.enter(4, before)
    ledger.begin()
    assert ledger.lead == 0 and ledger.room == BUFFER
    assert 0 < spend(ledger, 500, 1, 2.0) <= allowed(500)


def test_no_more_is_lent_than_answers_before_have_spared() -> None:
    ledger = Ledger(Purse())
    assert ledger.loan == 0
    ledger.enter(1, 1 + BUFFER)
    ledger.begin()
    assert ledger.loan == 0  # they have spared nothing
    for _ in range(100):
        ledger.enter(2, 1.0)
    ledger.begin()
    assert ledger.loan == LOAN
    lost = 0.0
    while ledger.room + ledger.loan > 0:
        ledger.enter(1, 2.0)
        lost += 1
    assert lost < BUFFER + LOAN + 1
    ledger.enter(1, 1 + KEPT)
    assert ledger.loan == 0


def test_plain_decoding_earns_the_right_to_try_again() -> None:
    ledger = Ledger(Purse())
    ledger.enter(1, 1 + BUFFER)
    assert ledger.room < 0.5
    for _ in range(150):
        ledger.enter(1, 1.0)
    assert ledger.room > 1


@pytest.mark.parametrize("waits_for_both", [True, False])
def test_a_token_begun_ahead_is_entered_when_it_comes(waits_for_both: bool) -> None:
    """Some backends have it computed within the round before; the sum is the same, and no debt in between."""
    ledger = Ledger(Purse())
    took = 2.1 if waits_for_both else 1.1
    ledger.enter(1, ledger.ahead(took, 1.1))
    assert ledger.lead == pytest.approx((1 + EPSILON) - 1.1)
    ledger.enter(1, ledger.landed(0.0 if waits_for_both else 1.0))
    assert ledger.lead == pytest.approx(2 * (1 + EPSILON) - 2.1)
    assert ledger.landed(5.0) == 1.0  # the reader paused


@pytest.mark.parametrize("waits_for_both", [False, True])
def test_a_token_that_nobody_waited_for_counts_as_one_of_plain_decoding(waits_for_both: bool) -> None:
    ledger = Ledger(Purse())
    ledger.ahead(2.1 if waits_for_both else 1.1, 1.1)
    assert ledger.landed(None) == 1.0
    assert ledger.landed(0.0) == 0.0


def test_what_one_sequence_spared_another_may_borrow() -> None:
    """A server makes a sequence for every request: none of them had anything to borrow."""
    purse = Purse()
    assert Ledger(purse).loan == 0
    Ledger(purse).enter(4, 1.5)
    assert Ledger(purse).loan == LOAN
    Ledger(purse).enter(1, 5.0)
    assert Ledger(purse).loan == 0
