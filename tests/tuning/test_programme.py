"""The programme against brute force: the best length, and the best causal cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from mlx_spec.tuning.hindsight import Hindsight
from mlx_spec.tuning.programme import (
    LIMITS,
    Chances,
    Drafting,
    Rule,
    brought,
    fitted,
    hopeless,
    selective,
    steady,
)

Floats = NDArray[np.float64]
K, BINS = 16, 10
STAIRS = np.array([1.0, 1.0, 1.05, 1.1, 1.15, 1.2, *([2.1] * 5), *([3.1] * 7)])
LINEAR = np.arange(18.0)


def drafting(verify: Floats, c: float = 0.05, offered: Floats | None = None) -> Drafting:
    return Drafting(c * np.arange(K + 1.0), verify, np.ones(K) if offered is None else offered)


@pytest.mark.parametrize("a", [0.2, 0.6, 0.9, 0.97])
@pytest.mark.parametrize("verify", [STAIRS, LINEAR])
def test_the_best_length_is_that_of_the_formula(a: float, verify: Floats) -> None:
    def rate(k: int) -> float:
        return sum(a**i for i in range(k + 1)) / float(0.05 * k + verify[k + 1])

    best = max(range(1, K + 1), key=rate)
    found = steady(drafting(verify), brought(drafting(verify), np.full(K, a)), rate(best))
    assert found.limit == best
    assert found.tokens / found.seconds == pytest.approx(rate(best))


def test_drafts_shorter_than_asked_for_cost_and_bring_less() -> None:
    offered = np.array([1.0, 0.5, *([0.0] * 14)])
    stairs = drafting(STAIRS, offered=offered)
    found = steady(stairs, brought(stairs, np.full(K, 0.9)), 0.1)
    assert found.tokens == pytest.approx(1 + 0.9 + 0.5 * 0.81)
    assert found.seconds == pytest.approx((0.05 + 1.05 + 0.10 + 1.1) / 2)


def test_what_is_seen_of_confidence_fits_the_acceptance_now() -> None:
    rates = np.tile(np.linspace(0.05, 0.95, BINS), (K, 1))
    chances = fitted(rates, np.full(BINS, 0.1), np.full(BINS, 0.1), np.array([0.8, *([0.6] * 15)]))
    assert chances.blind()[:2] == pytest.approx([0.8, 0.6], abs=0.03)


def test_what_is_hopeless_is_not_saved_by_any_confidence() -> None:
    """Not by one that is all but certain, and there is little that is not hopeless and is not saved by it."""
    told = np.tile(np.array([0.002, 0.998]), (K, 1))
    found = []
    for first, c, verify in itertools.product((0.02, 0.1, 0.3, 0.8), (0.02, 0.1, 0.3), (STAIRS, LINEAR)):
        now = np.array([first, *([0.6] * 15)])
        shares = [np.array([1 - a, a]) for a in (first, 0.6)]
        action, _ = selective(drafting(verify, c), Chances(told, *shares), 0.05, 1.0)
        gained = action.value(1.0) - (1 - verify[1])
        lost = hopeless(drafting(verify, c), now, 0.05, 1.0)
        assert not lost or gained < 0.01
        found.append((lost, gained > 0))
    assert len(set(found)) > 1 and found.count((False, False)) <= 2, found


def brute_force(verify: Floats, q: tuple[float, float], share: float, host: float, rho: float) -> float:
    """The best value of any limit up to 3 and any causal rule, for confidences of two kinds."""
    best = -np.inf
    for limit in (1, 2, 3):
        paths = [path for length in range(1, limit + 1) for path in itertools.product((0, 1), repeat=length)]
        for rule in itertools.product((False, True), repeat=len(paths)):
            goes = dict(zip(paths, rule, strict=True))
            value = 1 - rho * (0.05 * limit + host + verify[1])
            for path in paths:
                if all(goes[path[: i + 1]] for i in range(len(path))):
                    seen = np.prod([share if x else 1 - share for x in path])
                    reach = np.prod([q[x] for x in path])
                    value += seen * (reach - rho * (verify[len(path) + 1] - verify[len(path)]))
            best = max(best, value)
    return best


@pytest.mark.parametrize(
    "verify", [STAIRS, LINEAR * 0.5 + 0.5, np.array([1, 1, 1.6, 1.6, 1.65, *([9.0] * 13)])]
)
@pytest.mark.parametrize("share", [0.4])
def test_the_cut_is_the_best_of_all_causal_ones(verify: Floats, share: float) -> None:
    beyond = np.array([*verify[:5], *([50.0] * 13)])  # more than 3 never pay
    rates = np.tile(np.where(np.arange(BINS) < 5, 0.2, 0.9), (K, 1))
    shares = np.where(np.arange(BINS) < 5, (1 - share) / 5, share / 5)
    action, _ = selective(drafting(beyond), Chances(rates, shares, shares), 0.02, 1.1)
    assert action.limit <= 4
    assert action.value(1.1) == pytest.approx(brute_force(beyond, (0.2, 0.9), share, 0.02, 1.1), abs=0.02)


def test_a_step_is_climbed_for_what_lies_behind_it() -> None:
    """The second row costs more than any token is worth; the rows after it are free."""
    verify = np.array([1.0, 1.0, 2.2, *([2.2] * 15)])
    rates, shares = np.full((K, BINS), 0.95), np.full(BINS, 0.1)
    action, rule = selective(drafting(verify, c=0.01), Chances(rates, shares, shares), 0.0, 1.5)
    assert action.limit == LIMITS[-1]
    assert rule.cut([9] * K) == K


def test_a_cut_depends_on_no_later_confidence() -> None:
    chance = np.random.default_rng(0)
    rates = np.sort(chance.random((K, BINS)), axis=1) * 0.98 + 0.01
    shares = np.full(BINS, 0.1)
    _, rule = selective(drafting(LINEAR * 0.3 + 0.7), Chances(rates, shares, shares), 0.01, 1.0)
    lengths = set()
    for _ in range(300):
        bins = chance.integers(0, BINS, K).tolist()
        cut = rule.cut(bins)
        lengths.add(cut)
        for j in range(K):
            other = bins[: j + 1] + chance.integers(0, BINS, K - j - 1).tolist()
            assert (rule.cut(other) > j) == (cut > j)
    assert len(lengths) > 2


def test_a_rule_that_looks_ahead_would_be_noticed() -> None:
    class Peeking(Rule):
        def cut(self, bins: Sequence[int]) -> int:
            return sum(b > 5 for b in bins)

    rule = Peeking((0.0,) * K, [[1.0] * BINS] * K)
    assert (rule.cut([0, 9]) > 0) != (rule.cut([0, 0]) > 0)


def test_hindsight_knows_what_every_fixed_length_would_have_taken() -> None:
    """Counted from runs, while the rounds that show them draft three tokens."""
    chance = np.random.default_rng(4)
    right = chance.random(4000) < 0.8
    times = np.array([1.0, *(1 + 0.1 * k for k in range(1, K + 1))])
    hindsight, place = Hindsight(), 0
    hindsight.price(times)
    while place < 3900:
        wrong = np.flatnonzero(~right[place : place + 3])
        n = int(wrong[0]) if len(wrong) else 3
        hindsight.enter(n, rejected=n < 3, next_right=float(right[place + 3]), steps=times[3])
        place += n + 1

    def passes(k: int) -> int:
        at = count = 0
        while at < 3900:
            wrong = np.flatnonzero(~right[at : at + k])
            at += (int(wrong[0]) if len(wrong) else k) + 1
            count += 1
        return count

    truth = np.array([passes(k) for k in range(K + 1)]) * times
    hindsight.price(times)
    assert hindsight.length in (None, int(truth.argmin()))
    assert truth[hindsight.best] < 1.01 * truth.min()
