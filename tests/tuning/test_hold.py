"""What is not done in every round: plans made anew, and learning from rounds in which nothing changes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
import virtual
from virtual import CURVES, Device, Text, VirtualDrafter

from mlx_spec.tuning.acceptance import Acceptance, Experience
from mlx_spec.tuning.costs import Costs
from mlx_spec.tuning.ledger import BUFFER, EPSILON
from mlx_spec.tuning.outlook import PLANNING, Outlook
from mlx_spec.tuning.plan import Planner
from mlx_spec.tuning.policy import Adaptive
from mlx_spec.tuning.room import UNSEEN
from mlx_spec.types import Decision, Round

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


def test_plain_decoding_goes_on_over_shadow_tokens_of_lookup_that_fail() -> None:
    now, rounds, seen = [0.0], 200, Experience()
    table = replace(CURVES["M1 Ultra"].table(PLAIN), draft=({1: 1e-6, 16: 1e-6},))
    policy = Adaptive(Costs(("lookup",), {512: table}), 1, lambda: now[0], [seen], {0})
    policy.begin()
    decisions, failed = [], list[int]()
    for i in range(rounds):
        decisions.append(policy.decide([0] * (i + 1)))
        now[0] += PLAIN
        found = decisions[-1].shadow == 0 and i % 3 == 0
        round = Round([1], 0, 0, PLAIN, finish_reason="length" if i == rounds - 1 else None)
        policy.observe(replace(round, drafter=0, agreement=0.0) if found else round)
        failed += [i] * found
    assert len(failed) > 20
    assert sum(decisions[i] is decisions[i + 1] for i in failed[:-1]) > 0.7 * len(failed)
    assert seen.positions.count(0) == pytest.approx(len(failed), rel=0.05)  # all of them are learned from


@dataclass
class Drafting:
    """A policy that is asked for drafts, where they cost little."""

    now: float = 0.0
    experience: Experience = field(default_factory=Experience)
    decisions: list[Decision] = field(default_factory=list)
    known: list[float] = field(default_factory=lambda: [0.0])  # rounds learned from, after each
    tokens: list[int] = field(default_factory=lambda: [0])

    def __post_init__(self) -> None:
        costs = CURVES["flat"].costs(PLAIN)
        self.policy = Adaptive(costs, 1, lambda: self.now, [self.experience])

    @property
    def learned(self) -> list[int]:
        """By round, how many were learned from in it."""
        return [round(after - before) for before, after in pairwise(self.known)]

    def round(self, took: float = 1.02, accepted: int = 4, drafts: bool = True) -> Decision:
        """One that takes so many plain steps."""
        decision = self.policy.decide(self.tokens)
        self.decisions.append(decision)
        drafts = drafts and bool(decision.choices)
        drafted = decision.choices[0].limit if drafts else 0
        right = min(accepted, drafted)
        self.now += took * PLAIN
        done = Round([1] * (right + 1), drafted, right, took * PLAIN)
        self.policy.observe(replace(done, drafter=0, proposed=drafted) if drafts else done)
        self.tokens += done.tokens
        self.known.append(self.experience.positions.count(0))
        return decision

    def until_it_is_repeated(self) -> None:
        """The draft of the last round is to be drafted again, unseen."""
        while len(self.decisions) < 10 or self.learned[-1] != UNSEEN:
            self.round()


def test_a_draft_is_repeated_and_what_its_rounds_teach_is_learned_when_it_ends() -> None:
    drafting = Drafting()
    for _ in range(60):
        drafting.round()
    drafted = [learned for learned, d in zip(drafting.learned, drafting.decisions, strict=True) if d.choices]
    assert drafted[:2] == [1, 1]  # at once, as long as nothing is proven
    assert sum(drafted) >= len(drafted) - UNSEEN
    assert max(drafted) <= UNSEEN
    assert sum(a is b for a, b in pairwise(drafting.decisions)) > 30


@pytest.mark.parametrize(("took", "drafts"), [(3.0, True), (1.0, False)])
def test_a_late_round_and_one_without_the_draft_are_seen_at_once(took: float, drafts: bool) -> None:
    drafting = Drafting()
    drafting.until_it_is_repeated()
    drafting.round(took=took, drafts=drafts)
    assert drafting.decisions[-1] is drafting.decisions[-2]
    assert drafting.policy.decide(drafting.tokens) is not drafting.decisions[-1]


@pytest.mark.parametrize("right", range(1, 40, 3))
@pytest.mark.parametrize("curve", ["M1 Ultra", "M5 Max"])
def test_nothing_is_repeated_that_the_lead_does_not_pay_for(curve: str, right: int) -> None:
    device = Device(CURVES[curve], PLAIN)
    text = Text(np.arange(400) <= right, np.full(400, 0.5))
    policy = Adaptive(CURVES[curve].costs(PLAIN), 1, device.clock)
    outcome = virtual.run(policy, device, [VirtualDrafter(device, text, tells=False)], 300)
    assert max(round.drafted for round in outcome.rounds) > 1
    longest = max(round.drafted * 0.5 for round in outcome.rounds)
    assert outcome.worst < BUFFER + EPSILON * 300 + longest


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
