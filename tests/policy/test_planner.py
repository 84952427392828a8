"""The best draft length for one sequence; for several: tests/batch/test_batch_policy.py."""

from __future__ import annotations

from collections import Counter

import pytest
from virtual_clock import CURVES, Device, decode, make_text

from mlx_spec.policy import AdaptivePolicies


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
