"""Trees are drafted where width is free and what they bring is worth it; costs here are simulated.

The virtual clock is that of `virtual.py`; its target says token 0 at every place, on every path.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import fitted
import lossless
import mlx.core as mx
import numpy as np
import pytest
import tiny
from fitted import opened
from virtual import CURVES, VOCABULARY, Clocked, Curve, Device, VirtualTarget

from mlx_spec.branches import Branches
from mlx_spec.drafters.medusa import MedusaTree
from mlx_spec.drafters.model_free import LookupSource
from mlx_spec.engine import generate
from mlx_spec.model.target import LMTarget
from mlx_spec.model.tree import tree_of, tree_template
from mlx_spec.policies import always
from mlx_spec.policy import Fixed
from mlx_spec.sampling import Sampling
from mlx_spec.sequence import SequenceParts
from mlx_spec.target import LMTarget
from mlx_spec.tree import grown, tree_of
from mlx_spec.tuning import profile
from mlx_spec.tuning.costs import Costs
from mlx_spec.tuning.policy import Adaptive
from mlx_spec.tuning.tree import FIRST, SIDE, Branching, Guesses
from mlx_spec.tuning.tuner import Tuner
from mlx_spec.types import Choice, Draft, Features, FeatureSpec, Reason, Round, Sampler

HEADS, PLAIN, TOKENS = 4, 0.03, 600
FLAT = Curve({1: 1.0, 17: 1.05}, drafted=0.02)
STEEP = Curve({1: 1.0, 17: 1 + 16 * 0.3}, drafted=0.02)
KEY = profile.Key("a device", "target", ("drafter",), "8-bit", None, "0.1")


class WideTarget(VirtualTarget):
    """Takes trees, too."""

    def verify_tree(self, tokens: mx.array, parents: tuple[int, ...]) -> mx.array:
        return self.verify(tokens)

    def commit_path(self, rows: Sequence[int]) -> Features:
        return self.commit(len(rows))


class Heads:
    """The right token is guess number `ranks[place]` for its place; beyond the fourth, none is right."""

    needs = FeatureSpec()

    def __init__(self, device: Device, ranks: Sequence[int], *, tells: bool) -> None:
        self.device, self.ranks, self.policy = device, ranks, Fixed(0)
        noise = np.random.default_rng(2).normal(0, 0.1, len(ranks))
        sure = np.where(np.array(ranks) == 0, 0.8, 0.2) + noise
        self.sure = mx.array(np.clip(sure, 0, 0.999).astype(np.float32)) if tells else None

    def observe(self, history: Sequence[int], features: Features) -> None:
        pass

    def guess(self, place: int, rank: int) -> int:
        right = self.ranks[place]
        return 0 if rank == right else 1 + (rank - (rank > right)) % (VOCABULARY - 1)

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        asked = self.policy.tree() if isinstance(self.policy, Branching) else None
        wide = asked is not None and len(asked.parents) <= limit
        tree = asked if wide else tree_of(tuple(range(min(limit, HEADS))))
        self.device.submit(self.device.curve.drafted * tree.height)
        places = zip(tree.depths[1:], tree.ranks[1:], strict=True)
        tokens = [self.guess(len(history) + depth - 1, rank) for depth, rank in places]
        sure = None if wide or self.sure is None else self.sure[len(history) :][: tree.height]
        return Draft(
            mx.array(tokens, dtype=mx.int32), confidence=sure, parents=tree.parents if wide else None
        )


def run(
    curve: Curve, shares: Sequence[float], *, trees: bool, tells: bool = False, seed: int = 1
) -> tuple[float, list[Round], Guesses]:
    """Times plain decoding, where these shares of places are right at the first guess, the second, ..."""
    device, guesses = Device(curve, PLAIN), Guesses()
    ranks = np.random.default_rng(seed).choice(5, TOKENS + 40, p=shares).tolist()
    target, drafter = WideTarget(device), Heads(device, ranks, tells=tells)
    costs = curve.costs(PLAIN)
    inner = Adaptive(costs, 1, device.clock)
    policy = Branching(inner, target, lambda: costs, guesses, 0, HEADS) if trees else inner
    drafter.policy = policy
    sampler = Sampling().sampler(1, VOCABULARY)
    clocked = Clocked(policy, device, target)
    done = list(generate(target, [drafter], clocked, sampler, [0], max_tokens=TOKENS))
    assert lossless.emitted(done) == [0] * TOKENS
    return TOKENS * PLAIN / device.now, done, guesses


MIXED = (0.5, 0.3, 0.1, 0.05, 0.05)


def share(done: list[Round]) -> float:
    """Of drafted rounds: those with a tree."""
    return sum(r.nodes > 0 for r in done) / sum(r.drafted > 0 for r in done)


def test_trees_where_width_is_free() -> None:
    fast, done, _ = run(FLAT, MIXED, trees=True)
    slow, chains, _ = run(FLAT, MIXED, trees=False)
    assert share(done) > 0.8 and share(chains) == 0
    assert fast > 1.15 * slow
    assert any(any(r.ranks) for r in done)


def test_trees_from_the_start_where_confidence_could_cut_a_chain() -> None:
    """Also in the rounds in which it would be learned: short answers have no others."""
    fast, done, _ = run(FLAT, MIXED, trees=True, tells=True)
    slow, chains, _ = run(FLAT, MIXED, trees=False, tells=True)
    assert any(r.confidence for r in chains) and share(done) > 0.8 and share(done[:20]) > 0.6
    assert fast > 1.15 * slow


@pytest.mark.parametrize("tells", [False, True])
def test_chains_where_rows_are_dear(tells: bool) -> None:
    fast, done, _ = run(STEEP, MIXED, trees=True, tells=tells)
    slow, _, _ = run(STEEP, MIXED, trees=False, tells=tells)
    assert share(done) < 0.1
    assert fast > 0.97 * slow


@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("shares", [MIXED, (0.9, 0.02, 0.01, 0.01, 0.06), (0.3, 0.02, 0.01, 0.01, 0.66)])
def test_never_much_slower_than_chains(curve: str, shares: Sequence[float], tells: bool) -> None:
    """Over two texts: which rounds are drafted in depends on every round before them."""
    fast, slow = (
        np.mean([run(CURVES[curve], shares, trees=trees, tells=tells, seed=seed)[0] for seed in (1, 2)])
        for trees in (True, False)
    )
    assert fast > 0.95 * slow and fast > 0.92


def test_side_guesses_that_are_never_right_are_given_up() -> None:
    _, _, guesses = run(FLAT, (0.6, 0.0, 0.0, 0.0, 0.4), trees=True)
    first, second, *_ = guesses.rates(HEADS)[0]
    assert first == pytest.approx(0.6, abs=0.1) and second < 0.06


def test_no_tree_where_costs_are_guessed() -> None:
    costs = Costs(("drafter",))
    costs.saw_plain(10, PLAIN)
    assert costs.guessed(10)
    policy = Branching(Fixed(4), WideTarget(Device(FLAT)), lambda: costs, Guesses(), 0, HEADS)
    assert policy.better(Choice(0, 4), 10) is None


def test_only_in_place_of_a_chain_that_pays() -> None:
    """Fixed lengths, other drafters and rounds behind a token in flight are left alone."""
    costs = FLAT.costs(PLAIN)
    target = WideTarget(Device(FLAT))
    history = [0] * 9

    def decided(reason: Reason, drafter: int = 0) -> bool:
        policy = Branching(Fixed(4, reason), target, lambda: costs, Guesses(), drafter, HEADS)
        decision = policy.decide(history)
        assert decision.choices[0].limit == (len(policy.tree().parents) if policy.tree() else 4)
        return policy.tree() is not None

    assert decided(Reason.PAYS)
    assert not decided(Reason.FIXED) and not decided(Reason.PAYS, drafter=1)
    target.verify(mx.array([1]))
    assert not decided(Reason.PAYS)


def test_expected_tokens_are_those_of_a_count() -> None:
    rates = [[0.5, 0.3, 0.1, 0.0], [0.4, 0.2, 0.1, 0.0], [0.6, 0.1, 0.1, 0.0]]
    growth = tree_template(9, rates)
    tree, rng, total, count = growth.tree(9), np.random.default_rng(0), 0, 8000
    for _ in range(count):
        row = 0
        while children := [j + 1 for j, parent in enumerate(tree.parents) if parent == row]:
            depth = tree.depths[row]
            guess = int(rng.choice(5, p=[*rates[depth], 1 - sum(rates[depth])]))
            if guess >= len(children):
                break
            row = children[guess]
        total += tree.depths[row] + 1
    assert 1 + sum(growth.reach) == pytest.approx(total / count, abs=0.04)


def test_guesses_are_learned_by_depth_and_rank() -> None:
    guesses = Guesses()
    assert guesses.rates(1)[0][:2] == pytest.approx([FIRST, SIDE * (1 - FIRST)])
    for _ in range(500):
        guesses.saw([1], [3, 0], ended=False)  # the second guess for the first place, which is a leaf
    first, second, *_ = guesses.rates(2)[0]
    assert first < 0.06 and second > 0.85
    assert guesses.rates(2)[1][0] == FIRST, "nothing was seen of the second place"
    for _ in range(300):
        guesses.saw([], [2, 0], ended=True)  # the text ended: nothing is known
    assert guesses.rates(2)[1][0] == FIRST


def test_the_policy_below_hears_of_the_chain_in_the_tree() -> None:
    heard: list[Round] = []

    class Listening(Fixed):
        def observe(self, round: Round) -> None:
            heard.append(round)

    costs = FLAT.costs(PLAIN)
    policy = Branching(
        Listening(4, Reason.PAYS), WideTarget(Device(FLAT)), lambda: costs, Guesses(), 0, HEADS
    )
    nodes, tree = policy.decide([0] * 9).choices[0].limit, policy.tree()
    assert tree is not None
    policy.observe(Round([5, 6, 7], tree.height, 2, drafter=0, proposed=nodes, nodes=nodes, ranks=(0, 1)))
    policy.observe(Round([5], 4, 0, drafter=0, proposed=4))  # there was no room for the tree
    policy.observe(Round([5], 0, 0))
    first, chain, plain = heard
    assert (first.accepted, first.drafted, first.proposed) == (1, len(tree.segments[0]) - 1, 4)
    assert (first.nodes, first.tokens) == (nodes, [5, 6, 7])
    assert (chain.accepted, chain.drafted, chain.nodes, plain.drafted) == (0, 4, 4, 0)


# --- in a pair


def decoding(folder: Path, kind: str = "full") -> tuple[Branches, SequenceParts]:
    source = opened(fitted.medusa(4 if kind == "recurrent" else 3, HEADS), folder)
    target = LMTarget(getattr(tiny, kind)(), source.needs)
    sources = (source, LookupSource())
    return Branches(sources), SequenceParts(target, tuple(s.make(target.parts) for s in sources), Fixed(0))


def test_offered_with_measured_costs(tmp_path: Path) -> None:
    branches, parts = decoding(tmp_path)
    offered = branches.offered(parts, Tuner(["medusa", "lookup"], KEY, tmp_path))
    assert isinstance(offered.drafters[0], MedusaTree) and offered.drafters[1] is parts.drafters[1]
    assert isinstance(offered.policy, Branching) and offered.policy.tree() is None
    assert offered.drafters[0].needs == parts.drafters[0].needs


def test_not_offered_with_a_number_or_to_recurrent_targets(tmp_path: Path) -> None:
    branches, parts = decoding(tmp_path)
    assert branches.offered(parts, always(4, disabled=False)) is parts
    branches, parts = decoding(tmp_path / "recurrent", "recurrent")
    assert branches.offered(parts, Tuner(["medusa", "lookup"], KEY, tmp_path)) is parts
    assert Branches([LookupSource()]).offered(parts, Tuner(["lookup"], KEY, tmp_path)) is parts
