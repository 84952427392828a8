"""Medusa's small trees at work: the target's own text, side branches accepted, and what users see of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support import fitted, grammars, lossless, tiny
from support.drafting import QUESTIONS, TRAINED, converted
from support.fitted import opened
from support.logprobs import recorded

from mlx_spec import load
from mlx_spec.drafters.medusa import GuessRates
from mlx_spec.drafters.per_request import GrammarFilter
from mlx_spec.model.target import LMTarget
from mlx_spec.model.tree import Tree, tree_of, tree_template
from mlx_spec.pair import Pair
from mlx_spec.policy import AdaptivePolicies, AdaptivePolicy, FixedPolicy, Table
from mlx_spec.sampling import Sampling
from mlx_spec.types import Draft, Drafter, Features, FeatureSpec, Round, Sampler

HEADS, COUNT = 4, 36
RATES = [[0.6, 0.15, 0.07, 0.04]] * HEADS
KINDS, PROMPT = ("full", "sliding", "shared", "quantized"), tiny.prompt(25)
PENALTIES = Sampling(0.9, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.1, seed=3)


def small(nodes: int, height: int = HEADS) -> Tree:
    return tree_template(nodes, RATES[:height]).tree(nodes)


class Scripted(Drafter):
    """Trees whose path of truth goes now by first guesses and now by others, and ends now and then."""

    needs = FeatureSpec()

    def __init__(self, truth: Sequence[int]) -> None:
        self.truth, self.drafts = list(truth), 0

    def observe(self, history: Sequence[int], features: Features) -> None:
        pass

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        ahead = self.truth[len(history) : len(history) + limit]
        self.drafts += 1
        if not ahead:
            return Draft(mx.array([], dtype=mx.int32))
        tree = small(14, len(ahead))
        leaves = [path for path in tree.paths if len(path) > 1]
        path = leaves[5 * self.drafts % len(leaves)][1:]
        tokens = [
            (ahead[depth - 1] + 1 + rank) % 256 for depth, rank in zip(tree.depths, tree.ranks, strict=True)
        ][1:]
        for row in path:
            tokens[row - 1] = ahead[tree.depths[row] - 1]
        return Draft(mx.array(tokens, dtype=mx.int32), parents=tree.parents)


def rounds(kind: str, drafter: Drafter, K: int, sampling: Sampling = lossless.GREEDY) -> list[Round]:
    target = LMTarget(tiny.shallow(kind), kv_bits=tiny.bits_of(kind))
    return lossless.rounds(target, drafter, K, PROMPT, COUNT, sampling=sampling)


@cache
def plain(kind: str, sampling: Sampling = lossless.GREEDY) -> list[int]:
    return lossless.emitted(rounds(kind, Scripted([]), 0, sampling))


# --- the draft


def test_a_tree_of_the_heads_likeliest_tokens(tmp_path: Path) -> None:
    """Node by node from the heads' own rows, in the order of an independent ranking."""
    source, row = opened(fitted.medusa(3), tmp_path), fitted.random_rows(1, 1)[0]
    trees, chain = (each.make(None) for each in (source.trees, source))
    sampler = lossless.GREEDY.sampler(1, 256)
    assert trees.draft(PROMPT, 9, sampler).tokens.size == 0  # nothing was observed
    trees.observe(PROMPT, Features(final_hidden=row))
    chain.observe(PROMPT, Features(final_hidden=row))
    ranked = np.argsort(-np.array(source.network(row, HEADS)), axis=-1, kind="stable")
    for nodes in (1, 2, 7, 16):
        draft = trees.draft(PROMPT, nodes, sampler)
        tree = tree_of(draft.parents)
        assert len(tree.parents) == nodes and draft.probs is None
        for j, token in enumerate(draft.tokens.tolist()):
            assert token == ranked[tree.depths[j + 1] - 1, tree.ranks[j + 1]]
    likeliest = chain.draft(PROMPT, HEADS, sampler).tokens.tolist()
    assert draft.tokens.tolist()[: tree.height] == likeliest[: tree.height]
    assert trees.draft(PROMPT, 0, sampler).tokens.size == 0
    assert trees.draft([*PROMPT, 1], 9, sampler).tokens.size == 0


@pytest.mark.parametrize(("accepted", "chain"), [(HEADS, True), (1, False)])
def test_rates_of_guesses_are_learned(accepted: int, chain: bool) -> None:
    """Where first guesses are right the tree becomes a chain; where only the first one is, it widens."""
    rates, tree = GuessRates(HEADS), small(14)
    drafted = [10 * depth + rank for depth, rank in zip(tree.depths[1:], tree.ranks[1:], strict=True)]
    tokens = [10 * (i + 1) if i < accepted else 99 for i in range(HEADS)]
    for _ in range(300):
        rates.observe(tree, drafted, tokens)
    learned = rates.template().tree(HEADS)
    assert (learned.height == HEADS) is chain
    assert sum(rates.tree_reach()[:HEADS]) == pytest.approx(accepted, abs=0.35)


# --- the text


def check(done: list[Round], nodes: int) -> None:
    """Side branches, whole and partial acceptance, and figures that fit together."""
    trees = [round for round in done if round.nodes]
    assert any(any(round.ranks) for round in trees), "no side branch was accepted"
    assert any(0 < round.accepted < round.drafted for round in trees)
    assert any(rank > 0 and i > 0 for round in trees for i, rank in enumerate(round.ranks))
    for round in trees:
        assert round.accepted <= round.drafted <= round.nodes <= nodes
        assert len(round.ranks) == round.accepted <= len(round.tokens) <= round.accepted + 1


@pytest.mark.parametrize(
    ("kind", "sampling"), [*((kind, lossless.GREEDY) for kind in KINDS), ("sliding", PENALTIES)]
)
def test_scripted_trees_leave_the_text(kind: str, sampling: Sampling) -> None:
    """Past the sliding window; with penalties, which count the tokens of each path."""
    truth = plain(kind, sampling)
    done = rounds(kind, Scripted([*PROMPT, *truth]), 14, sampling)
    assert lossless.emitted(done) == truth, lossless.first_difference(lossless.emitted(done), truth)
    check(done, 14)
    assert len(done) < COUNT // 2


@pytest.mark.parametrize("place", [13, 16, 17])
def test_a_stop_token_inside_a_path(place: int) -> None:
    """The text ends with it, the caches hold all before it, and what follows is right."""
    truth = plain("sliding")
    place = truth.index(truth[place])
    target, drafter = LMTarget(tiny.shallow("sliding")), Scripted([*PROMPT, *truth])
    done = lossless.rounds(target, drafter, 14, PROMPT, COUNT, stop=[truth[place]])
    emitted = lossless.emitted(done)
    assert emitted == truth[: place + 1] and done[-1].finish_reason == "stop"
    assert done[-1].accepted <= len(done[-1].tokens)
    assert target.size == len(PROMPT) + place and target.uncommitted == 0
    again = lossless.rounds(target, drafter, 14, [*PROMPT, *emitted], COUNT - place - 1)
    assert lossless.emitted(again) == truth[place + 1 :]


# --- heads that were trained, from `load` on


PLAIN = 0.03  # seconds of a plain token


class Simulated(AdaptivePolicies):
    """Adaptive policies on a virtual clock: every pass takes as long, drafts take no time."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self.now = 0.0
        self.use(Table(PLAIN, {1: PLAIN, 17: PLAIN}, [{} for _ in names]))

    def policy(self, clock=None, **known: Any) -> AdaptivePolicy:
        policy = super().policy(lambda: self.now, **known)
        observe = policy.observe

        def observe_later(round: Round) -> None:
            self.now += PLAIN
            observe(round)

        policy.observe = observe_later
        return policy


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, Pair]:
    """Trained heads with their target, and the target alone."""
    out = tmp_path_factory.mktemp("trained") / "out"
    converted(*TRAINED["medusa"], out)
    return load(out), load(out, "none")


@pytest.mark.parametrize("sampling", [lossless.GREEDY, Sampling(0.8, top_p=0.95, seed=6)])
def test_trained_heads_draft_trees_where_width_is_free(pairs: tuple[Pair, Pair], sampling: Sampling) -> None:
    """Past the target's window of 16; every answer is the first of its conversation."""
    pair, alone = pairs
    assert pair.drafter_names == ("medusa", "medusa trees", "lookup")
    pair.policies = Simulated(pair.policies.names)
    done: list[Round] = []
    for question in QUESTIONS:
        prompt = [2, *pair.tokenizer.encode(question)]
        found = list(pair.generate(prompt, sampling=sampling, max_tokens=COUNT))
        expected = list(alone.generate(prompt, sampling=sampling, max_tokens=COUNT))
        assert lossless.emitted(found) == lossless.emitted(expected), question
        done += found
    check(done, 16)
    trees = [round for round in done if round.nodes]
    assert len(trees) > 0.6 * sum(round.drafted > 0 for round in done)
    assert {0, 3} <= {round.accepted for round in trees}
    assert sum(round.accepted for round in trees) > 1.5 * len(trees)


# --- what is seen of it


@pytest.mark.parametrize("sampling", [lossless.GREEDY, PENALTIES])
def test_log_probabilities_along_side_branches(sampling: Sampling) -> None:
    """They equal those of plain decoding, token for token."""
    model, found, truth = tiny.shallow("sliding"), [], list[int]()
    for K in (0, 14):
        done, said = recorded(model, Scripted([*PROMPT, *truth]), FixedPolicy(K), sampling, PROMPT)
        truth = lossless.emitted(done)
        found.append(said)
    check(done, 14)
    for off, on in zip(*found, strict=True):
        assert (off.token, [a.token for a in off.top]) == (on.token, [a.token for a in on.top])
        assert on.logprob == pytest.approx(off.logprob, abs=1e-4)


def test_a_grammar_holds_on_every_path() -> None:
    sampling = Sampling(grammar=grammars.compiled("regex", "[a-f]{30}[0-9]{40}"))
    truth = plain("full", sampling)
    assert bytes(truth[:32]).isalnum() and truth != plain("full")
    matcher = sampling.grammar.matcher(PROMPT)
    done = rounds("full", GrammarFilter(Scripted([*PROMPT, *truth]), matcher, len(PROMPT)), 14, sampling)
    assert lossless.emitted(done) == truth, lossless.first_difference(lossless.emitted(done), truth)
    check(done, 14)
