"""The first answer of a process that finds its costs saved: everything is slow once (simulated).

The real policy and the real round loop on a virtual clock, see `virtual.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import virtual
from virtual import CURVES, TWO_CORES, Curve, Device, Outcome, Text, VirtualDrafter

from mlx_spec.sampling import Sampler
from mlx_spec.tuning.costs import Costs, Table
from mlx_spec.tuning.policy import Adaptive
from mlx_spec.types import MAX_DRAFT_TOKENS, Draft

PLAIN, TOKENS = 0.005, 60
ALL = {**CURVES, "two cores": TWO_CORES}


class ColdDrafter(VirtualDrafter):
    """Its first draft, and what verifies it, take so many plain steps more."""

    def __init__(self, device: Device, text: Text, cold: float) -> None:
        super().__init__(device, text)
        self.cold = cold

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """As many tokens as asked for."""
        self._device.submit(self.cold)
        self.cold = 0.0
        return super().draft(history, limit, sampler)


def first_answer(curve: Curve, cold: float, right: float, seed: int) -> Outcome:
    """Also the first pass of all is slow."""
    slow = iter([1 + cold])
    device = Device(curve, PLAIN, noise=lambda: next(slow, 1.0))
    text = Text.of(np.full(TOKENS + MAX_DRAFT_TOKENS + 2, right), np.random.default_rng(seed))
    policy = Adaptive(device.curve.costs(PLAIN), 1, device.clock)
    return virtual.run(policy, device, [ColdDrafter(device, text, cold)], TOKENS)


@pytest.mark.parametrize("curve", ["two cores", "M1 Ultra", "M5 Max", "flat"])
@pytest.mark.parametrize("cold", [0.5, 1.5, 5.0, 20.0])
def test_what_is_slow_once_does_not_stop_drafting(curve: str, cold: float) -> None:
    """It was entered in the ledger as lost: one slow draft, and the answer went on without another one."""
    outcomes = [first_answer(ALL[curve], cold, 0.95, seed) for seed in range(6)]
    drafted = [sum(r.accepted for r in o.rounds) / TOKENS for o in outcomes]
    assert np.median(drafted) > 0.5, drafted


@pytest.mark.parametrize("curve", ALL)
@pytest.mark.parametrize("right", [0.02, 0.3, 0.5])
def test_what_is_slow_once_is_all_that_more_is_lost(curve: str, right: float) -> None:
    """The first pass, the first shadow token or draft; then the bound holds as ever."""
    for seed in range(6):
        for cold in (1.5, 5.0):
            assert first_answer(ALL[curve], cold, right, seed).worst < 2 * cold + 3.5


def test_costs_measured_by_this_process_are_no_ones_first() -> None:
    table = Table(PLAIN, {1: PLAIN, 2: PLAIN}, ({1: PLAIN, 2: PLAIN},))
    costs = Costs(("mtp",), {512: table})
    assert not costs.warm
    costs.measured(300, table)
    assert costs.warm == {(0, False), (0, True)}
    assert not Costs.from_table(costs.table(), ["mtp"]).warm
