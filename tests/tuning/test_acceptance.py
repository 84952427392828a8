"""Acceptance: rates by position and by confidence from rounds as the engine reports them."""

from __future__ import annotations

import random

import pytest

from mlx_spec.tuning.acceptance import Acceptance, Experience, bin_of
from mlx_spec.types import Round

K = 4


def judged(accepted: int, drafted: int, confidence: tuple[float, ...] = (), proposed: int = 0) -> Round:
    tokens = [0] * (accepted + 1)
    return Round(tokens, drafted, accepted, drafter=0, proposed=proposed or drafted, confidence=confidence)


def feed(acceptance: Acceptance, rates: list[float], rounds: int, seed: int = 0, drafted: int = K) -> None:
    chance = random.Random(seed)
    for _ in range(rounds):
        n = 0
        while n < drafted and chance.random() < rates[n]:
            n += 1
        acceptance.tick()
        acceptance.saw(judged(n, drafted), drafted)
    acceptance.refresh()


def test_rates_by_position_are_found_and_go_on_behind_them() -> None:
    acceptance = Acceptance(Experience())
    feed(acceptance, [0.9, 0.6, 0.8, 0.5], 1500)
    assert acceptance.rates()[:K] == pytest.approx([0.9, 0.6, 0.8, 0.5], abs=0.12)
    assert 0.35 < acceptance.rates()[K] < 0.75  # not seen: near the position before


def test_always_wrong_and_always_right() -> None:
    for right in (0.0, 1.0):
        acceptance = Acceptance(Experience())
        feed(acceptance, [right] * K, 60)
        assert acceptance.rates()[0] == pytest.approx(right, abs=0.06)


def test_an_accepted_stop_token_is_no_rejection() -> None:
    acceptance, other = Acceptance(Experience()), Acceptance(Experience())
    for _ in range(50):
        acceptance.saw(Round([0, 0], 4, 2, drafter=0, proposed=4), 4)  # cut at the second accepted token
        other.saw(Round([0, 0, 0], 4, 2, drafter=0, proposed=4), 4)  # the third was rejected
    acceptance.refresh()
    other.refresh()
    assert acceptance.rates()[2] > 0.8
    assert other.rates()[2] < 0.2


def test_what_a_pair_learned_is_where_the_next_text_begins() -> None:
    pair = Experience()
    feed(Acceptance(pair), [0.2] * K, 400)
    fresh = Acceptance(pair)
    assert fresh.rates()[0] == pytest.approx(0.2, abs=0.07)
    feed(fresh, [0.95] * K, 40)
    assert fresh.rates()[0] > 0.7


def confident(noise: bool, rounds: int = 800) -> Acceptance:
    """Tokens of 0.9 and of 0.3 in turn; confidence says which, or nothing."""
    acceptance, chance = Acceptance(Experience()), random.Random(1)
    for i in range(rounds):
        odds = 0.9 if i % 2 else 0.3
        sure = chance.random() if noise else odds
        acceptance.tick()
        acceptance.saw(judged(int(chance.random() < odds), 1, (sure,)), 1)
        acceptance.refresh()
    return acceptance


def test_confidence_is_calibrated() -> None:
    rates = confident(noise=False).by_confidence()
    assert rates[0][bin_of(0.9)] == pytest.approx(0.9, abs=0.06)
    assert rates[0][bin_of(0.3)] == pytest.approx(0.3, abs=0.1)


def test_confidence_that_means_nothing_says_what_the_position_says() -> None:
    acceptance = confident(noise=True)
    rates = acceptance.by_confidence()[0]
    assert max(rates) - min(rates) < 0.2
    assert sum(rates) / len(rates) == pytest.approx(0.6, abs=0.1)


def test_rounds_without_confidence_tell_nothing_about_it() -> None:
    acceptance = Acceptance(Experience())
    feed(acceptance, [0.5] * K, 50)
    assert not acceptance.told


def test_tokens_cut_off_for_low_confidence_count_as_their_confidence_says() -> None:
    """Only sure tokens are verified, all of which pass. That must not look like a rate of 1."""
    acceptance, chance = confident(noise=False), random.Random(2)
    for _ in range(400):
        sure = chance.choice((0.9, 0.3))
        right = chance.random() < 0.9
        verified = int(sure > 0.5)
        acceptance.saw(judged(int(verified and right), verified, (sure,), proposed=1), 1)
    acceptance.refresh()
    assert acceptance.rates()[0] == pytest.approx(0.6, abs=0.12)


def test_a_shadow_token_moves_the_first_position() -> None:
    acceptance = Acceptance(Experience())
    for _ in range(60):
        acceptance.tick()
        acceptance.saw_shadow(0.0, (0.5,))
    acceptance.refresh()
    assert acceptance.rates()[0] < 0.15
    assert acceptance.told


def test_the_last_rounds_move_all_positions_and_are_forgotten() -> None:
    acceptance = Acceptance(Experience())
    feed(acceptance, [0.9] * K, 100)
    feed(acceptance, [0.05] * K, 100, seed=1)
    feed(acceptance, [0.9] * K, 100, seed=2)  # a text in stretches: following it pays
    calm = acceptance.rates()
    feed(acceptance, [0.0] * K, 6, seed=3)
    assert acceptance.drift < -0.3
    assert acceptance.rates()[1] < calm[1] - 0.05
    acceptance.tick(300)
    assert acceptance.drift == pytest.approx(0.0, abs=0.05)


def test_how_often_and_how_long_drafts_are() -> None:
    acceptance = Acceptance(Experience())
    for i in range(200):
        if i % 4:
            acceptance.missed()
        else:
            acceptance.saw(judged(0, 2), 6)  # six were asked for, two came
    acceptance.refresh()
    assert acceptance.had == pytest.approx(0.25, abs=0.05)
    assert acceptance.lengths[:3] == pytest.approx([1, 1, 0], abs=0.1)
