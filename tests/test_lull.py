"""What is not done in every round: plans made anew, and learning from rounds in which nothing happens."""

from __future__ import annotations

from itertools import pairwise

import pytest
from virtual import CURVES

from mlx_spec.tuning.acceptance import Acceptance, Experience
from mlx_spec.tuning.outlook import PLANNING, Outlook
from mlx_spec.tuning.plan import Planner
from mlx_spec.tuning.policy import Adaptive
from mlx_spec.types import Round

PLAIN = 0.03  # seconds


def test_a_decision_holds_and_what_its_rounds_teach_is_learned_when_it_ends() -> None:
    now, rounds = [0.0], 60
    costs = CURVES["CUDA linear"].costs(PLAIN)
    policy = Adaptive(costs, 1, lambda: now[0])
    decisions, timed = [], [0]
    for i in range(rounds):
        decisions.append(policy.decide([0] * (i + 1)))
        assert not decisions[-1].choices
        now[0] += 1.2 * PLAIN
        finish = "length" if i == rounds - 1 else None
        policy.observe(Round([1], 0, 0, 1.2 * PLAIN, finish_reason=finish))
        timed.append(costs.timed(1))
    held = sum(a is b for a, b in pairwise(decisions))
    assert held > 0.7 * rounds
    learned = [after - before for before, after in pairwise(timed)]
    assert max(learned) > 4
    assert sum(learned) >= rounds - 2  # all but the first, which was not begun ahead, and the last
    assert costs.plain(1) == pytest.approx(1.2 * PLAIN, rel=0.02)


def outlook(rate: float, clock: list[float]) -> tuple[Outlook, Acceptance]:
    """Of a drafter that was right at this rate in answers before, where 0.8 pays and 0.1 does not.

    Every look at the clock takes a millisecond.
    """
    experience = Experience()
    before = Acceptance(experience)
    for _ in range(30):
        before.begin()
        before.compared(rate, ())
        before.compared(rate, ())
    acceptance = Acceptance(experience)

    def look() -> float:
        clock[0] += 0.001
        return clock[0]

    planner = Planner(CURVES["M1 Ultra"].costs(PLAIN), [acceptance])
    return Outlook(planner, [acceptance], look), acceptance


def test_a_drafter_that_is_not_used_and_gets_worse_is_no_reason_for_another_plan() -> None:
    found, acceptance = outlook(0.1, [0.0])
    plan = found.now(1)
    assert not plan.choices
    for _ in range(4):
        acceptance.compared(0.0, ())
        found.tick(PLAIN, judged=True)
        assert found.now(1) is plan
    plans = {id(plan)}
    for _ in range(8):
        acceptance.compared(1.0, ())
        found.tick(PLAIN, judged=True)
        plans.add(id(found.now(1)))
    assert len(plans) > 1
    assert found.now(1).choices


def test_a_drafter_that_is_used_and_gets_worse_is_one() -> None:
    found, acceptance = outlook(0.8, [0.0])
    plan = found.now(1)
    assert plan.choices
    for _ in range(8):
        acceptance.compared(0.0, ())
        found.tick(PLAIN, judged=True)
    assert found.now(1) is not plan
    assert not found.now(1).choices


def test_time_of_others_is_no_time_to_make_plans_in() -> None:
    clock = [0.0]
    found, _ = outlook(0.1, clock)
    plan = found.now(1)
    rest = int(0.001 / PLANNING / PLAIN)  # rounds of which one look at the clock is the share
    for _ in range(rest - 1):
        clock[0] += 10.0  # another sequence has its turn
        found.tick(PLAIN, judged=False)
        found.stale()
        assert found.now(1) is plan
    found.tick(2 * PLAIN, judged=False)
    assert found.now(1) is not plan
