"""The rounds of `virtual_clock.decode` are those of the engine, at the same times. SIMULATED."""

from __future__ import annotations

import mlx.core as mx
import pytest
from support.virtual_clock import CURVES, LOOKAHEAD, Device, ModelDrafter, decode, make_text

from mlx_spec.decode.loop import generate
from mlx_spec.model.row_class import RowClass
from mlx_spec.policy import AdaptivePolicies, FixedPolicy
from mlx_spec.sampling import Sampling
from mlx_spec.types import MAX_DRAFT_TOKENS, Draft, Features, FeatureSpec, no_draft

VOCAB_SIZE = 4


class TimedTarget:
    """A target that says token 0 everywhere and takes the device's time for it."""

    def __init__(self, device):
        self.device, self.size, self.written = device, 0, []
        self.committed = 0.0  # when the last committed row is done

    @property
    def uncommitted(self):
        return len(self.written)

    reads_spans_whole = False
    nbytes = 0
    rows = RowClass()
    most_rows = MAX_DRAFT_TOKENS + 1

    def copies(self):
        return iter(())

    def prefill(self, tokens, spans, **options):
        self.size += len(tokens)
        return Features()

    def verify(self, tokens, early=True):
        rows = tokens.shape[0]
        self.written += [self.device.submit(self.device.passes[rows])] * rows
        return mx.broadcast_to(mx.eye(VOCAB_SIZE)[0], (rows, VOCAB_SIZE))

    def commit(self, keep):
        self.committed = self.written[keep - 1] if keep else self.committed
        self.size, self.written = self.size + keep, []
        return Features()


class ScriptedDrafter:
    """A drafter of the virtual clock as one of the engine: token 0 is right, token 1 is wrong."""

    needs = FeatureSpec()

    def __init__(self, drafter, device):
        self.drafter, self.device = drafter, device

    def observe(self, history, features):
        pass

    def draft(self, history, limit, sampler):
        right = self.drafter.draft(len(history), limit, self.device)
        return Draft(mx.array([int(not good) for good in right], dtype=mx.int32)) if right else no_draft()


class AfterReading:
    """A policy that sees the clock after the tokens of a round were read."""

    def __init__(self, policy, target):
        self.policy, self.target = policy, target
        self.begin, self.decide, self.settle = policy.begin, policy.decide, policy.settle
        self.times = []

    def observe(self, round):
        self.target.device.read(self.target.committed)
        self.times.append(self.target.device.now)
        self.policy.observe(round)


def seen(round):
    return len(round.tokens), round.kind, round.drafted, round.accepted, round.source, round.reason


@pytest.mark.parametrize("text", ["code", "lookup", "lookup+mtp", "useless"])
@pytest.mark.parametrize("curve", ["M5 Max", "flat"])
@pytest.mark.parametrize("fixed", [None, 3])
def test_same_rounds_as_the_engine(curve, text, fixed):
    names = {"lookup": ("lookup",), "lookup+mtp": ("lookup", "mtp")}.get(text, ("mtp",))
    costs = [0.0 if name == "lookup" else 1.0 for name in names]

    def policies():
        if fixed:
            return FixedPolicy(fixed, names=names)
        adaptive = AdaptivePolicies(names, copying=["lookup"])
        adaptive.use(CURVES[curve].table(costs))
        return adaptive

    virtual, real = Device(CURVES[curve]), Device(CURVES[curve])
    expected = decode(policies().policy(virtual.clock), virtual, make_text(text, 150, [0]), 150).rounds
    target = TimedTarget(real)
    policy = AfterReading(policies().policy(real.clock), target)
    drafters = [ScriptedDrafter(drafter, real) for drafter in make_text(text, 150, [0])]
    sampler = Sampling().sampler(1, VOCAB_SIZE)
    rounds = list(generate(target, drafters, policy, sampler, [0], max_tokens=150))
    assert [seen(round) for round in rounds] == [seen(round) for round in expected]
    assert {"plain", "drained", "draft"} >= {round.kind for round in rounds}
    assert real.now == pytest.approx(virtual.now)


@pytest.mark.parametrize("curve", ["M5 Max", "flat"])
def test_a_text_with_a_period_is_drafted_as_by_the_best_fixed_length(curve):
    count = 600
    length = count + LOOKAHEAD
    text = [ModelDrafter([0.5] * length, [float(i % 5 != 0) for i in range(length)])]

    def seconds(policy_of):
        device = Device(CURVES[curve])
        return decode(policy_of(device), device, text, count).seconds

    def adaptive(device):
        policies = AdaptivePolicies(("mtp",))
        policies.use(CURVES[curve].table([1.0]))
        return policies.policy(device.clock)

    best = min(seconds(lambda device, k=k: FixedPolicy(k)) for k in (0, 1, 2, 3, 4, 5, 6))
    assert seconds(adaptive) < best / 0.9
