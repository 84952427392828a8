"""The best draft length for one sequence, and the best share of a batch's rows."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest
from virtual_clock import CURVES, Device, decode, make_text

from mlx_spec.policy import AdaptivePolicies, lengths


def speed(curve, rate, length):
    """Return the speed of a fixed length, in plain decoding's, if tokens are accepted independently."""
    if not length:
        return 1.0
    tokens = sum(rate**k for k in range(length + 1))
    return tokens / (curve.rows(length + 1) + length * curve.drafted + curve.host)


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("percent", [60, 80, 90])
def test_the_policy_finds_the_best_length(name, percent):
    curve = CURVES[name]
    device, policies = Device(curve), AdaptivePolicies(["mtp"])
    policies.use(curve.table())
    policy = policies.policy(device.clock)
    decode(policy, device, make_text(f"ind{percent}", 1500, [1]), 1500)
    rounds = decode(policy, device, make_text(f"ind{percent}", 1500, [2]), 1500).rounds
    usual = Counter(round.drafted for round in rounds).most_common(1)[0][0]
    speeds = [speed(curve, percent / 100, length) for length in range(17)]
    assert speeds[usual] >= 0.97 * max(speeds)


def batch_speed(reach, depths, passes, drafting):
    count, total = len(reach), sum(depths)
    if not total:
        return count / passes[count]
    tokens = count + sum(sum(row[:depth]) for row, depth in zip(reach, depths, strict=True))
    return tokens / (passes[count + total] + drafting * max(depths))


@pytest.mark.parametrize("seed", range(40))
def test_a_batch_against_brute_force(seed):
    chance = random.Random(seed)
    count, limit = chance.randint(1, 3), chance.randint(1, 4)
    reach = [np.cumprod([chance.random() for _ in range(limit)]).tolist() for _ in range(count)]
    passes = list(
        itertools.accumulate(chance.choice((0.0, 0.1, 0.5)) for _ in range(count * limit + count + 1))
    )
    passes = [1.0 + seconds for seconds in passes]
    drafting = chance.choice((0.0, 0.06))
    found = lengths(reach, passes[count], lambda rows: passes[rows], lambda k: drafting * k)
    best = max(
        batch_speed(reach, depths, passes, drafting)
        for depths in itertools.product(range(limit + 1), repeat=count)
    )
    assert batch_speed(reach, found, passes, drafting) == pytest.approx(best)


def test_equal_sequences_share_a_row_that_only_one_can_have():
    found = lengths([[0.9, 0.1], [0.9, 0.1]], 1.0, lambda rows: 1.0 if rows <= 3 else 9.0, lambda k: 0.0)
    assert sorted(found) == [0, 1]
