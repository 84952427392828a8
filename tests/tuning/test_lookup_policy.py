"""The policy and a drafter that reads nothing of the target and seldom has a draft: lookup (simulated).

The real policy and the real round loop on a virtual clock, see `virtual.py`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
import virtual
from virtual import TWO_CORES, Curve, Device, Outcome, Text, VirtualDrafter, VirtualLookup

from mlx_spec.engine import generate
from mlx_spec.sampling import Sampling
from mlx_spec.tuning.costs import Costs, Table
from mlx_spec.tuning.policy import Adaptive
from mlx_spec.tuning.probes import Probes
from mlx_spec.types import Reason

PLAIN = 0.03  # seconds
SLACK = 40  # tokens of text behind the last: a drafter looks beyond it
FREE = {1: 1e-6, 16: 2e-6}  # seconds of drafts


def seldom(every: int, wrong: float) -> Outcome:
    """Lookup alone, which has two tokens of every so many, on a device that is quicker in one queue."""
    tokens, curve = 3000, dataclasses.replace(TWO_CORES, drafted=0.0, host=0.15)
    device, chance = Device(curve, PLAIN), np.random.default_rng(5)
    repeats = np.arange(tokens + SLACK) % every < 2
    drafter = VirtualLookup(repeats, chance.random(tokens + SLACK) < wrong)
    costs = Costs(("lookup",), {512: Table(PLAIN, curve.table(PLAIN).verify, (FREE,))})
    return virtual.run(Adaptive(costs, 1, device.clock), device, [drafter], tokens)


@pytest.mark.parametrize("every", [12, 40])
def test_a_drafter_that_seldom_has_a_draft_takes_nothing_where_it_has_none(every: int) -> None:
    """While it has none, plain decoding goes on one token ahead, and its reason is that there is none."""
    assert seldom(every, 1.0).speed > 0.985
    outcome = seldom(every, 0.0)
    assert outcome.speed > 1 + 0.3 / every
    waiting = [r.reason is Reason.WAITING for r in outcome.rounds if not r.drafted]
    assert sum(waiting) > 0.5 * len(waiting)


@pytest.mark.parametrize("factor", [0.6, 1.6])
def test_what_plain_decoding_takes_is_seen_while_a_draft_is_waited_for(factor: float) -> None:
    """A machine that became faster would make drafts look cheap, in plain steps that nothing takes now."""
    tokens, curve, pace = 600, TWO_CORES, [1.0]
    device = Device(curve, PLAIN, noise=lambda: pace[0])
    costs = Costs(("lookup",), {512: Table(PLAIN, curve.table(PLAIN).verify, (FREE,))})
    repeats = np.arange(tokens + SLACK) < 12
    drafter = VirtualLookup(repeats, np.zeros(len(repeats), bool))
    policy = Adaptive(costs, 1, device.clock)
    virtual.run(policy, device, [drafter], tokens // 2)
    assert policy.decide([0] * 300).reason is Reason.WAITING
    pace[0] = factor
    target = virtual.VirtualTarget(device)
    clocked = virtual.Clocked(policy, device, target)
    sampler = Sampling().sampler(1, virtual.VOCABULARY)
    for _ in generate(target, [drafter], clocked, sampler, [0] * 300, max_tokens=40):
        pass
    assert costs.plain(300) == pytest.approx(factor * PLAIN, rel=0.1)


def test_shadow_tokens_that_read_nothing_of_the_target_leave_plain_decoding_in_its_queue() -> None:
    """Lookup that is always wrong is found out, and each look takes what its draft takes, here nothing."""
    tokens, curve = 600, dataclasses.replace(TWO_CORES, drafted=0.0, host=0.15)
    costs = {512: Table(PLAIN, curve.table(PLAIN).verify, (FREE,))}
    lost, looks = [], []
    for free in ((), {0}):
        device = Device(curve, PLAIN)
        drafter = VirtualLookup(np.ones(tokens + SLACK, bool), np.ones(tokens + SLACK, bool))
        policy = Adaptive(Costs(("lookup",), costs), 1, device.clock, free=free)
        done = virtual.run(policy, device, [drafter], tokens)
        looks.append(sum(r.agreement is not None for r in done.rounds))
        lost.append(device.now / PLAIN - tokens)
    assert looks[1] >= looks[0] > 0
    assert lost[1] < lost[0] and lost[1] < 3, (lost, looks)


@pytest.mark.parametrize("free", [(), {0}])
def test_a_draft_found_while_a_token_is_on_its_way_does_not_pass_for_a_quick_token(free: set[int]) -> None:
    """Some backends give a token only with the next, if that was begun; the next is then there at once."""
    tokens, curve = 1200, TWO_CORES
    device = Device(curve, PLAIN, in_order=True)
    costs = Costs(("lookup",), {512: Table(PLAIN, curve.table(PLAIN).verify, (FREE,))})
    repeats = np.arange(tokens + SLACK) % 9 < 4
    drafter = VirtualLookup(repeats, np.arange(tokens + SLACK) % 36 < 9)
    found = []
    for _ in range(3):
        outcome = virtual.run(Adaptive(costs, 1, device.clock, free=free), device, [drafter], tokens // 3)
        found.append(costs.plain(1))
    assert found == pytest.approx([PLAIN] * 3, rel=0.05)
    assert sum(r.proposed > r.drafted == 0 for r in outcome.rounds) > 10


@pytest.mark.parametrize("right", [False, True])
def test_a_first_draft_is_preceded_by_a_shadow_token_unless_it_is_nearly_sure(right: bool) -> None:
    """A free look where many a first draft is wrong, and none where all are right."""
    tokens, curve = 40, TWO_CORES
    device = Device(curve, PLAIN)
    costs = Costs(("lookup",), {512: Table(PLAIN, curve.table(PLAIN).verify, (FREE,))})
    drafter = VirtualLookup(np.ones(tokens + SLACK, bool), np.full(tokens + SLACK, not right))
    policy, outcomes = Adaptive(costs, 1, device.clock, free={0}), []
    for _ in range(12):
        outcomes.append(virtual.run(policy, device, [drafter], tokens))
    looked = [any(r.agreement is not None for r in outcome.rounds) for outcome in outcomes]
    drafted = [sum(r.drafted for r in outcome.rounds) for outcome in outcomes]
    assert looked[0] and looked[-1] is not right
    assert min(drafted) > 0 if right else sum(drafted) <= 2  # those of one trial
    speed = sum(tokens for _ in outcomes) * PLAIN / sum(outcome.seconds for outcome in outcomes)
    assert speed > (2 if right else 0.995)


def test_lookup_is_not_held_back_where_another_one_drafts() -> None:
    """It would have no shadow tokens there: those belong to plain rounds."""
    tokens, curve = 60, TWO_CORES
    device, chance = Device(curve, PLAIN), np.random.default_rng(3)
    table = curve.table(PLAIN)
    costs = Costs(("lookup", "neural"), {512: Table(PLAIN, table.verify, (FREE, *table.draft))})
    policy, used = Adaptive(costs, 2, device.clock, free={0}), []
    for answer in range(16):
        text = Text.of(np.full(tokens + SLACK, 0.97), chance)
        wrong = np.full(tokens + SLACK, answer % 2 == 1)
        drafters = [VirtualLookup(np.arange(tokens + SLACK) > 4, wrong), VirtualDrafter(device, text)]
        outcome = virtual.run(policy, device, drafters, tokens)
        used.append(sum(r.accepted for r in outcome.rounds if r.drafter == 0))
    assert min(used[8::2]) > tokens / 3, used


@pytest.mark.parametrize("in_order", [True, False])
def test_what_it_takes_to_begin_anew_is_learned(in_order: bool) -> None:
    """A plain token that nothing was begun for takes longer than the table says; a draft costs that, too."""
    tokens, curve = 900, dataclasses.replace(TWO_CORES, drafted=0.0, host=0.3)
    device = Device(curve, PLAIN, in_order=in_order)
    believed = dataclasses.replace(curve, host=0.0).table(PLAIN)
    costs = Costs(("lookup",), {512: Table(PLAIN, believed.verify, (FREE,))})
    drafter = VirtualLookup(np.arange(tokens + SLACK) % 9 < 4, np.zeros(tokens + SLACK, bool))
    virtual.run(Adaptive(costs, 1, device.clock, free={0}), device, [drafter], tokens)
    plain, one = costs.plain(1), costs.verify(1, 1)
    assert plain is not None and one is not None
    # In order, every plain token waits for the host, and a draft loses nothing by that.
    assert one == pytest.approx((1.0 if in_order else 1.3) * PLAIN, rel=0.12)
    assert plain == pytest.approx((1.3 if in_order else 1.0) * PLAIN, rel=0.06)


def test_rounds_in_which_nothing_happens_are_all_learned_from() -> None:
    """They are learned from together; what is then known is what each of them would have taught."""
    tokens, curve, pace = 64, TWO_CORES, [1.0]
    device = Device(curve, PLAIN, noise=lambda: pace[0])
    costs = Costs(("lookup",), {512: Table(PLAIN, curve.table(PLAIN).verify, (FREE,))})
    drafter = VirtualLookup(np.zeros(tokens + SLACK, bool), np.zeros(tokens + SLACK, bool))
    policy = Adaptive(costs, 1, device.clock, free={0})
    virtual.run(policy, device, [drafter], tokens)
    policy.begin()
    timed = costs.timed(1)
    assert timed > 0.9 * tokens
    pace[0] = 1.2
    virtual.run(policy, device, [drafter], tokens)
    policy.begin()
    assert costs.timed(1) > timed + 0.9 * tokens
    assert costs.plain(1) == pytest.approx(1.2 * PLAIN, rel=0.08)


@pytest.mark.parametrize("right", [0.02, 0.45])
def test_the_reason_is_that_of_the_drafter_that_takes_time(right: float) -> None:
    """Lookup, asked in passing for a token that it never had, made all these rounds "probing"."""
    tokens, curve = 120, TWO_CORES
    device, chance = Device(curve, PLAIN), np.random.default_rng(7)
    table = curve.table(PLAIN)
    costs = Costs(("neural", "lookup"), {512: Table(PLAIN, table.verify, (*table.draft, FREE))})
    policy, reasons = Adaptive(costs, 2, device.clock, free={1}), []
    for _ in range(4):
        text = Text.of(np.full(tokens + SLACK, right), chance)
        nothing = np.zeros(tokens + SLACK, bool)
        drafters = [VirtualDrafter(device, text), VirtualLookup(nothing, nothing)]
        reasons += [r.reason for r in virtual.run(policy, device, drafters, tokens).rounds]
    off = (Reason.ACCEPTANCE, Reason.BUDGET, Reason.COST)
    assert sum(reason in off for reason in reasons) > 0.8 * len(reasons), Counter(reasons)


def test_a_drafter_that_takes_time_has_its_turn_in_answers_where_lookup_has_nothing() -> None:
    """It was not looked at while lookup, which had paid, was asked for a token; so it stayed off for good."""
    tokens, curve, speeds = 60, TWO_CORES, []
    device, chance = Device(curve, PLAIN), np.random.default_rng(3)
    costs = Costs(
        ("neural", "lookup"),
        {512: Table(PLAIN, curve.table(PLAIN).verify, (*curve.table(PLAIN).draft, FREE))},
    )
    policy = Adaptive(costs, 2, device.clock, free={1})
    for answer in range(24):
        known = answer >= 12
        text = Text.of(np.full(tokens + SLACK, 0.95 if known else 0.02), chance)
        repeats, wrong = np.full(tokens + SLACK, not known), np.full(tokens + SLACK, answer % 2 == 1)
        drafters = [VirtualDrafter(device, text), VirtualLookup(repeats, wrong)]
        speeds.append(virtual.run(policy, device, drafters, tokens).speed)
    assert sum(speeds[18:]) / len(speeds[18:]) > 1.1, speeds


def test_a_drafter_that_was_right_in_an_answer_is_no_longer_doubted() -> None:
    """It was doubted as the answer began, and drafted because another one would have; now it may go alone."""
    probes = Probes(2, free={1})
    probes.begin({1: 0.5})
    assert probes.doubted == {1}
    probes.drafted(1, accepted=False, doubtful=True)
    assert probes.doubted == {1}
    probes.drafted(1, accepted=True, doubtful=True)
    assert not probes.doubted
    probes.drafted(1, accepted=False, doubtful=True)
    assert not probes.doubted


def shared_policy(curve: Curve, device: Device) -> Adaptive:
    """Of a neural drafter and lookup, with the costs of `curve`."""
    table = curve.table(PLAIN)
    costs = Costs(("neural", "lookup"), {512: Table(PLAIN, table.verify, (*table.draft, FREE))})
    return Adaptive(costs, 2, device.clock, free={1})


def known_answers(curve: Curve, seeds: int) -> float:
    """Times plain decoding, of answers that the neural drafter knows.

    Between them are as many that lookup copies and as many that nobody knows, all short.
    """
    length, answers, seconds, tokens = 40, 30, 0.0, 0
    for seed in range(seeds):
        device, chance = Device(curve, PLAIN), np.random.default_rng(seed)
        policy = shared_policy(curve, device)
        for answer in range(answers):
            kind = ("known", "copied", "neither")[answer % 3]
            text = Text.of(np.full(length + SLACK, 0.95 if kind == "known" else 0.05), chance)
            repeats = np.full(length + SLACK, kind == "copied")
            drafters = [VirtualDrafter(device, text), VirtualLookup(repeats, ~repeats)]
            outcome = virtual.run(policy, device, drafters, length)
            if kind == "known" and answer > 5:
                seconds, tokens = seconds + outcome.seconds / PLAIN, tokens + length
    return tokens / seconds


def test_what_lookup_brings_in_other_answers_says_nothing_against_a_drafter_in_this_one() -> None:
    """A rate with both in it was above what the drafter brings, so plain decoding seemed better: 1.02."""
    curve = dataclasses.replace(TWO_CORES, passes={1: 1.0, 2: 1.5, 3: 2.0, 4: 2.25, 5: 2.4, 8: 3.3, 17: 6.5})
    assert known_answers(curve, 6) > 1.07


def test_a_drafter_whose_shortest_drafts_do_not_pay_is_begun_with_one_of_them() -> None:
    """The first draft of an answer is short, and only longer ones pay: it waited for lookup instead, 0.98."""
    curve = dataclasses.replace(TWO_CORES, passes={1: 1.0, 2: 1.7, 3: 2.3, 4: 2.35, 5: 2.4, 8: 2.8, 17: 6.5})
    assert known_answers(curve, 6) > 1.07


@pytest.mark.parametrize(("dearer", "seed"), [(1.05, 0), (1.1, 2)])
def test_a_drafter_that_is_too_dear_for_now_is_looked_at_while_lookup_is_waited_for(
    dearer: float, seed: int
) -> None:
    """Every other answer begins with what it does not know, which spends room: 578 and 138 rounds waited."""
    passes = {2: 1.5, 3: 2.2, 4: 2.35, 5: 2.5, 8: 3.3, 17: 6.5}
    curve = dataclasses.replace(
        TWO_CORES, passes={1: 1.0, **{rows: 1 + (cost - 1) * dearer for rows, cost in passes.items()}}
    )
    device, chance = Device(curve, PLAIN), np.random.default_rng(seed)
    policy, length, hard, waited = shared_policy(curve, device), 60, 25, 0
    for answer in range(30):
        right, odd = np.full(length + SLACK, 0.97), answer % 2 == 1
        if odd:
            right[:hard] = 0.1
        text = Text.of(right, chance)
        repeats = (chance.random(length + SLACK) < 0.02).repeat(8)[: length + SLACK]
        if odd:
            repeats[:hard] = False
        outcome = virtual.run(
            policy, device, [VirtualDrafter(device, text), VirtualLookup(repeats, ~repeats)], length
        )
        if answer > 9 and odd:
            waited += sum(r.reason is Reason.WAITING for r in outcome.rounds if not r.drafted)
    assert waited < 60
