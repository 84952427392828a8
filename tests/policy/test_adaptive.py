"""The adaptive policy: its reasons, its probes, the drafters of requests, and its floors. SIMULATED."""

from __future__ import annotations

import math
import statistics
from collections import Counter

import pytest
from support import policy_sessions
from support.virtual_clock import (
    CURVES,
    PLAIN_SECONDS,
    Device,
    LookupDrafter,
    ModelDrafter,
    decode,
    make_text,
)

from mlx_spec.policy import AdaptivePolicies
from mlx_spec.policy.adaptive import BUFFER
from mlx_spec.types import DraftChoice, Reason, RequestDrafter, Round


def pair(curve, names=("mtp",)):
    device, policies = Device(CURVES[curve]), AdaptivePolicies(names, copying=["lookup"])
    policies.use(CURVES[curve].table([0.0 if name == "lookup" else 1.0 for name in names]))
    return device, policies


def model(rate, length=600):
    draws = [(i * 0.6180339887) % 1 for i in range(length)]  # evenly spread
    return ModelDrafter(draws, [rate] * length)


def first_answer(curve, drafter, tokens):
    device, policies = pair(curve)
    return decode(policies.policy(device.clock), device, [drafter], tokens)


def reasons(answer):
    return Counter(round.reason for round in answer.rounds)


def request_drafter(available, prior=0.75):
    return RequestDrafter("prediction", None, available, prior)


# Reasons


def test_pays_is_said_only_of_an_answer_that_is_faster():
    for curve in CURVES:
        for text in ("code", "kinds", "useless", "switch"):
            device, policies = pair(curve)
            policy = policies.policy(device.clock)
            for index in range(3):
                tokens, seconds = 0, 0.0
                for round in decode(policy, device, make_text(text, 96, [0, index]), 96).rounds:
                    if round.reason is Reason.PAYS:
                        assert tokens >= 16
                        assert seconds < tokens * PLAIN_SECONDS + 1e-9
                    tokens, seconds = tokens + len(round.tokens), seconds + round.seconds


def test_a_good_drafter_is_learned_and_then_pays():
    answer = first_answer("M5 Max", model(0.9), 200)
    assert answer.rounds[0].reason is Reason.LEARNING
    assert answer.rounds[-1].reason is Reason.PAYS


def test_rows_that_cost_too_much():
    answer = first_answer("CUDA linear", model(0.9), 100)
    assert set(reasons(answer)) == {Reason.COST}
    assert all(round.kind == "plain" for round in answer.rounds[:-1])


@pytest.mark.parametrize("name", ["M1 Ultra", "M3 Max", "M4 Pro", "M5 Max", "flat"])
@pytest.mark.parametrize("delay", [2.0, 4.0])
def test_a_delayed_first_round_does_not_turn_drafting_off(name, delay):
    """One round of 4 times its seconds once made all lengths too dear: no draft and no probe followed."""
    seconds = []
    for slowdown in (1.0, delay):
        device, policies = Device(CURVES[name]), AdaptivePolicies(["mtp"])
        policies.use(CURVES[name].table())
        policy = policies.policy(device.clock)
        device.slowdown = slowdown
        decode(policy, device, [ModelDrafter([0.0] * 99, [1.0] * 99)], 3)  # one round
        device.slowdown, start = 1.0, device.now
        for index in range(4):
            decode(policy, device, make_text("ind80", 96, [index]), 96)
        seconds.append(device.now - start)
    assert seconds[1] < 1.1 * seconds[0]


def test_costs_that_keep_a_drafter_off_are_to_be_measured_again():
    """A table from a busy machine used to switch drafting off for good: nothing was timed again."""
    device, policies = Device(CURVES["flat"]), AdaptivePolicies(["mtp"])
    policies.use(CURVES["CUDA linear"].table())
    policy = policies.policy(device.clock)
    due = []
    for _ in range(9):
        decode(policy, device, [model(0.9)], 40)
        due.append(policies.claim_check())
    assert [n for n, is_due in enumerate(due, 1) if is_due] == [1, 2, 4, 8]
    policies.use(CURVES["flat"].table())
    assert decode(policy, device, [model(0.9)], 400).seconds < 0.5 * 400 * PLAIN_SECONDS
    assert not policies.claim_check()


def test_a_useless_drafter_is_probed_now_and_then():
    device, policies = pair("M5 Max")
    policy = policies.policy(device.clock)
    decode(policy, device, [model(0.02)], 500)
    answer = decode(policy, device, [model(0.02)], 500)
    found = reasons(answer)
    assert found[Reason.ACCEPTANCE] > 425
    drafted = [round for round in answer.rounds if round.kind == "draft"]
    assert 1 <= len(drafted) < 35 and all(round.drafted <= 2 for round in drafted)
    assert Reason.PROBE in {round.reason for round in drafted}
    assert answer.seconds < 1.012 * 500 * PLAIN_SECONDS


# Choices


def test_the_first_draft_of_an_answer_is_cautious():
    device, policies = pair("M1 Ultra")
    policy = policies.policy(device.clock)
    policy.begin()
    (choice,) = policy.decide(range(5)).choices
    loss = policies.costs.at(5).seconds(0, choice.limit) / PLAIN_SECONDS - 1
    assert choice.limit == 1 or 0.4 * loss <= 0.4


def test_an_untimed_length_is_approached_by_doubling():
    drafted = [round.drafted for round in first_answer("flat", model(0.99), 300).rounds]
    assert max(drafted) == 16
    for index, length in enumerate(drafted):
        assert length <= max(4, 2 * max(drafted[:index], default=0))


def test_several_drafters():
    device, policies = pair("M5 Max", ("bad", "good", "lookup"))
    drafters = [model(0.1), model(0.9), LookupDrafter([0] * 700, [False] * 700)]
    policy = policies.policy(device.clock)
    decode(policy, device, drafters, 400)
    used = Counter(r.source for r in decode(policy, device, drafters, 400).rounds if r.kind == "draft")
    assert used["good"] > 0.9 * sum(used.values())


def test_trees_bring_their_own_estimate():
    device, policies = pair("flat")
    policy = policies.policy(device.clock, reach={0: lambda: [0.6, 0.3, 0.3, 0.3, 0.3, 0.3, 0.0, 0.0]})
    policy.begin()
    policies.costs.at(1).longest = 16
    policies.account.lead = BUFFER
    policy.observe(Round([0, 0, 0], 3, 2, "draft", nodes=6, drafter_index=0, ranks=(0, 1), seconds=0.04))
    assert policy.decide(range(9)).choices == (DraftChoice(0, 6, "drafter"),)


# Requests


def test_a_request_drafter_alone():
    device, policies = pair("M5 Max", ())
    policies.use(CURVES["M5 Max"].table([]))
    policy = policies.policy(device.clock)
    prediction = LookupDrafter([300] * 400, [True] * 400)
    answer = decode(policy, device, [prediction], 100, [request_drafter(lambda history: 300)])
    assert answer.seconds < 0.5 * 100 * PLAIN_SECONDS
    policy.begin()
    assert policy.decide(range(5)).reason is Reason.NO_DRAFTER


def test_a_queued_token_uses_up_what_a_request_drafter_has():
    device, policies = pair("flat", ())
    policy = policies.policy(device.clock)
    policy.begin([request_drafter(lambda history: 1, prior=0.99)])
    assert policy.decide(range(5)).choices == (DraftChoice(0, 1, "drafter"),)
    policy.observe(Round([0], 0, 0, "plain", seconds=PLAIN_SECONDS))
    assert policy.decide(range(6)).choices == ()
    policy.observe(Round([0], 0, 0, "drained", seconds=PLAIN_SECONDS))
    assert policy.decide(range(7)).choices == (DraftChoice(0, 1, "drafter"),)


def test_a_clock_that_stands_still():
    policies = AdaptivePolicies(["mtp"])
    policies.use(CURVES["M5 Max"].table())
    policy = policies.policy(lambda: 1.0)
    policy.begin()
    for _ in range(20):
        for round in (
            Round([0], 0, 0, "plain"),
            Round([0], 0, 0, "plain"),
            Round([0, 0], 3, 1, "draft", drafter_index=0),
        ):
            policy.decide(range(5))
            policy.observe(round)
    assert policy.decide(range(5)).plain_seconds > 0


# Against the best fixed length, and against the recorded policy


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
    decode(policy, device, make_text(f"ind{percent}", 500, [1]), 500)
    rounds = decode(policy, device, make_text(f"ind{percent}", 500, [2]), 500).rounds
    usual = Counter(round.drafted for round in rounds).most_common(1)[0][0]
    speeds = [speed(curve, percent / 100, length) for length in range(17)]
    assert speeds[usual] >= 0.97 * max(speeds)


def test_some_cells():
    recorded = policy_sessions.read_recorded()
    assert len(recorded) == 864
    chosen = [cell for index, cell in enumerate(recorded) if index % 97 == 0]
    ratios = []
    for cell in chosen:
        seed = len(ratios) % 2
        session = policy_sessions.run_session(cell, seed)
        ratios.append(math.log(recorded[cell]["steps"][seed] / session.steps))
        assert session.plain / session.steps >= policy_sessions.FLOORS["worst session"]
    assert math.exp(statistics.mean(ratios)) >= 1.0
